"""Metrics of a task on a file: inside the training loop, at its end, and for `bert_jax.evaluate`."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array

from bert_jax import config as config_lib
from bert_jax.command import UserError
from bert_jax.config import ModelConfig, TrainConfig
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import paths
from bert_jax.model.bert import abstract_params
from bert_jax.model.runtime import Runtime
from bert_jax.tasks import reading, registry
from bert_jax.tasks.example import TaskBatch, TaskRows
from bert_jax.tasks.kinds import kind_of
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import Task
from bert_jax.tasks.task_source import evaluation_batches
from bert_jax.tokenizer import Tokenizer
from bert_jax.train import partitioning, trainer
from bert_jax.train.evaluate import Evaluator
from bert_jax.train.objectives import Terms
from bert_jax.train.steps import Plan


def counts(rows: TaskRows, task: Task, tokenizer: Tokenizer) -> dict[str, int]:
    """What a split holds: examples (sentences), rows, tokens, unknown_tokens, truncated, and what its kind counts.

    Where lines could not be read (Split.left_out), also how many.
    """
    assert rows.split is not None
    found = {
        "examples": len(rows.split.items),
        "rows": rows.count,
        "tokens": len(rows.input_ids),
        "unknown_tokens": int((rows.input_ids == tokenizer.unk_id).sum()) if tokenizer.has_unknown else 0,
        "truncated": rows.truncated,
    }
    if rows.split.left_out:
        found["left_out"] = rows.split.left_out
    return found | kind_of(task).counts(rows)


def told_of_files(path: Path) -> list[str]:
    """What a user should know before a split is read, a line each: that it is more than the file that was named."""
    count = len(reading.files_of(path))
    return [f"{path}: all {count} files of its name, whose rows are counted on"] if count > 1 else []


def remarks(rows: TaskRows, task: Task) -> list[str]:
    """What a user should know of a split before it is used, a line each: what was cut or left out, and Kind.remarks."""
    assert rows.split is not None
    told = []
    if rows.split.left_out:
        told.append(f"{rows.split.path}: {rows.split.left_out} lines have another number of fields, so are left out")
    if rows.truncated:
        what = rows.cut_part or f"of {len(rows.split.items)} examples"
        limit = f"task.{rows.cut_option}={getattr(task, rows.cut_option)}"
        told.append(f"{rows.split.path}: {rows.truncated} {what} lost tokens to {limit}")
    return told + kind_of(task).remarks(task, rows)


class Predictor:
    """A model's answers on encoded rows. Losses are plain (Task.measured), whatever the classes weigh in training."""

    def __init__(self, task: Task, model: ModelConfig, runtime: Runtime, mesh: Mesh) -> None:
        self._task = task
        self._mesh = mesh
        self._answer = _compiled(kind_of(task).objective(task.measured), model, runtime, mesh)

    def answers(self, params: Mapping[str, Any], rows: TaskRows, batch_size: int) -> tuple[list[Any], float]:
        """Of each row, in order, TaskObjective.answers; and the mean loss, NaN without labels."""
        size = partitioning.whole_rows(batch_size, self._mesh)
        local = partitioning.local_rows(size, self._mesh)
        answers: list[Any] = [None] * rows.count
        loss = count = 0.0
        for indices, batch in evaluation_batches(rows, size, self._task.max_length):
            part = jax.tree.map(lambda leaf: leaf[local], batch)
            found, terms, weight = jax.device_get(self._answer(params, partitioning.place(part, size, self._mesh)))
            loss, count = loss + float(terms["task"].loss), count + float(weight)
            for place, index in enumerate(indices):
                if index >= 0:
                    answers[index] = jax.tree.map(operator.itemgetter(place), found)
        return answers, loss / count if count else float("nan")

    def measure(self, params: Mapping[str, Any], rows: TaskRows, batch_size: int) -> dict[str, float]:
        """The task's metrics, and task_loss, of labelled rows."""
        answers, loss = self.answers(params, rows, batch_size)
        return kind_of(self._task).measure(self._task, rows, answers) | {"task_loss": loss}


def make_evaluator(task: Task, rows: TaskRows, batch_size: int) -> Callable[[Plan, Mesh], Evaluator]:
    """What trainer.Run.evaluators takes."""

    def make(plan: Plan, mesh: Mesh) -> Evaluator:
        predictor = Predictor(task, plan.model, plan.runtime, mesh)
        return lambda params, _: predictor.measure(params, rows, batch_size)

    return make


def measure(
    task: Task, model: ModelConfig, config: TrainConfig, params: Mapping[str, Any], rows: TaskRows
) -> dict[str, float]:
    """The task's metrics, and task_loss, of labelled rows with trained parameters, run as config says."""
    mesh = partitioning.make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        predictor = Predictor(task, model, trainer.runtime_of(config), mesh)
        return predictor.measure(params, rows, config.eval.batch_size or config.batch_size)


@dataclass(frozen=True)
class Evaluation:
    """metrics by name (metric_prefix of their split before them); counts by split; remarks of all of them."""

    metrics: dict[str, float]
    counts: dict[str, dict[str, int]]
    remarks: tuple[str, ...] = ()


def evaluate(
    loaded: LoadedModel, data: str | Path, config: TrainConfig | None = None, columns: Columns | None = None
) -> Evaluation:
    """Measures a fine-tuned checkpoint on a labelled file, or on all the labelled splits of a folder but train.

    The file has the columns of the files it was trained on where columns names no others (a Hugging Face folder does
    not tell its own). config says how to run (batch_size, compute_dtype).
    Raises UserError for a checkpoint that was not fine-tuned, a label it does not know, and a folder without such
    files.
    """
    config = config or TrainConfig(batch_size=32)
    task = task_of(loaded)
    task = dataclasses.replace(task, columns=(columns or task.columns).filled(task.columns))
    found = {name: registry.read(task, path, label_required=False) for name, path in _files(task, Path(data)).items()}
    labelled = {split: content for split, content in found.items() if content.labelled}
    if not labelled:
        raise UserError(f"{data} has no labels (column {task.columns.label!r}); evaluation needs them")
    wanted = paths.flatten(abstract_params(loaded.model, kind_of(task).objective(task).heads))
    params = paths.unflatten({path: loaded.params[path] for path in wanted})
    params = partitioning.put(params, partitioning.make_mesh(config.mesh))
    metrics: dict[str, float] = {}
    sizes: dict[str, dict[str, int]] = {}
    told: list[str] = []
    for name, split in labelled.items():
        rows = kind_of(task).encode(task, split, loaded.tokenizer)
        sizes[name] = counts(rows, task, loaded.tokenizer)
        split_task = registry.metrics_of(task, _split_of(task, name, split.path))
        measured = measure(split_task, loaded.model, config, params, rows)
        metrics |= {f"{metric_prefix(name)}{metric}": value for metric, value in measured.items()}
        told += told_of_files(split.path) + remarks(rows, split_task)
    return Evaluation(metrics, sizes, tuple(told))


def task_of(loaded: LoadedModel) -> Task:
    """The task that a checkpoint was fine-tuned for. Raises UserError when there is none."""
    if not loaded.task:
        raise UserError(
            "this checkpoint was not fine-tuned for a task; fine-tune it first: python -m bert_jax.finetune"
        )
    known = {field.name for field in dataclasses.fields(Task)}
    task = config_lib.load(Task, {key: value for key, value in loaded.task.items() if key in known}, "task")
    max_length = min(task.max_length, loaded.model.max_positions)
    return dataclasses.replace(
        task,
        max_length=max_length,
        metrics=task.metrics or kind_of(task).default_metrics(task),
        pooling=loaded.heads.pooling if task.pooled else task.pooling,  # others' layouts name no task
    )


def metric_prefix(split: str) -> str:
    """What stands before the metrics of a split: nothing for dev, else its name (`test_`, `dev_mismatched_`)."""
    return "" if split in ("dev", "data") else f"{split}_"


def _split_of(task: Task, name: str, path: Path) -> str:
    """The split that a file is, where a file was named."""
    return registry.TASKS[task.name].split_of(path) if name == "data" and task.name in registry.TASKS else name


def _files(task: Task, data: Path) -> dict[str, Path]:
    """What to measure, by name."""
    if not data.is_dir():
        return {"data": data}
    splits = [split for split in registry.splits_of(task.name) if split != "train"]
    folder = registry.find_folder(task.name, data, splits) if task.name in registry.TASKS else data
    found = {split: path for split in splits if (path := registry.find_split(task.name, folder, split))}
    if not found:
        raise UserError(f"{folder} holds neither dev nor test of the task (as dev.tsv or dev.conllu). Name a file")
    return found


@functools.cache
def _compiled(objective: TaskObjective, model: ModelConfig, runtime: Runtime, mesh: Mesh) -> Callable[..., Any]:
    """_answer for parameters and a batch; one program a length, shared by all that ask for the same."""
    answer = functools.partial(_answer, objective, model, runtime)
    return jax.jit(answer, out_shardings=partitioning.replicated(mesh))


def _answer(
    objective: TaskObjective, model: ModelConfig, runtime: Runtime, params: dict[str, Any], batch: TaskBatch
) -> tuple[Any, Terms, Array]:
    bound = objective.bind(model, params, runtime)
    outputs = objective.outputs(bound, batch, None)
    terms = objective.terms_of(bound, outputs, batch)
    return objective.answers(bound, outputs, batch), terms, objective.counts(batch)["task"]
