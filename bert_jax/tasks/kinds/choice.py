"""Multiple choice: which text, among several that may follow a context, is correct.

First the items and what their labels mean, then `ChoiceTask`, its objective and rows.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Int64
from scipy.special import softmax

from bert_jax.config.finetuning import ChoiceOptions
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert
from bert_jax.model.heads.config import Heads
from bert_jax.model.heads.structured import IMPOSSIBLE
from bert_jax.model.outputs import choice_logits
from bert_jax.tasks.metrics import CLASSIFICATION_METRICS, check_metric_names, compute_metrics
from bert_jax.tasks.reading.inputs import InputRecord, checked_text, read_value
from bert_jax.tasks.reading.labelled import is_missing, read_labelled, read_text
from bert_jax.tasks.reading.tables import Column, Columns, is_stored
from bert_jax.tasks.rows import SideBySideRows, Split, TaskBatch, encode_side_by_side, separated
from bert_jax.tasks.task import Description, PooledTask, SoftClassObjective, Task, choice_sums, pooled_vectors
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train.objectives import Term, Terms

CHOICES = "choices"  # the column of a list, if task.choices names none
# What the labels of a file are that does not give them as numbers. With FROM_ONE, letters and numbers are one scheme:
# a number counts from 1, as letters do from A.
TEXTS, PLACES, FROM_ONE = "texts", "places", "places from 1"


MANY = 20  # labels among which a 0 is expected


class MultipleChoice(NamedTuple):
    """A context, the common beginning of all choices, and two or more choices; an empty text is an absent choice."""

    context: str
    start: str
    choices: tuple[str, ...]
    label: str | None  # as the file writes it: an index from 0, a letter from A, or the text of the correct choice
    line: int  # in the file, from 1
    numbered: bool = False  # whether the file's label is a number, which always is an index


def _text(source: Path, line: int, value: Any) -> str:
    return read_text(f"{source} line {line}", value).strip()


def checked_choices(source: Path, line: int, values: Sequence[Any]) -> tuple[str, ...]:
    """An item's choices, from the values of their columns or the list in the only one."""
    if len(values) == 1:
        values = values[0] if isinstance(values[0], list) else []
        if not all(isinstance(value, str) and value.strip() for value in values):
            raise UserError(
                f"{source} line {line}: choices is {values!r:.60}; expected a list of texts, none of them empty"
            )
    # In a list, all texts are choices. In columns, an empty value is an absent choice, because some items have fewer.
    choices = tuple(_text(source, line, value) for value in values)
    if sum(bool(text) for text in choices) < 2:
        raise UserError(f"{source} line {line} has fewer than two choices (task.choices). Give it two or more")
    return choices


def _by_text(item: MultipleChoice) -> int | None:
    """The choice whose text is the label; None for none or several, and for a number."""
    known = item.label and not item.numbered and item.choices.count(item.label) == 1
    return item.choices.index(item.label) if known else None


def _by_place(item: MultipleChoice, first: int = 0) -> int | None:
    """The choice whose index, from `first`, or whose letter, from A, is the label."""
    label, place = item.label or "", -1
    if re.fullmatch("[0-9]+", label):
        place = int(label) - first
    elif re.fullmatch("[A-Z]", label):
        place = ord(label) - ord("A")
    # An absent choice cannot be the correct one.
    return place if 0 <= place < len(item.choices) and item.choices[place] else None


_READINGS: dict[str, Callable[[MultipleChoice], int | None]] = {
    TEXTS: lambda item: _by_place(item) if item.numbered else _by_text(item),
    PLACES: _by_place,
    FROM_ONE: lambda item: _by_place(item, first=1),
}


def label_meaning(items: Sequence[MultipleChoice]) -> str:
    """Decides what a file's labels mean, as far as they are not numbers.

    TEXTS if every label is the text of a choice, else PLACES if every label is an index or a letter, or FROM_ONE if
    some are letters and the others numbers, none of them 0 (as in ARC); empty if there are no such labels, or both
    kinds.
    """
    written = [item for item in items if not item.numbered]
    labels = {item.label or "" for item in items}
    mixed = any(map(re.compile("[A-Z]").fullmatch, labels)) and any(label.isdecimal() for label in labels)
    other = PLACES if mixed and "0" not in labels else FROM_ONE
    # A file's numbers count either from 0 or from 1, so only one of the two readings is tried.
    for meaning, read in _READINGS.items():
        if meaning != other and written and all(read(item) is not None for item in written):
            return meaning
    return ""


def _meaning(items: Sequence[MultipleChoice], trained: str) -> str:
    """The meaning that the labels of the training file have, or else these; FROM_ONE is seen in a file itself."""
    own = label_meaning(items)
    return own if own == FROM_ONE and trained in ("", PLACES) else trained or own


def correct_choices(source: Path, items: Sequence[MultipleChoice], meaning: str) -> list[int]:
    """Finds the index of each item's correct choice, for all items in a file.

    Numbers are indices, from 0 unless the meaning is FROM_ONE. The other labels have the given meaning if all of them
    can have it. Otherwise each item decides.

    Args:
        source: The file, for messages.
        meaning: label_meaning of the training file; empty: this file's own.

    Raises:
        UserError: A label is not a choice or, if items decide, it is one choice's index and another one's text. The
            message names the line.
    """
    # One meaning for the whole file, if it fits all labels.
    if meaning := _meaning(items, meaning):
        places = [_READINGS[meaning](item) for item in items]
        if None not in places:
            return [place for place in places if place is not None]
    for item in items:
        if _by_text(item) is None and _by_place(item) is None:
            raise UserError(
                f"{source} line {item.line}: label {item.label!r} is not one of its {sum(map(bool, item.choices))} "
                "choices; expected an index from 0, a letter from A, or a choice's text (numbers are indices, unless "
                "in quotes). Correct the line or the column (task.label)"
            )
    correct = []
    for item in items:
        # Both readings of the label, at least one of which exists.
        possible = [place for place in (_by_text(item), _by_place(item)) if place is not None]
        if len(set(possible)) > 1:
            raise UserError(
                f"{source} line {item.line}: label {item.label!r} is the text of choice {possible[0]} (from 0), and as "
                f"an index or letter it names choice {possible[1]}; other labels of the task are of either kind. Give "
                "all labels as texts, or all as indices"
            )
        correct.append(possible[0])
    return correct


# Other metrics of classes would compare the indices of choices, which mean nothing; earlier runs may record some.
METRICS = ("accuracy",)


@dataclass(frozen=True)
class ChoiceTask(ChoiceOptions, PooledTask[MultipleChoice, "ChoiceRows"]):
    """One correct choice among two or more, each read together with the context (Devlin et al. 2019, section 4.4).

    A row is an item. Its choices are S sequences [CLS] context [SEP] start choice [SEP] of up to max_length tokens,
    side by side, which the encoder reads as rows. S is the largest number of choices in the split. There are no labels,
    because the index of a choice carries no meaning.
    """

    kind = "choice"
    known_metrics = CLASSIFICATION_METRICS
    usual_metrics = METRICS
    training_options = ("label_smoothing",)

    choice_labels: str = ""  # the meaning of labels that the training file does not give as numbers (label_meaning)

    @property
    def choice_columns(self) -> tuple[str, ...]:
        """The columns that the option choices names."""
        return self.choices or (CHOICES,)

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[MultipleChoice]:
        """Reads items of a table (read_records): context, start and label from the columns text, text_pair, label.

        An empty value in one of several columns of choices is an absent choice. Unless label_required, a file without
        the label column, or whose labels are all empty, null or -1, is read as unlabelled.

        Raises:
            UserError: A column is missing, or an item has fewer than two choices. The message names the line.
        """
        names = self.choice_columns
        if len(names) == 1 and not is_stored(path):
            raise UserError(
                f"{path} is TSV or CSV, but task.choices names one column, {names[0]!r}. Name one column for each "
                "choice: --config.task.choices=A,B,C"
            )
        table, labelled = read_labelled(path, columns, [Column(name, "choices") for name in names], label_required)
        items = []
        for line, (context, start, label, *texts) in table.records:
            if not labelled or (not label_required and is_missing(label)):
                written = None
            elif isinstance(label, bool) or not isinstance(label, str | int | float) or label != label:
                raise UserError(
                    f"{path} line {line}: {label!r:.40} is not a label; expected the index of the correct choice, "
                    "from 0"
                )
            else:  # Parquet holds integers as floats if some are missing
                is_integer = isinstance(label, float) and label == int(label)
                written = str(int(label)) if is_integer else str(label).strip()
            # Only typed files tell a number from a text of digits.
            numbered = written is not None and not isinstance(label, str)
            start, context = _text(path, line, start), _text(path, line, context)
            items.append(MultipleChoice(context, start, checked_choices(path, line, texts), written, line, numbered))
        return Split(path, tuple(items), labelled)

    def parse_record(self, source: Path, record: InputRecord) -> MultipleChoice:
        """An item from the tab-separated parts of a line, context first, or from an object.

        The object's fields have the names of the task's columns, or text (or context), start and choices.
        """
        line, names = record.line, self.choice_columns
        if not isinstance(record.content, Mapping):
            context, *texts = (checked_text(source, line, text) for text in record.plain_texts())
            return MultipleChoice(context, "", checked_choices(source, line, texts), None, line)
        # A list in one field, or else a field for each choice.
        listed = read_value(source, record, [*names, CHOICES] if len(names) == 1 else [CHOICES], required=False)
        texts = [listed] if listed is not None else [read_value(source, record, (name,)) for name in names]
        context = checked_text(source, line, read_value(source, record, (self.columns.text, "text", "context")))
        start = read_value(source, record, (self.columns.text_pair, "start"), required=False)
        return MultipleChoice(context, _text(source, line, start), checked_choices(source, line, texts), None, line)

    def complete(self, train: Split[MultipleChoice]) -> Task:
        """Also decides what labels mean. Raises UserError for a metric that is not in METRICS."""
        check_metric_names(self.metrics, METRICS)
        return replace(self, choice_labels=label_meaning(train.items)).with_metrics()

    def encode(self, split: Split[MultipleChoice], tokenizer: Tokenizer) -> "ChoiceRows":
        """One row per item. Over max_length, the longer one is cut, context or choice (truncated_lengths).

        Raises UserError, with file and line, for a label that is not one of the item's choices.
        """
        pairs = [
            # The common beginning belongs to each choice, so that the second text is whole.
            [(item.context, f"{item.start} {text}".lstrip()) if text else None for text in item.choices]
            for item in split.items
        ]
        labels = np.zeros(len(split.items), np.int32)
        if split.labelled:
            labels[:] = correct_choices(split.path, split.items, self.choice_labels)
        return ChoiceRows(
            **encode_side_by_side(pairs, tokenizer, self.max_length),
            labels=labels,
            label_weights=np.full(len(split.items), float(split.labelled), np.float32),
            split=split,
        )

    def describe(self, rows: "ChoiceRows", training: bool = False) -> Description:
        """Counts choices, and empty_texts: contexts that are empty or white space; reports how numbers count."""
        empty = sum(not item.context.strip() for item in rows.split.items)
        remarks = [f"{rows.split.path}: {empty} of {rows.count} items have an empty context"] if empty else []
        items, path = rows.split.items, rows.split.path
        digits = [item.label for item in items if (item.label or "").isdecimal()] if rows.split.labelled else []
        meaning = _meaning(items, self.choice_labels)
        if digits and meaning == FROM_ONE:
            remarks.append(
                f"{path}: {len(digits)} of {rows.count} labels are numbers and others letters, so numbers count from 1"
            )
        elif len(digits) >= MANY and "0" not in digits and meaning != TEXTS:
            remarks.append(f"{path}: none of {len(digits)} labels is 0; they count from 0, so subtract 1 from others")
        return Description({"choices": int((rows.part_lengths > 0).sum()), "empty_texts": empty}, remarks)

    def objective(self) -> SoftClassObjective:
        return ChoiceObjective(pooling=self.pooling, smoothing=self.label_smoothing)

    def measure(self, rows: "ChoiceRows", answers: Sequence[Float[np.ndarray, "K"]]) -> dict[str, float]:
        """Computes the metrics from the scores of each item's choices."""
        return compute_metrics(CLASSIFICATION_METRICS, self.metrics, rows.labels, np.stack(answers).argmax(axis=-1))

    def predictions(self, rows: "ChoiceRows", answers: Sequence[Float[np.ndarray, "K"]]) -> list[dict[str, Any]]:
        """`label`, the index of the choice from 0; `choice`, its text; `score`, its probability; `scores` by index."""
        predictions = []
        for item, scores in zip(rows.split.items, answers, strict=True):
            # Absent choices at the end belong to items with more choices.
            shares = softmax(scores[: len(item.choices)].astype(np.float64))
            best = int(shares.argmax())
            known = {str(place): float(shares[place]) for place, text in enumerate(item.choices) if text}
            predictions.append(
                {"label": best, "choice": item.choices[best], "score": float(shares[best]), "scores": known}
            )
        return predictions


class ChoiceLabels(NamedTuple):
    """The value of TaskBatch.labels."""

    right: Any  # i32[B]
    present: Any  # bool[B,S]; a row's positions are S equal parts


@dataclass(frozen=True)
class ChoiceObjective(SoftClassObjective):
    """Cross-entropy with a softmax over the scores of present choices."""

    pooling: str = "cls"
    smoothing: float = 0.0

    @property
    def heads(self) -> Heads:
        return Heads(pooling=self.pooling, pooler=True, choices=True)

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B S"]:
        """The score of each choice; IMPOSSIBLE for an absent one."""
        present = batch.labels.present
        vectors = pooled_vectors(model, separated(batch, present), dropout_key)
        scores = choice_logits(model, vectors, dropout_key)[:, 0]
        # Masked here and not only in the loss, because soft targets are computed from the outputs alone.
        return jnp.where(present, scores.reshape(present.shape), IMPOSSIBLE)

    def loss_terms(self, model: Bert, outputs: Float[Array, "B S"], batch: TaskBatch) -> Terms:
        labels = batch.labels
        loss, correct = choice_sums(outputs, labels.present, labels.right, batch.label_weights, self.smoothing)
        return {"task": Term(loss, {"accuracy": correct})}


@dataclass(frozen=True, eq=False, kw_only=True)
class ChoiceRows(SideBySideRows[MultipleChoice]):
    """Rows of S choices, one after another; an absent choice has no tokens."""

    labels: Int32[np.ndarray, "R"]  # index of the correct choice
    label_weights: Float32[np.ndarray, "R"]

    def select_targets(
        self, rows: Int64[np.ndarray, "B"], present: Bool[np.ndarray, "B S"]
    ) -> tuple[ChoiceLabels, Float32[np.ndarray, "B"]]:
        return ChoiceLabels(self.labels[rows], present), self.label_weights[rows]
