"""Runs a model over encoded rows: the one loop behind evaluation, predict, report, embed and features.

`run_batches` is the loop. `Predictor` computes the answers of a task, `FineTuned` holds a checkpoint with its task, and
`LayerVectors` computes vectors of layers.
"""

import dataclasses
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float64, Int, Int64

from bert_jax.config import MeshConfig, ModelConfig, ModelOptions, TrainConfig
from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params, bind
from bert_jax.model.heads.basic import pool_rows, unit_vectors
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import LayerSelection
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.batches import sorted_batches
from bert_jax.tasks.kinds.question import QuestionTask
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.registry import task_of
from bert_jax.tasks.rows import Split, TaskBatch, TaskRows
from bert_jax.tasks.task import Task, TaskObjective
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train import sharding
from bert_jax.train.objectives import Terms
from bert_jax.train.run import runtime_of

# By checkpoint, and by mesh and path: a caller that predicts several times with one LoadedModel uploads it once.
_UPLOADED: "weakref.WeakKeyDictionary[LoadedModel, dict[tuple[Mesh, str], Any]]" = weakref.WeakKeyDictionary()


def device_params(loaded: LoadedModel, mesh: Mesh, wanted: Iterable[str]) -> dict[str, Any]:
    """The parameters of these paths, nested by module, on the devices of the mesh.

    They are copied once for each mesh, and freed with the LoadedModel; later changes of its arrays have no effect.
    """
    wanted = tuple(wanted)
    held = _UPLOADED.setdefault(loaded, {})
    if missing := {path: loaded.params[path] for path in wanted if (mesh, path) not in held}:
        placed = layers.flatten(sharding.put(layers.unflatten(missing), mesh))
        held.update({(mesh, path): leaf for path, leaf in placed.items()})
    return layers.unflatten({path: held[mesh, path] for path in wanted})


class _Kept(threading.local):
    """Each thread has its own, because several threads cannot use a Tokenizer at once."""

    def __init__(self) -> None:
        self.by_model: weakref.WeakKeyDictionary[LoadedModel, Tokenizer] = weakref.WeakKeyDictionary()


_KEPT = _Kept()


def tokenizer_of(loaded: LoadedModel) -> Tokenizer:
    """The tokenizer of a checkpoint, the same object in each call of a thread."""
    found = _KEPT.by_model.get(loaded)
    if found is None:
        found = _KEPT.by_model[loaded] = Tokenizer(loaded.vocabulary.spec)
    return found


# Runs a model over encoded rows: the one loop of evaluation, predict, report, embed and features.
#
# Rows of similar length share a batch , each padded length is compiled once, every process places
# the rows that its devices own, and results are returned in the order of the rows.


def run_batches(
    compute: Callable[[TaskBatch], Any], batches: Iterable[tuple[Int64[np.ndarray, "B"], TaskBatch]], mesh: Mesh
) -> Iterator[tuple[Int64[np.ndarray, "B"], Any]]:
    """compute(batch) as numpy arrays for each batch, with the indices of its rows (-1: a filler).

    compute is a compiled function. Each process passes the rows of the batch that its devices own. The devices compute
    a batch while the caller uses the results of the one before it, and while the next one is made.
    """
    computing: tuple[np.ndarray, Any] | None = None
    for indices, batch in batches:
        local = sharding.local_rows(len(indices), mesh)
        part = jax.tree.map(lambda leaf, rows=local: leaf[rows], batch)
        with jax.set_mesh(mesh):
            placed = sharding.place(part, len(indices), mesh)
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
        return sorted_batches(rows, sharding.whole_rows(batch_size, self._mesh), self._task.max_length)


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
        mesh = sharding.make_mesh(config.mesh)
        sharding.whole_rows(batch_size, mesh)  # raises UserError for a batch size below 1
        self.batch_size = batch_size
        self._predictor = Predictor(self.task, loaded.model, runtime_of(config), mesh)
        self._params = task_params(loaded, self.task, mesh)

    def encode(self, split: Split[Any]) -> TaskRows:
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
    wanted = layers.flatten(abstract_params(loaded.model, task.objective().heads))
    return device_params(loaded, mesh, wanted)


def _fill(answers: list[Any], indices: Int64[np.ndarray, "B"], found: Any) -> None:
    for place, index in enumerate(indices):
        if index >= 0:
            answers[index] = jax.tree.map(operator.itemgetter(place), found)


# Programs are cached by what they compute, so that the evaluations of several seeds, and of all splits, share them.
@functools.cache
def _compiled(
    function: Callable[..., Any], objective: TaskObjective, model: ModelConfig, runtime: Runtime, mesh: Mesh
) -> Callable[..., Any]:
    compute = functools.partial(function, objective, model, runtime)
    return jax.jit(compute, out_shardings=sharding.replicated(mesh), compiler_options=sharding.options(mesh))


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


class LayerVectors:
    """A model that computes vectors of layers, pooled over each row (none, cls, mean, max or last).

    Vectors are divided by their lengths if normalize is set, then cut to their first truncate_dim dimensions (0: all).
    With cut_first they are cut before, so that they have length 1 in the end.

    widths has the width of the vectors by name of the layers (model/outputs.py), in the order of the results.
    Raises UserError for layers that the model does not have.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        layers: Sequence[str],
        *,
        pool: str = "none",
        normalize: bool = False,
        truncate_dim: int = 0,
        cut_first: bool = False,
        dtype: str = "float32",
        compute_dtype: str = "float32",
    ) -> None:
        selections = tuple(LayerSelection.parse(name, loaded.model.layers) for name in layers)
        widths = [one.width(loaded.model.width) for one in selections]
        self.widths = {name: min(width, truncate_dim or width) for name, width in zip(layers, widths, strict=True)}
        self.dtype = dtype
        self.mesh = sharding.make_mesh(MeshConfig())
        # Each length is compiled separately, so the layer loop that compiles fast is used.
        runtime = runtime_of(TrainConfig(model=ModelOptions(layer_loop="scan"), compute_dtype=compute_dtype))
        params = device_params(loaded, self.mesh, loaded.params)
        pool = "none" if pool == "words" else pool
        finish = Finish(pool, normalize, truncate_dim or None, cut_first, dtype)
        self._compute = functools.partial(_selected, loaded.model, loaded.heads, runtime, selections, finish, params)

    def run(
        self, batches: Iterable[tuple[Int64[np.ndarray, "B"], TaskBatch]]
    ) -> Iterator[tuple[Int64[np.ndarray, "B"], tuple[np.ndarray, ...]]]:
        """For each batch the indices of its rows (-1: a filler) and one array [B, W] or [B, T, W] per name."""
        return run_batches(self._compute, batches, self.mesh)


class Finish(NamedTuple):
    """What is done with the hidden states of layers."""

    pool: str
    normalize: bool
    truncate_dim: int | None
    cut_first: bool
    dtype: str

    def of(self, hidden: Float[Array, "B T W"], sequence_ids: Int[Array, "B T"]) -> Float[Array, "B *T _"]:
        """The vectors of rows or, where nothing is pooled, of tokens."""
        vectors = hidden if self.pool == "none" else pool_rows(self.pool, hidden, sequence_ids)
        if self.cut_first:
            vectors = vectors[..., : self.truncate_dim]
        vectors = unit_vectors(vectors) if self.normalize else vectors
        return vectors[..., : self.truncate_dim].astype(self.dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _selected(
    config: ModelConfig,
    heads: Heads,
    runtime: Runtime,
    selections: tuple[LayerSelection, ...],
    finish: Finish,
    params: dict[str, Any],
    batch: TaskBatch,
) -> tuple[Float[Array, "B *T _"], ...]:
    inner = any(one.inner(config.layers) for one in selections)
    encoded = bind(config, heads, params, runtime).encode(batch, all_layers=inner)
    return tuple(finish.of(one.of(encoded, config.layers), batch.sequence_ids) for one in selections)
