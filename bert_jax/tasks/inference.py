"""Runs a model over encoded rows: the one loop of evaluation, predict, report, embed and features.

Rows of similar length share a batch (length_batches.py), each padded length is compiled once, every process places the
rows that its devices own, and results are returned in the order of the rows.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float64, Int64

from bert_jax.command import UserError
from bert_jax.config import ModelConfig, ModelOptions, TrainConfig
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import paths
from bert_jax.model.bert import abstract_params
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.device_params import device_params
from bert_jax.tasks.example import Split, TaskBatch, TaskRows
from bert_jax.tasks.kinds.question import QuestionTask
from bert_jax.tasks.length_batches import sorted_batches
from bert_jax.tasks.loaded_tokenizer import tokenizer_of
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import Task
from bert_jax.tasks.task_json import task_of
from bert_jax.train import compiler, partitioning
from bert_jax.train.objectives import Terms
from bert_jax.train.run import runtime_of


def run_batches(
    compute: Callable[[TaskBatch], Any], batches: Iterable[tuple[Int64[np.ndarray, "B"], TaskBatch]], mesh: Mesh
) -> Iterator[tuple[Int64[np.ndarray, "B"], Any]]:
    """compute(batch) as numpy arrays for each batch, with the indices of its rows (-1: a filler).

    compute is a compiled function. Each process passes the rows of the batch that its devices own. The devices compute
    a batch while the caller uses the results of the one before it, and while the next one is made.
    """
    computing: tuple[np.ndarray, Any] | None = None
    for indices, batch in batches:
        local = partitioning.local_rows(len(indices), mesh)
        part = jax.tree.map(lambda leaf, rows=local: leaf[rows], batch)
        with jax.set_mesh(mesh):
            placed = partitioning.place(part, len(indices), mesh)
            finished = None if computing is None else (computing[0], jax.device_get(computing[1]))
            computing = indices, compute(placed)
        if finished is not None:
            yield finished
    if computing is not None:
        yield computing[0], jax.device_get(computing[1])


class Predictor:
    """Computes the answers of a task's model. Losses ignore class weights and label smoothing (Task.measured)."""

    def __init__(self, task: Task, model: ModelConfig, runtime: Runtime, mesh: Mesh) -> None:
        self._task = task
        self._mesh = mesh
        self._settings = task.measured.objective(), model, runtime, mesh

    def answers(self, params: Mapping[str, Any], rows: TaskRows, batch_size: int) -> tuple[list[Any], float]:
        """TaskObjective.answers of each row, in order, and the mean loss, which is NaN without labels."""
        compute = functools.partial(_compiled(_answer, *self._settings), params)
        answers: list[Any] = [None] * rows.count
        loss = count = 0.0
        for indices, (found, terms, weight) in run_batches(compute, self._batches(rows, batch_size), self._mesh):
            loss, count = loss + float(terms["task"].loss), count + float(weight)
            _fill(answers, indices, found)
        return answers, loss / count if count else float("nan")

    def item_losses(
        self, params: Mapping[str, Any], rows: TaskRows, batch_size: int
    ) -> tuple[list[Any], Float64[np.ndarray, "K"]]:
        """The answers of labelled rows, and the mean loss of each item over its labels, NaN where it has none."""
        compute = functools.partial(_compiled(_row_losses, *self._settings), params)
        answers: list[Any] = [None] * rows.count
        parts = np.zeros((2, rows.count))  # the summed loss and the count of each row
        for indices, (found, *sums) in run_batches(compute, self._batches(rows, batch_size), self._mesh):
            _fill(answers, indices, found)
            parts[:, indices[indices >= 0]] = np.stack(sums)[:, indices >= 0]
        total, count = (np.bincount(rows.items(), part, len(rows.split.items)) for part in parts)
        return answers, np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)

    def measure(self, params: Mapping[str, Any], rows: TaskRows, batch_size: int) -> dict[str, float]:
        """The task's metrics, and task_loss, of labelled rows."""
        answers, loss = self.answers(params, rows, batch_size)
        return self._task.measure(rows, answers) | {"task_loss": loss}

    def _batches(self, rows: TaskRows, batch_size: int) -> Iterator[tuple[Int64[np.ndarray, "B"], TaskBatch]]:
        return sorted_batches(rows, partitioning.whole_rows(batch_size, self._mesh), self._task.max_length)


class FineTuned:
    """A fine-tuned checkpoint with its parameters on all devices.

    task is that of the checkpoint, with other columns where these are named, rows of up to max_length tokens (0: as in
    training), and null_threshold (None: that of the checkpoint). Raises UserError for a checkpoint that was not
    fine-tuned, for a max_length that exceeds the model's positions, and for a null_threshold of another kind of task.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        batch_size: int = 32,
        max_length: int = 0,
        compute_dtype: str = "auto",
        columns: Columns | None = None,
        null_threshold: float | None = None,
    ) -> None:
        task = with_max_length(task_of(loaded), max_length, loaded.model)
        task = with_null_threshold(task, null_threshold)
        if columns:  # without the label, so that a table without a header may be described by numbers alone
            task = dataclasses.replace(
                task, columns=dataclasses.replace(columns.filled(task.columns), label=columns.label)
            )
        self.task = task
        self.names_columns = columns not in (None, Columns())
        self.tokenizer = tokenizer_of(loaded)
        # Each length is compiled separately, so the layer loop that compiles fast is used.
        config = TrainConfig(compute_dtype=compute_dtype, model=ModelOptions(layer_loop="scan"), batch_size=batch_size)
        mesh = partitioning.make_mesh(config.mesh)
        partitioning.whole_rows(batch_size, mesh)  # raises UserError for a batch size below 1
        self.batch_size = batch_size
        self._predictor = Predictor(self.task, loaded.model, runtime_of(config), mesh)
        self._params = task_params(loaded, self.task, mesh)

    def encode(self, split: Split[Any]) -> TaskRows:
        """Task.encode."""
        return self.task.encode(split, self.tokenizer)

    def answers(self, rows: TaskRows) -> list[Any]:
        """TaskObjective.answers of each row, in order; a small number of rows is run as a small batch."""
        size = min(self.batch_size, 1 << (rows.count - 1).bit_length())
        return self._predictor.answers(self._params, rows, size)[0]

    def item_losses(self, rows: TaskRows) -> tuple[list[Any], Float64[np.ndarray, "K"]]:
        """Predictor.item_losses."""
        return self._predictor.item_losses(self._params, rows, self.batch_size)

    def predictions(self, rows: TaskRows) -> list[dict[str, Any]]:
        """Task.predictions of each item of the split that the rows encode, in order."""
        return self.task.predictions(rows, self.answers(rows))


def with_max_length(task: Task, max_length: int, model: ModelConfig) -> Task:
    """The task with rows of up to max_length tokens; 0: as in training. Raises UserError for other numbers."""
    if max_length and not 8 <= max_length <= model.max_positions:
        raise UserError(f"--max_length is {max_length}; use 8 to {model.max_positions} (the positions)")
    return dataclasses.replace(task, max_length=max_length or task.max_length)


def with_null_threshold(task: Task, threshold: float | None) -> Task:
    """The task as one of questions that may have no answer, with this threshold; None: as in training.

    Raises UserError for other kinds of tasks, and for a threshold that is not a probability.
    """
    if threshold is None:
        return task
    if not isinstance(task, QuestionTask):
        raise UserError(f"--null_threshold is {threshold}, but a task of kind {task.kind} has no questions; omit it")
    return task.with_null_threshold(threshold)


def task_params(loaded: LoadedModel, task: Task, mesh: Mesh) -> dict[str, Any]:
    """The parameters of a checkpoint that the task's model reads, on the devices of the mesh."""
    wanted = paths.flatten(abstract_params(loaded.model, task.objective().heads))
    return device_params(loaded, mesh, wanted)


def _fill(answers: list[Any], indices: Int64[np.ndarray, "B"], found: Any) -> None:
    """Puts the answers of a batch at the indices of its rows."""
    for place, index in enumerate(indices):
        if index >= 0:
            answers[index] = jax.tree.map(operator.itemgetter(place), found)


# Programs are cached by what they compute, so that the evaluations of several seeds, and of all splits, share them.
@functools.cache
def _compiled(
    function: Callable[..., Any], objective: TaskObjective, model: ModelConfig, runtime: Runtime, mesh: Mesh
) -> Callable[..., Any]:
    compute = functools.partial(function, objective, model, runtime)
    return jax.jit(compute, out_shardings=partitioning.replicated(mesh), compiler_options=compiler.options(mesh))


def _answer(
    objective: TaskObjective, model: ModelConfig, runtime: Runtime, params: dict[str, Any], batch: TaskBatch
) -> tuple[Any, Terms, Array]:
    bound = objective.bind(model, params, runtime)
    outputs = objective.outputs(bound, batch, None)
    terms = objective.terms_of(bound, outputs, batch)
    return objective.answers(bound, outputs, batch), terms, objective.counts(batch)["task"]


def _row_losses(
    objective: TaskObjective, model: ModelConfig, runtime: Runtime, params: dict[str, Any], batch: TaskBatch
) -> tuple[Any, Float[Array, "B"], Float[Array, "B"]]:
    """The answers, and of each row the summed loss and the count that divides it."""
    bound = objective.bind(model, params, runtime)
    outputs = objective.outputs(bound, batch, None)

    def of_row(outputs: Any, row: TaskBatch) -> tuple[Array, Array]:
        alone, one = jax.tree.map(lambda leaf: leaf[None], (outputs, row))
        return objective.terms_of(bound, alone, one)["task"].loss, objective.counts(one)["task"]

    return objective.answers(bound, outputs, batch), *jax.vmap(of_row)(outputs, batch)
