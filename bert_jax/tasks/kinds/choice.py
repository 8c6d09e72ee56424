"""Multiple choice: which of several texts that may follow a context is correct."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Int64
from scipy.special import softmax

from bert_jax.config import TaskConfig
from bert_jax.model.bert import Bert
from bert_jax.model.heads import Heads
from bert_jax.model.task_outputs import choice_logits
from bert_jax.tasks.example import Split, TaskBatch
from bert_jax.tasks.input_records import InputRecord
from bert_jax.tasks.kinds.choice_items import (
    MultipleChoice,
    choice_columns,
    correct_choices,
    item_of,
    labels_are,
    read_choices,
)
from bert_jax.tasks.kinds.labels import check_smoothing
from bert_jax.tasks.metric_functions import CLASSIFICATION_METRICS, check_metric_names, compute_metrics
from bert_jax.tasks.objective import TaskObjective, pooled_vectors
from bert_jax.tasks.pairs import encode_pairs
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.side_by_side import SideBySideRows, separated
from bert_jax.tasks.task import PooledTask, Task
from bert_jax.tasks.task_losses import IMPOSSIBLE, choice_sums
from bert_jax.tokenizer import Tokenizer
from bert_jax.train.losses import Scalar
from bert_jax.train.objectives import Term, Terms
from bert_jax.train.soft_losses import soft_class_sum

# Other metrics of classes would be of the indices of choices, which mean nothing; earlier runs may record some.
METRICS = ("accuracy",)


@dataclass(frozen=True)
class ChoiceTask(PooledTask[MultipleChoice, "ChoiceRows"]):
    """One correct choice among two or more, each read together with the context (Devlin et al. 2019, section 4.4).

    A row is an item. Its choices are S sequences [CLS] context [SEP] start choice [SEP] of up to max_length tokens,
    side by side, and the objective passes each to the encoder as a row of its own. S is the number of choices of the
    split's item with the most choices. There are no labels: the index of a choice carries no meaning.

    | option | |
    |---|---|
    | choices | the columns of the choices, separated by commas, or one column that holds a list |
    | label_smoothing | the share of the uniform distribution in the target |
    | choice_labels | what labels are that the training file does not give as numbers (choice_items.labels_are) |
    """

    kind = "choice"
    unread_columns = ("marks",)
    has_labels = False

    choices: str = TaskConfig.choices
    label_smoothing: float = TaskConfig.label_smoothing
    choice_labels: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_smoothing(self.label_smoothing)

    @property
    def measured(self) -> "ChoiceTask":
        return replace(self, label_smoothing=0.0)

    @property
    def known_metrics(self) -> Collection[str]:
        return CLASSIFICATION_METRICS

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[MultipleChoice]:
        return read_choices(path, columns, self.choices, label_required)

    def parse(self, source: Path, records: Sequence[InputRecord]) -> Split[MultipleChoice]:
        """Items from JSON objects, or from lines: the context and the choices, separated by tabs."""
        items = tuple(self.item_of(source, record) for record in records)
        return Split(source, items, labelled=False)

    def item_of(self, source: Path, record: InputRecord) -> MultipleChoice:
        """The item of one record."""
        return item_of(self.columns, choice_columns(self.choices), source, record)

    def complete(self, train: Split[MultipleChoice]) -> Task:
        """The task with what its training file decides about labels. Raises UserError for a metric not of METRICS."""
        check_metric_names(self.metrics, METRICS)
        return replace(self, choice_labels=labels_are(train.items)).with_metrics()

    def default_metrics(self) -> tuple[str, ...]:
        return METRICS

    def encode(self, split: Split[MultipleChoice], tokenizer: Tokenizer) -> "ChoiceRows":
        """One row for each item. Over max_length, the longer of context and choice is cut (pairs.truncated_lengths).

        Each choice is cut separately; `truncated` counts items. Raises UserError, with file and line, for a label
        that is not one of the item's choices.
        """
        places = [
            (row, place) for row, item in enumerate(split.items) for place, text in enumerate(item.choices) if text
        ]
        encoded, cut = encode_pairs(
            [split.items[row].context for row, _ in places],
            [f"{split.items[row].start} {split.items[row].choices[place]}".lstrip() for row, place in places],
            tokenizer,
            self.max_length,
        )
        shape = len(split.items), max(len(item.choices) for item in split.items)
        lengths, first_lengths = np.zeros(shape, np.int64), np.zeros(shape, np.int32)
        where = tuple(np.array(places).T)
        lengths[where], first_lengths[where] = np.diff(encoded.offsets), encoded.first_lengths
        labels = np.zeros(len(split.items), np.int32)
        if split.labelled:
            labels[:] = correct_choices(split.path, split.items, self.choice_labels)
        return ChoiceRows(
            input_ids=encoded.input_ids,
            offsets=np.concatenate([[0], np.cumsum(lengths.sum(axis=1))]),
            first_lengths=first_lengths,
            choice_lengths=lengths,
            labels=labels,
            label_weights=np.full(len(split.items), float(split.labelled), np.float32),
            pad_id=tokenizer.pad_id,
            truncated=len({row for (row, _), lost in zip(places, cut, strict=True) if lost}),
            split=split,
        )

    def counts(self, rows: "ChoiceRows") -> dict[str, int]:
        """choices: the choices of all items; empty_texts: contexts that are empty or white space."""
        empty = sum(not item.context.strip() for item in rows.split.items)
        return {"choices": int((rows.choice_lengths > 0).sum()), "empty_texts": empty}

    def remarks(self, rows: "ChoiceRows") -> list[str]:
        """A warning about empty contexts."""
        empty = self.counts(rows)["empty_texts"]
        return [f"{rows.split.path}: {empty} of {rows.count} items have an empty context"] if empty else []

    def objective(self) -> TaskObjective:
        return ChoiceObjective(pooling=self.pooling, smoothing=self.label_smoothing)

    def measure(self, rows: "ChoiceRows", answers: Sequence[Float[np.ndarray, "K"]]) -> dict[str, float]:
        """The metrics, from the scores of each item's choices."""
        return compute_metrics(CLASSIFICATION_METRICS, self.metrics, rows.labels, np.stack(answers).argmax(axis=-1))

    def predictions(self, rows: "ChoiceRows", answers: Sequence[Float[np.ndarray, "K"]]) -> list[dict[str, Any]]:
        """`label`, the index of the choice from 0; `choice`, its text; `score`, its probability; `scores` by index."""
        found = []
        for item, scores in zip(rows.split.items, answers, strict=True):
            shares = softmax(scores[: len(item.choices)].astype(np.float64))
            best = int(shares.argmax())
            known = {str(place): float(shares[place]) for place, text in enumerate(item.choices) if text}
            found.append({"label": best, "choice": item.choices[best], "score": float(shares[best]), "scores": known})
        return found


class ChoiceLabels(NamedTuple):
    """The value of TaskBatch.labels."""

    right: Any  # i32[B]
    present: Any  # bool[B,S]; a row's positions are S equal parts


@dataclass(frozen=True)
class ChoiceObjective(TaskObjective):
    """Cross-entropy of the right choice, with a softmax over the scores of the present choices."""

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
        return jnp.where(present, scores.reshape(present.shape), IMPOSSIBLE)

    def terms_of(self, model: Bert, outputs: Float[Array, "B S"], batch: TaskBatch) -> Terms:
        labels = batch.labels
        loss, correct = choice_sums(outputs, labels.present, labels.right, batch.label_weights, self.smoothing)
        return {"task": Term(loss, {"accuracy": correct})}

    @property
    def has_soft_targets(self) -> bool:
        return True

    def soft_sum(
        self, outputs: Float[Array, "B S"], teacher: Float[Array, "B S"], batch: TaskBatch, temperature: float
    ) -> Scalar:
        return soft_class_sum(outputs, teacher, batch.label_weights, temperature)


@dataclass(frozen=True, eq=False, kw_only=True)
class ChoiceRows(SideBySideRows[MultipleChoice]):
    """Rows of S choices, one after another; an absent choice has no tokens."""

    choice_lengths: Int64[np.ndarray, "R S"]
    labels: Int32[np.ndarray, "R"]  # index of the correct choice
    label_weights: Float32[np.ndarray, "R"]

    @property
    def part_lengths(self) -> Int64[np.ndarray, "R S"]:
        return self.choice_lengths

    def targets_of(
        self, rows: Int64[np.ndarray, "B"], present: Bool[np.ndarray, "B S"]
    ) -> tuple[ChoiceLabels, Float32[np.ndarray, "B"]]:
        return ChoiceLabels(self.labels[rows], present), self.label_weights[rows]
