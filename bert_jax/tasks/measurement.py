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
from bert_jax.tasks import held_out, named, registry
from bert_jax.tasks.inference import (
    Predictor,
    check_kind,
    shared_tokenizer,
    task_params,
    with_max_length,
    with_null_threshold,
)
from bert_jax.tasks.kinds.classification import ClassificationTask
from bert_jax.tasks.kinds.embedding import EmbeddingTask
from bert_jax.tasks.labels import NamedLabelsTask, check_names
from bert_jax.tasks.reading import tables
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.registry import restore_task
from bert_jax.tasks.rows import Split, TaskRows
from bert_jax.tasks.task import Task
from bert_jax.tokenization.vocabulary import Vocabulary
from bert_jax.train import sharding
from bert_jax.train.run import make_runtime
from bert_jax.train.step import Plan


def counts(rows: TaskRows, task: Task, tokenizer: Vocabulary) -> dict[str, int]:
    """Counts examples (sentences), rows, tokens, unknown tokens and truncated examples; adds Task.describe's counts.

    `left_out`, the number of unreadable lines, is present if there are any.
    """
    sizes = {
        "examples": len(rows.split.items),
        "rows": rows.count,
        "tokens": len(rows.input_ids),
        "unknown_tokens": int((rows.input_ids == tokenizer.unk_id).sum()) if tokenizer.has_unknown else 0,
        "truncated": rows.truncated,
    }
    left_out = {"left_out": rows.split.left_out} if rows.split.left_out else {}
    return sizes | left_out | task.describe(rows).counts


def file_remarks(path: Path) -> list[str]:
    """Returns a note, as a list of lines, if a path stands for several files (tables.data_set_files)."""
    count = len(tables.data_set_files(path))
    return [f"{path}: reading all {count} files of this data set as one"] if count > 1 else []


def remarks(rows: TaskRows, task: Task, training: bool = False) -> list[str]:
    """Returns warnings about a split, one line each: about lost tokens and lines, and from Task.describe."""
    path, left_out, lines = rows.split.path, rows.split.left_out, []
    if left_out:
        lines.append(f"{path}: {left_out} lines are skipped, because their number of fields differs")
    if rows.truncated:
        parts = rows.cut_part or f"of {len(rows.split.items)} examples"
        limit = f"task.{rows.cut_option}={getattr(task, rows.cut_option)}"
        lines.append(f"{path}: {rows.truncated} {parts} lost tokens to {limit}")
    lines += [f"{path}: {remark}" for remark in rows.split.remarks]
    return lines + task.describe(rows, training).remarks


def measure_in_training(
    task: Task, rows: TaskRows, batch_size: int, plan: Plan, mesh: Mesh, params: dict[str, Any], _steps_done: int
) -> dict[str, float]:
    """Measures the task on labelled rows: a Run's evaluator, once its first three arguments are bound."""
    return Predictor(task, plan.model, _compiling_fast(plan.runtime), mesh).measure(params, rows, batch_size)


def baseline(task: Task, rows: Mapping[str, TaskRows]) -> dict[str, Any] | None:
    """Returns the name of the task's baseline and its metrics on all splits except train; None without one."""
    name, metrics = "", dict[str, float | None]()
    for split in [split for split in rows if split != "train"]:
        name, values = registry.with_split_metrics(task, split).baseline(rows["train"], rows[split])
        metrics |= {
            f"{metric_prefix(split)}{key}": None if math.isnan(value) else value for key, value in values.items()
        }
    return {"name": name, "metrics": metrics} if metrics else None


def measure(
    task: Task, model: ModelConfig, config: TrainConfig, params: Mapping[str, Any], rows: TaskRows
) -> dict[str, float]:
    """Returns the task's metrics, and task_loss, on labelled rows. config says how to run the model."""
    mesh = sharding.make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        predictor = Predictor(task, model, _compiling_fast(make_runtime(config)), mesh)
        return predictor.measure(params, rows, config.evaluation_rows(config.batch_size))


def _compiling_fast(runtime: Runtime) -> Runtime:
    # Files are small, and all padded lengths are compiled, so a scan over layers saves more than it costs.
    return dataclasses.replace(runtime, layer_loop="scan") if runtime.layer_loop == "auto" else runtime


@dataclass(frozen=True)
class Evaluation:
    """The results of `evaluate`."""

    metrics: dict[str, float]  # with the metric_prefix of their split
    counts: dict[str, dict[str, int]]  # by split
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
        config: How to run the model (batch_size, compute_dtype).
        columns: The columns of the file, if they differ from training's (a Hugging Face folder records none).
        label_map: {FILE_LABEL: LABEL, ...}, if the file writes other labels than the model.
        max_length, truncate_dim: Replace the values of training, unless they are 0.
        metrics: Empty: as in training (for a Hugging Face folder accuracy and macro_f1, with `positive` accuracy and
            f1).
        positive: The label that f1, precision and recall measure.
        null_threshold: The probability above which a question has no answer; by default, the checkpoint's.

    Raises:
        UserError: The checkpoint was not fine-tuned, its task does not have an option, a label or metric is unknown, or
            no file has labels.
    """
    config = config or TrainConfig(batch_size=32)
    task = with_max_length(restore_task(loaded), max_length, loaded.model)
    # Columns that the caller does not name stay as in training.
    task = dataclasses.replace(task, columns=(columns or task.columns).filled(task.columns))
    task = with_null_threshold(task, null_threshold)
    # Thresholds that the checkpoint lacks become 1/2: those chosen on the measured file would flatter the model.
    task = task.calibrated({})
    task = _with_options(task, label_map, metrics, positive, truncate_dim)
    if truncate_dim:
        task.check_model(loaded.model)
    labelled, messages = _without_training(loaded, _read_labelled(task, Path(data)))
    # The parameters are placed once for all splits.
    tokenizer = shared_tokenizer(loaded)
    params = task_params(loaded, task, sharding.make_mesh(config.mesh))
    values: dict[str, float] = {}
    sizes: dict[str, dict[str, int]] = {}
    for name, split in labelled.items():
        if metrics:
            task.metric_names(split, explicit=True)
        rows = task.encode(split, tokenizer)
        sizes[name] = counts(rows, task, tokenizer)
        # A file that was named directly is recognized as a split of a named task by its name.
        known = name == "data" and task.name in named.TASKS
        split_name = named.TASKS[task.name].match_split(split.path) if known else name
        split_task = task if metrics else registry.with_split_metrics(task, split_name)
        measured = measure(split_task, loaded.model, config, params, rows)
        values |= {f"{metric_prefix(name)}{metric}": value for metric, value in measured.items()}
        messages += file_remarks(split.path) + remarks(rows, split_task)
        # A loss is also NaN if no row has a label, so the parameters decide.
        if math.isnan(measured["task_loss"]) and any(jnp.isnan(leaf).any() for leaf in jax.tree.leaves(params)):
            messages.append(f"{split.path}: metrics mean nothing, as parameters are NaN; use an earlier checkpoint")
    return Evaluation(values, sizes, tuple(messages))


def _without_training(loaded: LoadedModel, splits: dict[str, Split[Any]]) -> tuple[dict[str, Split[Any]], list[str]]:
    """Reduces the file on which a run was trained to its held-out items; also returns a remark about it."""
    try:
        path, chosen = held_out.of_run(loaded.training)
    except UserError:  # a folder of another library, or files that are elsewhere
        return splits, []
    split = splits.get("data")
    if split is None or path.resolve() != split.path.resolve():
        return splits, []
    # An index past the end shows that the file has changed since.
    if not chosen or chosen[-1] >= len(split.items):
        return splits, [f"warning: {split.path} is the file that the checkpoint was trained on"]
    part = dataclasses.replace(split, items=tuple(split.items[index] for index in chosen))
    remark = f"{split.path}: the checkpoint was trained on this file; its {len(chosen):,} held-out examples count"
    return {"data": part}, [remark]


def _with_options(
    task: Task, label_map: Mapping[str, str] | None, metrics: Sequence[str], positive: str, truncate_dim: int
) -> Task:
    """Sets the given options, which only some kinds of tasks have."""
    options: tuple[tuple[type, str, Any, str], ...] = (
        (NamedLabelsTask, "label_map", dict(label_map or {}), "labels to map"),
        (EmbeddingTask, "truncate_dim", truncate_dim, "vectors"),
        (ClassificationTask, "positive", positive, "positive class"),
    )
    for kind, name, value, lacks in options:
        if value:
            check_kind(task, kind, name, value, lacks)
            task = dataclasses.replace(task, **{name: value})
    names = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    check_names("--metrics", names)
    if positive and not names:  # whose default metrics are others
        task = dataclasses.replace(task, metrics=()).with_metrics()
    return dataclasses.replace(task, metrics=names) if names else task


def metric_prefix(split: str) -> str:
    """Returns the prefix of a split's metrics: none for dev, otherwise its name (`test_`, `dev_mismatched_`)."""
    return "" if split in ("dev", "data") else f"{split}_"


def _read_labelled(task: Task, data: Path) -> dict[str, Split[Any]]:
    """Reads the files that have labels, by split."""
    # A folder's test file often has no labels, and is left out rather than refused.
    splits = {name: registry.read(task, path, label_required=False) for name, path in _files(task, data).items()}
    labelled = {name: split for name, split in splits.items() if split.labelled}
    if not labelled:
        raise UserError(f"{data} has no labels (column {task.columns.label!r}), which evaluation needs")
    return labelled


def _files(task: Task, data: Path) -> dict[str, Path]:
    """Finds the files to measure, by split; a single file is called `data`."""
    if not data.is_dir():
        return {"data": data}
    splits = [split for split in registry.split_names(task.name) if split != "train"]
    folder = registry.find_folder(task.name, data, splits) if task.name in named.TASKS else data
    files = {split: path for split in splits if (path := registry.find_split(task.name, folder, split))}
    if not files:
        raise UserError(f"{folder} contains neither dev nor test of the task (such as dev.tsv). Name a file")
    return files
