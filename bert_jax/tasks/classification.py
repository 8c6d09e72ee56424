"""Classes and scores of texts and pairs: encoding, labels to numbers, metrics."""

import math
from dataclasses import replace

import numpy as np
from jaxtyping import Float32, Int32, Int64

from bert_jax.command import UserError
from bert_jax.tasks.example import Example, Split, TaskRows, spans
from bert_jax.tasks.metrics import classification_metrics, regression_metrics
from bert_jax.tasks.table import Task
from bert_jax.tokenizer import Tokenizer


def complete(task: Task, train: Split[Example]) -> Task:
    """The task with the labels and metrics that its training file implies, where it names none.

    Labels are sorted, as numbers where all are whole numbers. Raises UserError for fewer than two.
    """
    if task.kind == "classification" and not task.labels:
        found = {example.label or "" for example in train.items}
        if len(found) < 2:
            raise UserError(f"{train.path}: every label is {found.pop()!r}; a classification needs two or more")
        if len(found) > max(50, len(train.items) // 2):
            raise UserError(
                f"{train.path}: {len(found)} different labels in {len(train.items)} lines; is task.label "
                f"{task.columns.label!r} the right column? For numbers use --config.task.kind=regression"
            )
        task = replace(task, labels=tuple(sorted(found, key=_label_order)))
    return replace(task, metrics=task.metrics or default_metrics(task))


def default_metrics(task: Task) -> tuple[str, ...]:
    """What a task that names no metrics is measured by."""
    if task.kind == "regression":
        return ("pearson", "spearman")
    return ("accuracy", "f1") if task.labels == ("0", "1") else ("accuracy", "macro_f1")


def encode(task: Task, split: Split[Example], tokenizer: Tokenizer) -> TaskRows:
    """One row an example: [CLS] text [SEP], or [CLS] text [SEP] pair [SEP] with the pair in segment 1.

    Over task.max_length the longer of the two is cut, piece by piece, from its end (truncated_lengths).
    """
    texts = [example.text for example in split.items]
    paired = split.items[0].text_pair is not None
    first, first_offsets = tokenizer.encode_many(texts)
    second, second_offsets = tokenizer.encode_many([example.text_pair or "" for example in split.items])
    wanted = np.diff(first_offsets), np.diff(second_offsets)
    kept = truncated_lengths(*wanted, task.max_length - (3 if paired else 2))
    first_lengths = kept[0] + 2
    offsets = np.concatenate([[0], np.cumsum(first_lengths + (kept[1] + 1 if paired else 0))])

    # Whatever is neither [CLS] nor a piece is a [SEP].
    input_ids = np.full(offsets[-1], tokenizer.sep_id, np.int32)
    input_ids[offsets[:-1]] = tokenizer.cls_id
    input_ids[spans(offsets[:-1] + 1, kept[0])] = first[spans(first_offsets[:-1], kept[0])]
    input_ids[spans(offsets[:-1] + first_lengths, kept[1])] = second[spans(second_offsets[:-1], kept[1])]
    labels, weights = _labels(task, split)
    return TaskRows(
        input_ids=input_ids,
        offsets=offsets,
        first_lengths=first_lengths.astype(np.int32),
        labels=labels,
        label_weights=weights,
        pad_id=tokenizer.pad_id,
        truncated=int(((kept[0] < wanted[0]) | (kept[1] < wanted[1])).sum()),
    )


def truncated_lengths(
    first: Int64[np.ndarray, "R"], second: Int64[np.ndarray, "R"], room: int
) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]:
    """How many pieces of each text stay in room pieces when the longer one is always the one that loses.

    Where the cut goes below both, each keeps half, the odd piece going to the one that was longer (to the second
    of two equals): `longest_first` of Hugging Face tokenizers, which peers train with.
    """
    shorter, longer = np.minimum(first, second), np.maximum(first, second)
    kept_shorter = np.minimum(shorter, np.maximum(room // 2, room - longer))
    kept_longer = np.minimum(longer, room - kept_shorter)
    first_is_longer = first > second
    return (
        np.where(first_is_longer, kept_longer, kept_shorter),
        np.where(first_is_longer, kept_shorter, kept_longer),
    )


def measure(task: Task, rows: TaskRows, outputs: Float32[np.ndarray, "R C"]) -> dict[str, float]:
    """The task's metrics of a labelled split, from logits (classification) or scores (regression, C = 1)."""
    if task.kind == "regression":
        return regression_metrics(task.metrics, rows.labels, outputs[:, 0])
    return classification_metrics(task.metrics, rows.labels, outputs.argmax(axis=-1))


def check_label(task: Task, split: Split, line: int, label: str) -> int:
    """The id of a label. Raises UserError, with file and line, for one that is not in the task's set."""
    if label in task.labels:
        return task.labels.index(label)
    shown = ", ".join(map(repr, task.labels[:20])) + (" ..." if len(task.labels) > 20 else "")
    raise UserError(
        f"{split.path} line {line}: label {label!r} is not one of the task's: {shown}. "
        "Correct the line or the column (task.label), or add the label to the training file"
    )


def _labels(
    task: Task, split: Split[Example]
) -> tuple[Int32[np.ndarray, "R"] | Float32[np.ndarray, "R"], Float32[np.ndarray, "R"]]:
    count = len(split.items)
    dtype = np.float32 if task.kind == "regression" else np.int32
    if not split.labelled:
        return np.zeros(count, dtype), np.zeros(count, np.float32)
    convert = _score if task.kind == "regression" else check_label
    values = [convert(task, split, example.line, example.label or "") for example in split.items]
    return np.array(values, dtype), np.ones(count, np.float32)


def _score(task: Task, split: Split, line: int, label: str) -> float:
    try:
        value = float(label)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{split.path} line {line}: {label!r} is no number, and the task is a regression")
    return value


def _label_order(label: str) -> tuple[float, str]:
    return (float(int(label)), label) if label.removeprefix("-").isdecimal() else (math.inf, label)
