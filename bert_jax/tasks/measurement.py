"""The metrics of a task on its files: in the training loop, at its end, and for `bert-jax evaluate`."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bert_jax.config import ModelConfig, TrainConfig
from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model.runtime import Runtime
from bert_jax.tasks import named, registry
from bert_jax.tasks.inference import Predictor, task_params, tokenizer_of, with_max_length, with_null_threshold
from bert_jax.tasks.kinds.classification import ClassificationTask
from bert_jax.tasks.kinds.embedding import EmbeddingTask
from bert_jax.tasks.labels import NamedLabelsTask, check_names
from bert_jax.tasks.reading import tables
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.registry import task_of
from bert_jax.tasks.rows import TaskRows
from bert_jax.tasks.task import Task
from bert_jax.tokenization.vocabulary import Vocabulary
from bert_jax.train import sharding
from bert_jax.train.run import runtime_of
from bert_jax.train.step import Plan


def counts(rows: TaskRows, task: Task, tokenizer: Vocabulary) -> dict[str, int]:
    """The size of a split: examples (sentences), rows, tokens, unknown_tokens, truncated, and Task.describe.

    Also left_out, the number of unreadable lines (Split.left_out), if there are any.
    """
    found = {
        "examples": len(rows.split.items),
        "rows": rows.count,
        "tokens": len(rows.input_ids),
        "unknown_tokens": int((rows.input_ids == tokenizer.unk_id).sum()) if tokenizer.has_unknown else 0,
        "truncated": rows.truncated,
    }
    if rows.split.left_out:
        found["left_out"] = rows.split.left_out
    return found | task.describe(rows).counts


def file_remarks(path: Path) -> list[str]:
    """A message, as a list of lines, if a path stands for several files (tables.files_of)."""
    count = len(tables.files_of(path))
    return [f"{path}: reading all {count} files of this data set as one"] if count > 1 else []


def remarks(rows: TaskRows, task: Task, training: bool = False) -> list[str]:
    """Warnings about a split, one line each: what was cut or left out, and Task.describe."""
    found = []
    if rows.split.left_out:
        found.append(
            f"{rows.split.path}: {rows.split.left_out} lines are skipped, because their number of fields differs"
        )
    if rows.truncated:
        what = rows.cut_part or f"of {len(rows.split.items)} examples"
        limit = f"task.{rows.cut_option}={getattr(task, rows.cut_option)}"
        found.append(f"{rows.split.path}: {rows.truncated} {what} lost tokens to {limit}")
    return found + task.describe(rows, training).remarks


def measure_in_training(
    task: Task, rows: TaskRows, batch_size: int, plan: Plan, mesh: Mesh, params: dict[str, Any], _steps_done: int
) -> dict[str, float]:
    """Measures the task on labelled rows: a Run's evaluator, once its first three arguments are bound."""
    return Predictor(task, plan.model, _compiling_fast(plan.runtime), mesh).measure(params, rows, batch_size)


def measure(
    task: Task, model: ModelConfig, config: TrainConfig, params: Mapping[str, Any], rows: TaskRows
) -> dict[str, float]:
    """The task's metrics, and task_loss, of labelled rows with trained parameters. config says how to run the model."""
    mesh = sharding.make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        predictor = Predictor(task, model, _compiling_fast(runtime_of(config)), mesh)
        return predictor.measure(params, rows, config.evaluation_rows(config.batch_size))


def _compiling_fast(runtime: Runtime) -> Runtime:
    """With layers in a scan, unless model.layer_loop is set: files are small, and each length of rows is compiled."""
    return dataclasses.replace(runtime, layer_loop="scan") if runtime.layer_loop == "auto" else runtime


@dataclass(frozen=True)
class Evaluation:
    """metrics by name (with the metric_prefix of their split); counts by split; remarks on all splits."""

    metrics: dict[str, float]
    counts: dict[str, dict[str, int]]
    remarks: tuple[str, ...] = ()


def evaluate(
    loaded: LoadedModel,
    data: str | Path,
    config: TrainConfig | None = None,
    columns: Columns | None = None,
    label_map: Mapping[str, str] | None = None,
    max_length: int = 0,
    metrics: Sequence[str] = (),
    positive: str = "",
    null_threshold: float | None = None,
    truncate_dim: int = 0,
) -> Evaluation:
    """Measures a fine-tuned checkpoint on a labelled file, or on all labelled splits of a folder except train.

    Args:
        columns: the columns of the file, if they differ from those of training (a Hugging Face folder records none).
        label_map: FILE_LABEL:LABEL,... if the file writes other labels than the model.
        max_length, truncate_dim: replace those of training, unless they are 0.
        metrics: the metrics to return; empty: as in training (accuracy and macro_f1 of a Hugging Face folder, with
            positive accuracy and f1).
        positive: the class that f1, precision and recall are of.
        null_threshold: the probability above which a question has no answer; None: that of the checkpoint.
        config: how to run the model (batch_size, compute_dtype).

    Thresholds that the checkpoint does not record, such as those of a run that has not ended, are 1/2, as in
    predictions. Raises UserError for a checkpoint that was not fine-tuned, an option that its task does not have, an
    unknown label or metric, and a folder without labelled files.
    """
    config = config or TrainConfig(batch_size=32)
    task = with_max_length(task_of(loaded), max_length, loaded.model)
    task = dataclasses.replace(task, columns=(columns or task.columns).filled(task.columns))
    task = with_null_threshold(task, null_threshold)
    task = task.calibrated({})  # thresholds chosen on the measured file would flatter the model
    task = _with_options(task, label_map, metrics, positive, truncate_dim)
    if truncate_dim:
        task.check_model(loaded.model)
    found = {name: registry.read(task, path, label_required=False) for name, path in _files(task, Path(data)).items()}
    labelled = {split: content for split, content in found.items() if content.labelled}
    if not labelled:
        raise UserError(f"{data} has no labels (column {task.columns.label!r}), which evaluation needs")
    tokenizer = tokenizer_of(loaded)
    params = task_params(loaded, task, sharding.make_mesh(config.mesh))
    values: dict[str, float] = {}
    sizes: dict[str, dict[str, int]] = {}
    messages: list[str] = []
    for name, split in labelled.items():
        if metrics:
            task.metric_names(split, explicit=True)
        rows = task.encode(split, tokenizer)
        sizes[name] = counts(rows, task, tokenizer)
        split_task = task if metrics else registry.metrics_of(task, _split_of(task, name, split.path))
        measured = measure(split_task, loaded.model, config, params, rows)
        values |= {f"{metric_prefix(name)}{metric}": value for metric, value in measured.items()}
        messages += file_remarks(split.path) + remarks(rows, split_task)
        if math.isnan(measured["task_loss"]) and any(jnp.isnan(leaf).any() for leaf in jax.tree.leaves(params)):
            messages.append(f"{split.path}: metrics mean nothing, as parameters are NaN; use an earlier checkpoint")
    return Evaluation(values, sizes, tuple(messages))


def _with_options(
    task: Task, label_map: Mapping[str, str] | None, metrics: Sequence[str], positive: str, truncate_dim: int
) -> Task:
    """The task with the options that are given, each of which only some kinds have."""

    def changed(kind: Any, flag: str, value: object, lacks: str, **changes: Any) -> Task:
        if not isinstance(task, kind):
            raise UserError(f"--{flag} is {value!r}, but a task of kind {task.kind} has no {lacks}; omit it")
        return dataclasses.replace(task, **changes)

    if label_map:
        task = changed(NamedLabelsTask, "label_map", label_map, "labels to map", label_map=dict(label_map))
    if truncate_dim:
        task = changed(EmbeddingTask, "truncate_dim", truncate_dim, "vectors", truncate_dim=truncate_dim)
    if positive:
        task = changed(ClassificationTask, "positive", positive, "positive class", positive=positive, metrics=())
        task = task.with_metrics()
    names = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    check_names("--metrics", names)
    return dataclasses.replace(task, metrics=names) if names else task


def metric_prefix(split: str) -> str:
    """The prefix of the metrics of a split: none for dev, else its name (`test_`, `dev_mismatched_`)."""
    return "" if split in ("dev", "data") else f"{split}_"


def _split_of(task: Task, name: str, path: Path) -> str:
    """The split of a file; where a file was named, by its name."""
    return named.TASKS[task.name].split_of(path) if name == "data" and task.name in named.TASKS else name


def _files(task: Task, data: Path) -> dict[str, Path]:
    """The files to measure, by split; a single file is called `data`."""
    if not data.is_dir():
        return {"data": data}
    splits = [split for split in registry.splits_of(task.name) if split != "train"]
    folder = registry.find_folder(task.name, data, splits) if task.name in named.TASKS else data
    found = {split: path for split in splits if (path := registry.find_split(task.name, folder, split))}
    if not found:
        raise UserError(f"{folder} contains neither dev nor test of the task (such as dev.tsv). Name a file")
    return found
