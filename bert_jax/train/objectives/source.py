"""Training batches with the fields of an objective."""

from typing import Any

import numpy as np

from bert_jax.train.objectives.objective import Objective, extended_batch


class ObjectiveSource:
    """The batches of a source (train/run.py), each with the objective's own fields."""

    def __init__(self, source: Any, objective: Objective) -> None:
        self._source, self._objective = source, objective
        self.fingerprints = source.fingerprints
        self.changes = tuple(sorted({*source.changes, *objective.changes}))

    def rows_at(self, step: int) -> int:
        """Rows of a step's global batch."""
        return self._source.rows_at(step)

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Any:
        """The global batch of a step, or those of its rows that are picked."""
        return extended_batch(self._objective, self._objective.batch_at(step, self._source.batch(step, rows)))
