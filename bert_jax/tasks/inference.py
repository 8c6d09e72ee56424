"""Runs a model over encoded rows: the one loop behind evaluation, predict, report, embed and features.

`run_batches` is the loop. `Predictor` computes a task's answers, `FineTuned` is a checkpoint with its task, and
`LayerVectors` computes the vectors of layers.
"""

import dataclasses
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

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
from bert_jax.model.heads.config import Heads, pool_parts
from bert_jax.model.outputs import LayerSelection
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.batches import sorted_batches
from bert_jax.tasks.kinds.question import QuestionTask
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.registry import restore_task
from bert_jax.tasks.rows import Split, TaskBatch, TaskRows
from bert_jax.tasks.task import Task, TaskObjective
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train import sharding
from bert_jax.train.objectives import Terms
from bert_jax.train.run import make_runtime

# By checkpoint, and by mesh and path: a caller that predicts several times with one LoadedModel uploads it once.
_UPLOADED: "weakref.WeakKeyDictionary[LoadedModel, dict[tuple[Mesh, str], Any]]" = weakref.WeakKeyDictionary()
# Tokenizers by checkpoint, for the current thread alone, because several threads cannot use a Tokenizer at once.
_OF_THREAD = threading.local()


def device_params(loaded: LoadedModel, mesh: Mesh, wanted: Iterable[str]) -> dict[str, Any]:
    """Puts the parameters at these paths on the devices of the mesh, nested by module.

    They are copied once for a mesh, and freed with the LoadedModel. Later changes of its arrays have no effect.
    """
    # Only what is missing is copied: heads of other objectives may be on the devices already.
    paths = tuple(wanted)
    placed = _UPLOADED.setdefault(loaded, {})
    if missing := {path: loaded.params[path] for path in paths if (mesh, path) not in placed}:
        leaves = layers.flatten(sharding.put(layers.unflatten(missing), mesh))
        placed.update({(mesh, path): leaf for path, leaf in leaves.items()})
    return layers.unflatten({path: placed[mesh, path] for path in paths})


def shared_tokenizer(loaded: LoadedModel) -> Tokenizer:
    """Returns a checkpoint's tokenizer, the same object in all calls of a thread."""
    by_model = _OF_THREAD.__dict__.setdefault("tokenizers", weakref.WeakKeyDictionary())
    if loaded not in by_model:
        by_model[loaded] = Tokenizer(loaded.vocabulary.spec)
    tokenizer: Tokenizer = by_model[loaded]
    return tokenizer


def run_batches(
    compute: Callable[[TaskBatch], Any], batches: Iterable[tuple[Int64[np.ndarray, "B"], TaskBatch]], mesh: Mesh
) -> Iterator[tuple[Int64[np.ndarray, "B"], Any]]:
    """Yields compute(batch) as numpy arrays, with the indices of the batch's rows (-1: a filler).

    Args:
        compute: A compiled function. Several processes call it together.
    """
    # The devices compute a batch while the caller uses the results of the last one, and while the next one is made.
    computing: tuple[np.ndarray, Any] | None = None
    for indices, batch in batches:
        # A process places only the rows that its devices own.
        local = sharding.local_rows(len(indices), mesh)
        part = jax.tree.map(lambda leaf, rows=local: leaf[rows], batch)
        # Only for these lines: a generator that yields inside the context would leave the mesh set in its caller.
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
        """Returns the rows' answers (TaskObjective.answers), in order, and the mean loss, NaN without labels."""
        answers, others = self._run(_answer, params, rows, batch_size)
        loss = sum(float(terms["task"].loss) for _, (terms, _) in others)
        count = sum(float(weight) for _, (_, weight) in others)
        return answers, loss / count if count else float("nan")

    def item_losses(
        self, params: Mapping[str, Any], rows: TaskRows, batch_size: int
    ) -> tuple[list[Any], Float64[np.ndarray, "K"]]:
        """Returns the answers of labelled rows, and by item the mean loss over its labels, NaN without labels."""
        answers, others = self._run(_row_losses, params, rows, batch_size)
        sums = np.zeros((2, rows.count))  # by row, the summed loss and the count
        for indices, parts in others:
            sums[:, indices[indices >= 0]] = np.stack(parts)[:, indices >= 0]
        # An item may have several rows.
        total, count = (np.bincount(rows.items(), part, len(rows.split.items)) for part in sums)
        return answers, np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)

    def measure(self, params: Mapping[str, Any], rows: TaskRows, batch_size: int) -> dict[str, float]:
        """Returns the task's metrics, and task_loss, on labelled rows."""
        answers, loss = self.answers(params, rows, batch_size)
        return self._task.measure(rows, answers) | {"task_loss": loss}

    def _run(
        self, function: Callable[..., Any], params: Mapping[str, Any], rows: TaskRows, batch_size: int
    ) -> tuple[list[Any], list[tuple[Int64[np.ndarray, "B"], Sequence[Any]]]]:
        """Runs a function of batches; returns the answers by row, and the row indices and other results by batch."""
        compute = functools.partial(_compiled(function, *self._settings), params)
        batches = sorted_batches(rows, sharding.whole_rows(batch_size, self._mesh), self._task.max_length)
        answers: list[Any] = [None] * rows.count
        others = []
        for indices, (outputs, *rest) in run_batches(compute, batches, self._mesh):
            for place in np.flatnonzero(indices >= 0):
                answers[indices[place]] = jax.tree.map(operator.itemgetter(place), outputs)
            others.append((indices, rest))
        with jax.set_mesh(self._mesh):
            return list(self._task.joined(rows, answers, functools.partial(self._joint_answers, params))), others

    def _joint_answers(self, params: Mapping[str, Any], inputs: Any) -> Any:
        return jax.device_get(_compiled(_joint, *self._settings)(params, inputs))


class FineTuned:
    """A fine-tuned checkpoint with its parameters on all devices.

    Args:
        max_length: The maximum tokens of a row; 0: as in training.
        columns: Columns that differ from the checkpoint's.
        null_threshold: For questions; by default, the checkpoint's.

    Raises:
        UserError: The checkpoint was not fine-tuned, or max_length or null_threshold does not fit it.
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
        task = with_max_length(restore_task(loaded), max_length, loaded.model)
        task = with_null_threshold(task, null_threshold)
        if columns:
            # Without the task's own label, so that numbers alone may describe a table without a header.
            task = dataclasses.replace(
                task, columns=dataclasses.replace(columns.filled(task.columns), label=columns.label)
            )
        self.task = task
        # Whether the user names columns, which lines of text do not have.
        self.names_columns = columns not in (None, Columns())
        self.tokenizer = shared_tokenizer(loaded)
        # A scan over layers compiles fast, and padded lengths are compiled separately.
        config = TrainConfig(compute_dtype=compute_dtype, model=ModelOptions(layer_loop="scan"), batch_size=batch_size)
        mesh = sharding.make_mesh(config.mesh)
        sharding.whole_rows(batch_size, mesh)  # raises UserError for a batch size below 1
        self.batch_size = batch_size
        self._predictor = Predictor(self.task, loaded.model, make_runtime(config), mesh)
        self._params = task_params(loaded, self.task, mesh)

    def encode(self, split: Split[Any]) -> TaskRows:
        return self.task.encode(split, self.tokenizer)

    def answers(self, rows: TaskRows) -> list[Any]:
        """Returns the rows' answers (TaskObjective.answers), in order. Few rows are run as a small batch."""
        # A power of two, because each batch size is compiled separately.
        size = min(self.batch_size, 1 << (rows.count - 1).bit_length())
        return self._predictor.answers(self._params, rows, size)[0]

    def item_losses(self, rows: TaskRows) -> tuple[list[Any], Float64[np.ndarray, "K"]]:
        """Predictor.item_losses."""
        return self._predictor.item_losses(self._params, rows, self.batch_size)

    def predictions(self, rows: TaskRows) -> list[dict[str, Any]]:
        """Returns the predictions for the items that the rows encode, in order (see Task.predictions)."""
        return self.task.predictions(rows, self.answers(rows))


def with_max_length(task: Task, max_length: int, model: ModelConfig) -> Task:
    """Sets the maximum length of rows; 0: as in training. Raises UserError if the model does not support it."""
    if max_length and not 8 <= max_length <= model.max_positions:
        raise UserError(f"--max_length is {max_length}; use 8 to {model.max_positions} (the positions)")
    return dataclasses.replace(task, max_length=max_length or task.max_length)


def with_null_threshold(task: Task, threshold: float | None) -> Task:
    """Sets the threshold of questions, which then may have no answer; None: as in training.

    Raises:
        UserError: The task has no questions, or the threshold is not a probability.
    """
    if threshold is None:
        return task
    check_kind(task, QuestionTask, "null_threshold", threshold, "questions")
    return cast(QuestionTask, task).with_null_threshold(threshold)


def check_kind(task: Task, kind: type, flag: str, value: object, lacks: str) -> None:
    """Raises UserError for a flag that only another kind of task has."""
    if not isinstance(task, kind):
        raise UserError(f"--{flag} is {value!r}, but a task of kind {task.kind} has no {lacks}; omit it")


def task_params(loaded: LoadedModel, task: Task, mesh: Mesh) -> dict[str, Any]:
    """Puts the parameters for the task's model on the mesh's devices."""
    wanted = layers.flatten(abstract_params(loaded.model, task.objective().heads))
    return device_params(loaded, mesh, wanted)


# Programs are cached by what they compute, so that the evaluations of several seeds, and of all splits, share them.
@functools.cache
def _compiled(
    function: Callable[..., Any], objective: TaskObjective, model: ModelConfig, runtime: Runtime, mesh: Mesh
) -> Callable[..., Any]:
    compute = functools.partial(function, objective, model, runtime)
    # Every process decodes all answers, so the results are replicated.
    options = sharding.options(mesh, runtime.compiler_options)
    return jax.jit(compute, out_shardings=sharding.replicated(mesh), compiler_options=options)


def _answer(
    objective: TaskObjective, model: ModelConfig, runtime: Runtime, params: dict[str, Any], batch: TaskBatch
) -> tuple[Any, Terms, Array]:
    bound = objective.bind(model, params, runtime)
    outputs = objective.outputs(bound, batch, None)
    terms = objective.loss_terms(bound, outputs, batch)
    return objective.answers(bound, outputs, batch), terms, objective.counts(batch)["task"]


def _joint(objective: TaskObjective, model: ModelConfig, runtime: Runtime, params: dict[str, Any], inputs: Any) -> Any:
    return objective.joint_answers(objective.bind(model, params, runtime), inputs)


def _row_losses(
    objective: TaskObjective, model: ModelConfig, runtime: Runtime, params: dict[str, Any], batch: TaskBatch
) -> tuple[Any, Float[Array, "B"], Float[Array, "B"]]:
    """Computes the answers and, by row, the summed loss and the count that divides it."""
    bound = objective.bind(model, params, runtime)
    outputs = objective.outputs(bound, batch, None)

    def row_loss(outputs: Any, row: TaskBatch) -> tuple[Array, Array]:
        # An objective sums over a batch, so a row is made a batch.
        outputs, batch = jax.tree.map(lambda leaf: leaf[None], (outputs, row))
        return objective.loss_terms(bound, outputs, batch)["task"].loss, objective.counts(batch)["task"]

    return objective.answers(bound, outputs, batch), *jax.vmap(row_loss)(outputs, batch)


class Finish(NamedTuple):
    """How hidden states become vectors. Hashable, because programs are cached by it."""

    pool: str = "none"  # none, words (as none), or poolings of heads/config.VECTOR_POOLINGS
    normalize: bool = False  # divide vectors by their lengths
    truncate_dim: int = 0  # the number of first dimensions that are kept; 0: all
    cut_first: bool = False  # cut vectors before they are divided, so that they have length 1 in the end
    dtype: str = "float32"

    def vectors(self, hidden: Float[Array, "B T W"], sequence_ids: Int[Array, "B T"]) -> Float[Array, "B *T _"]:
        """Returns the vectors for rows or, if nothing is pooled, for tokens."""
        vectors = hidden if self.pool in ("none", "words") else pool_rows(self.pool, hidden, sequence_ids)
        if self.cut_first:
            vectors = vectors[..., : self.truncate_dim or None]
        vectors = unit_vectors(vectors) if self.normalize else vectors
        # After cut_first, this cut changes nothing.
        return vectors[..., : self.truncate_dim or None].astype(self.dtype)


class LayerVectors:
    """A model that computes layers' vectors. `widths` has their widths by layer name, in the order of results.

    Args:
        layers: Layer names (model/outputs.py).

    Raises:
        UserError: The model does not have a layer.
    """

    def __init__(
        self, loaded: LoadedModel, layers: Sequence[str], finish: Finish, compute_dtype: str = "float32"
    ) -> None:
        selections = tuple(LayerSelection.parse(name, loaded.model.layers) for name in layers)
        widths = [selection.width(loaded.model.width) for selection in selections]
        limit = finish.truncate_dim
        parts = len(pool_parts(finish.pool))
        self.widths = {
            name: min(width * parts, limit or width * parts) for name, width in zip(layers, widths, strict=True)
        }
        self.dtype = finish.dtype
        self.mesh = sharding.make_mesh(MeshConfig())
        # A scan over layers compiles fast, and padded lengths are compiled separately.
        runtime = make_runtime(TrainConfig(model=ModelOptions(layer_loop="scan"), compute_dtype=compute_dtype))
        params = device_params(loaded, self.mesh, loaded.params)
        self._compute = functools.partial(_selected, loaded.model, loaded.heads, runtime, selections, finish, params)

    def run(
        self, batches: Iterable[tuple[Int64[np.ndarray, "B"], TaskBatch]]
    ) -> Iterator[tuple[Int64[np.ndarray, "B"], tuple[np.ndarray, ...]]]:
        """Yields, by batch, the indices of its rows (-1: a filler) and one array [B, W] or [B, T, W] per layer name."""
        return run_batches(self._compute, batches, self.mesh)


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
    # Inner layers are kept only if a selection reads them, because they take memory.
    inner = any(selection.inner(config.layers) for selection in selections)
    encoded = bind(config, heads, params, runtime).encode(batch, all_layers=inner)
    return tuple(finish.vectors(selection.of(encoded, config.layers), batch.sequence_ids) for selection in selections)
