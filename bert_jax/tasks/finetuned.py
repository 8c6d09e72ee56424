"""A fine-tuned model at work: what it says of splits without labels, or of labelled ones for a report."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Float64

from bert_jax.command import UserError
from bert_jax.config import ModelConfig, ModelOptions, TrainConfig
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import paths
from bert_jax.model.bert import abstract_params
from bert_jax.model.runtime import Runtime
from bert_jax.tasks import measurement
from bert_jax.tasks.example import Split, TaskBatch, TaskRows
from bert_jax.tasks.input_records import InputRecord
from bert_jax.tasks.kinds import kind_of
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task_source import evaluation_batches
from bert_jax.train import partitioning
from bert_jax.train.run import runtime_of


class FineTuned:
    """A checkpoint of a task, its parameters on all devices.

    task is that of the checkpoint, with other columns where they are named, and rows of up to max_length tokens (0: as
    it was trained with). Raises UserError for a checkpoint that was not fine-tuned, and a max_length that the model
    does not have.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        batch_size: int = 32,
        max_length: int = 0,
        compute_dtype: str = "auto",
        columns: Columns | None = None,
    ) -> None:
        task = measurement.task_of(loaded)
        if max_length and not 8 <= max_length <= loaded.model.max_positions:
            raise UserError(f"--max_length is {max_length}; use 8 to {loaded.model.max_positions} (the positions)")
        if columns:  # of labels none is asked for, so that a table without a header may be named by numbers alone
            task = dataclasses.replace(
                task, columns=dataclasses.replace(columns.filled(task.columns), label=columns.label)
            )
        self.task = dataclasses.replace(task, max_length=max_length or task.max_length)
        self.kind = kind_of(self.task)
        self.tokenizer = loaded.tokenizer
        # A program a length is compiled, so a loop that compiles fast.
        config = TrainConfig(compute_dtype=compute_dtype, model=ModelOptions(layer_loop="scan"), batch_size=batch_size)
        self._mesh = partitioning.make_mesh(config.mesh)
        partitioning.whole_rows(batch_size, self._mesh)  # refuses a batch of none
        self.batch_size = batch_size
        runtime = runtime_of(config)
        objective = self.kind.objective(self.task.measured)
        self._predictor = measurement.Predictor(self.task, loaded.model, runtime, self._mesh)
        self._forward = objective, loaded.model, runtime
        wanted = paths.flatten(abstract_params(loaded.model, objective.heads))
        params = paths.unflatten({path: loaded.params[path] for path in wanted})
        self._params = partitioning.put(params, self._mesh)

    def parse(self, source: Path, records: Sequence[InputRecord]) -> Split[Any]:
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

    def outcomes(self, rows: TaskRows) -> tuple[list[Any], Float64[np.ndarray, "K"]]:
        """Of labelled rows: answers, and the loss of each item, a mean over its labels, NaN where it has none."""
        size = partitioning.whole_rows(self.batch_size, self._mesh)
        answers: list[Any] = [None] * rows.count
        sums = np.zeros((2, rows.count))
        with jax.set_mesh(self._mesh):
            for indices, batch in evaluation_batches(rows, size, self.task.max_length):
                placed = partitioning.place(batch, size, self._mesh)
                found, *parts = jax.device_get(_outcomes(*self._forward, self._params, placed))
                for place, index in enumerate(indices):
                    if index >= 0:
                        answers[index] = jax.tree.map(operator.itemgetter(place), found)
                sums[:, indices[indices >= 0]] = np.stack(parts)[:, indices >= 0]
        assert rows.split is not None
        total, count = (np.bincount(rows.items(), part, len(rows.split.items)) for part in sums)
        return answers, np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)

    def predictions(self, rows: TaskRows) -> list[dict[str, Any]]:
        """Kind.predictions of each item of the split that the rows were made of, in order."""
        return self.kind.predictions(self.task, rows, self.answers(rows))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _outcomes(
    objective: TaskObjective, model: ModelConfig, runtime: Runtime, params: dict[str, Any], batch: TaskBatch
) -> tuple[Any, Float[Array, "B"], Float[Array, "B"]]:
    """Of each row what it is answered from, the loss, summed, and the count that divides it."""
    bound = objective.bind(model, params, runtime)
    outputs = objective.outputs(bound, batch, None)

    def of_row(outputs: Any, row: TaskBatch) -> tuple[Array, Array]:
        alone, one = jax.tree.map(lambda leaf: leaf[None], (outputs, row))
        return objective.terms_of(bound, alone, one)["task"].loss, objective.counts(one)["task"]

    return objective.answers(bound, outputs, batch), *jax.vmap(of_row)(outputs, batch)
