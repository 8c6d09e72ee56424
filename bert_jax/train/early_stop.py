"""Early stopping: ends a run whose held-out metric has not improved for a number of evaluations."""

import math
from collections.abc import Mapping
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from bert_jax.errors import UserError
from bert_jax.storage.location import location, read_json
from bert_jax.train.checkpoint import BEST_FILE
from bert_jax.train.evaluation import Best
from bert_jax.train.workdir import CHECKPOINTS, latest_step, read_config, saved_steps


class EarlyStop:
    """Counts evaluations since the best one (Goodfellow et al. 2016, algorithm 7.1, whose p is `patience`).

    `step` and `evaluation` are those of the best so far, the earliest among equals; `step` is None until the metric
    was finite once. A value that is not finite counts as no improvement.
    """

    def __init__(
        self,
        patience: int,
        best: Best,
        saved: Mapping[str, Any],
        first: int,
        evaluations: Mapping[int, Mapping[str, float]] = MappingProxyType({}),
    ) -> None:
        """Starts counting at step `first`, where the run begins or resumes.

        best          the metric and its values so far
        saved         the `state` in the checkpoint from which the run resumes
        evaluations   the metrics of the saved steps; the best of them counts where the run had no early stopping
                      until now, or used another metric
        """
        self.patience = patience
        self._best = best
        if saved.get("metric", best.metric) != best.metric:
            saved = {}
        self.step: int | None = saved.get("step")
        self.value: float = saved.get("value", math.nan)
        self.evaluation: dict[str, float] = dict(saved.get("evaluation", {}))
        self.waited: int = saved.get("waited", 0)
        earlier = best.among([step for step, found in evaluations.items() if step <= first and found])
        if not saved and earlier is not None:
            self.step, self.value = earlier, best.values[earlier]
            self.evaluation = dict(evaluations[earlier])
        if self.step is not None:
            best.values[self.step] = self.value  # keeps its checkpoint even if SIGTERM came before best.json named it

    @property
    def stopped(self) -> bool:
        """Whether the run should end."""
        return self.waited >= self.patience

    def note(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Counts the evaluation of a step. Call it once for each, in order."""
        value = self._best.value_in(evaluation)
        if value is not None and (self.step is None or self._best.is_better(value, self.value)):
            self.step, self.value, self.evaluation, self.waited = step, value, dict(evaluation), 0
        else:
            self.waited += 1

    def state(self) -> dict[str, Any]:
        """Returns the part that a checkpoint keeps, as JSON values."""
        values = {"metric": self._best.metric, "waited": self.waited}
        if self.step is None:
            return values
        return values | {"step": self.step, "value": self.value, "evaluation": self.evaluation}


def check(patience: int, best: str) -> None:
    """Raises UserError for a negative patience, or for early stopping without a metric."""
    if patience < 0:
        raise UserError(f"early_stop is {patience}; expected a number of evaluations, or 0 to train to the end")
    if patience and not best:
        raise UserError(f"early_stop={patience} needs a metric to compare evaluations by; set --config.checkpoint.best")


def has_stopped_early(patience: int, metric: str, meta: Mapping[str, Any]) -> bool:
    """Whether a run stopped early, by this metric, at the checkpoint with this metadata (empty: the run begins).

    A run that stopped by another metric goes on: its evaluations without improvement count from there (EarlyStop).
    """
    saved = meta.get("early_stop", {})
    if meta.get("unlogged", False) or saved.get("metric", metric) != metric:
        return False
    return saved.get("waited", 0) >= patience > 0


def selected_step(workdir: str | PurePath) -> int | None:
    """Returns the step that represents a workdir: the best of a run with early_stop, else the newest, or None."""
    newest = latest_step(workdir)
    note = location(workdir) / CHECKPOINTS / BEST_FILE
    if newest is None or not read_config(workdir).training.get("early_stop") or not note.exists():
        return newest
    step = read_json(note).get("step")
    return step if step in saved_steps(workdir) else newest
