"""A fine-tuned model at work: what it says of splits without labels, or of labelled ones for a report."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from bert_jax.command import UserError
from bert_jax.config import ModelOptions, TrainConfig
from bert_jax.interop.loaded import Loaded
from bert_jax.model import paths
from bert_jax.model.bert import abstract_params
from bert_jax.tasks import evaluation
from bert_jax.tasks.example import Split, TaskRows
from bert_jax.tasks.inputs import Record
from bert_jax.tasks.kinds import kind_of
from bert_jax.tasks.reading import Columns
from bert_jax.train import partitioning
from bert_jax.train.run import runtime_of


class FineTuned:
    """A checkpoint of a task, its parameters on all devices.

    task is that of the checkpoint, with other columns where they are given, and rows of up to max_length tokens (0: as
    it was trained with). Raises UserError for a checkpoint that was not fine-tuned, and a max_length that the model
    does not have.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        batch_size: int = 32,
        max_length: int = 0,
        compute_dtype: str = "auto",
        columns: Columns | None = None,
    ) -> None:
        task = evaluation.task_of(loaded)
        if max_length and not 8 <= max_length <= loaded.model.max_positions:
            raise UserError(f"--max_length is {max_length}; use 8 to {loaded.model.max_positions} (the positions)")
        self.task = dataclasses.replace(task, columns=columns or task.columns, max_length=max_length or task.max_length)
        self.kind = kind_of(self.task)
        self.tokenizer = loaded.tokenizer
        # A program a length is compiled, so a loop that compiles fast.
        config = TrainConfig(compute_dtype=compute_dtype, model=ModelOptions(layer_loop="scan"), batch_size=batch_size)
        self._mesh = partitioning.make_mesh(config.mesh)
        partitioning.whole_rows(batch_size, self._mesh)  # refuses a batch of none
        self.batch_size = batch_size
        self._predictor = evaluation.Predictor(self.task, loaded.model, runtime_of(config), self._mesh)
        wanted = paths.flatten(abstract_params(loaded.model, self.kind.objective(self.task).heads))
        params = paths.unflatten({path: loaded.params[path] for path in wanted})
        self._params = partitioning.put(params, self._mesh)

    def parse(self, source: Path, records: Sequence[Record]) -> Split[Any]:
        """Kind.parse."""
        return self.kind.parse(self.task, source, records)

    def encode(self, split: Split[Any]) -> TaskRows:
        """Kind.encode."""
        return self.kind.encode(self.task, split, self.tokenizer)

    def answers(self, rows: TaskRows) -> list[Any]:
        """Predictor.answers of each row, in order; a few rows are run as a batch of few."""
        size = min(self.batch_size, 1 << (rows.count - 1).bit_length())
        with jax.set_mesh(self._mesh):
            return self._predictor.answers(self._params, rows, size)[0]

    def predictions(self, rows: TaskRows) -> list[dict[str, Any]]:
        """Kind.predictions of each item of the split that the rows were made of, in order."""
        return self.kind.predictions(self.task, rows, self.answers(rows))
