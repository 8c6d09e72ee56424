"""What a task's file holds, the rows it becomes, and the batch the model sees. Pure numpy."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, Integer, Shaped


class Example(NamedTuple):
    """A text or a pair of texts, with its label as the file writes it (None where the file has none)."""

    text: str
    text_pair: str | None
    label: str | None
    line: int  # in the file, from 1


class LabelSet(NamedTuple):
    """A text or a pair of texts, with its labels as the file writes them (None where the file has none)."""

    text: str
    text_pair: str | None
    labels: tuple[str, ...] | None
    line: int  # in the file, from 1


class Sentence(NamedTuple):
    """The words of a sentence and their tags as the file writes them (None where the file has none)."""

    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    lines: tuple[int, ...]  # of each word in the file, from 1
    # For a raw text that was split into words:
    text: str | None = None
    offsets: tuple[tuple[int, int], ...] | None = None  # of each word, the characters [start, end) of the text


class Span(NamedTuple):
    """The words first to end - 1 of a sentence, with a type."""

    label: str
    first: int
    end: int


class Relation(NamedTuple):
    """A relation between two spans of a sentence, which it names by their index."""

    label: str
    head: int
    tail: int


class SpannedSentence(NamedTuple):
    """The words of a sentence, its spans, which may overlap, and their relations; both are empty where unknown."""

    words: tuple[str, ...]
    spans: tuple[Span, ...]
    relations: tuple[Relation, ...]
    line: int  # in the file, from 1
    # For a raw text that was split into words:
    text: str | None = None
    offsets: tuple[tuple[int, int], ...] | None = None  # of each word, the characters [start, end) of the text


Item = TypeVar("Item", covariant=True)


@dataclass(frozen=True)
class Split(Generic[Item]):
    """The content of one file of a task: at least one item; either all items are labelled or none."""

    path: Path
    items: tuple[Item, ...]
    labelled: bool
    left_out: int = 0  # unreadable lines, for tasks whose published files have some
    class_names: tuple[str, ...] = ()  # by number, where the file names its classes


class TaskBatch(NamedTuple):
    """A fine-tuning batch (numpy or jax arrays) with one sequence in each row. Padding has sequence id 0.

    | field | dtype, shape | |
    |---|---|---|
    | input_ids, segment_ids, sequence_ids, positions | i32[B,T] | as in the pretraining Batch |
    | labels | [B, ...], or a tree of arrays | the targets of the kind of task: a class, a score, tags by position ... |
    | label_weights | f32[B, ...] | 0 for a filler row, and for a position without a label |
    """

    input_ids: Any
    segment_ids: Any
    sequence_ids: Any
    positions: Any
    labels: Any
    label_weights: Any

    @property
    def unpacked(self) -> bool:
        """Whether each row holds one sequence at most. Attention uses it (model/token_positions.py)."""
        return True


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenRows:
    """R encoded rows, whose N tokens are concatenated without padding."""

    input_ids: Int32[np.ndarray, "N"]
    first_lengths: Int32[np.ndarray, "R"]  # tokens of segment A, with [CLS] and its [SEP]
    offsets: Int64[np.ndarray, "R+1"]  # row r holds the tokens offsets[r]:offsets[r + 1]
    pad_id: int
    truncated: int  # items, or parts of them (TaskRows.cut_part), that lost tokens

    @property
    def count(self) -> int:
        """R."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64[np.ndarray, "R"]:
        """The number of tokens of each row."""
        return np.diff(self.offsets)

    def batch(self, indices: Integer[np.ndarray, "B"], length: int) -> TaskBatch:
        """The rows of these indices, padded to length; index -1 gives a filler row of weight 0."""
        taken = self.take(indices, length)
        labels, weights = self.targets(taken)
        segments = taken.real & (np.arange(length) >= self.first_lengths[taken.rows][:, None])
        return TaskBatch(
            input_ids=np.where(taken.real, self.input_ids[taken.tokens], self.pad_id).astype(np.int32),
            segment_ids=segments.astype(np.int32),
            sequence_ids=taken.real.astype(np.int32),
            positions=np.where(taken.real, np.arange(length), 0).astype(np.int32),
            labels=labels,
            label_weights=weights,
        )

    def take(self, indices: Integer[np.ndarray, "B"], length: int) -> "Taken":
        """Where the tokens of these rows are."""
        filler = indices < 0
        rows = np.where(filler, 0, indices)
        lengths = np.where(filler, 0, self.lengths[rows])
        real = np.arange(length) < lengths[:, None]
        tokens = np.where(real, self.offsets[rows][:, None] + np.arange(length), 0)
        return Taken(rows, filler, real, tokens)

    def targets(self, taken: "Taken") -> tuple[Any, Float32[np.ndarray, "..."]]:
        """labels (arrays [B, ...]) and label_weights of a batch: none, unless a subclass has labels."""
        nothing = np.zeros(len(taken.rows), np.float32)
        return nothing, nothing

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays of the rows by field name. Their names and values are the data set's fingerprint."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


@dataclass(frozen=True, eq=False, kw_only=True)
class TaskRows(TokenRows, Generic[Item]):
    """The rows of a split of a task. Each kind of task adds its labels in a subclass."""

    cut_part: ClassVar[str] = ""  # what `truncated` counts, where these are parts of items
    cut_option: ClassVar[str] = "max_length"  # the option of the task that limits the tokens

    split: Split[Item]  # what was encoded

    def items(self) -> Int64[np.ndarray, "R"]:
        """The index in the split of each row's item: one row per item, unless a kind splits items into several."""
        return np.arange(self.count)


class Taken(NamedTuple):
    """The rows of a batch, and where their tokens are."""

    rows: Int64[np.ndarray, "B"]  # 0 for a filler
    filler: Bool[np.ndarray, "B"]
    real: Bool[np.ndarray, "B T"]  # positions that hold a token
    tokens: Int64[np.ndarray, "B T"]  # index of each token among the N; 0 elsewhere


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledRows(TaskRows[Example]):
    """Rows with one class, one score or a set of classes each."""

    labels: Shaped[np.ndarray, "R *shape"]  # i32 or f32; a set of C classes is [C] of 0 and 1
    label_weights: Float32[np.ndarray, "R"]

    def targets(self, taken: Taken) -> tuple[Any, Float32[np.ndarray, "B"]]:
        return self.labels[taken.rows], np.where(taken.filler, 0, self.label_weights[taken.rows]).astype(np.float32)


def spans(starts: Integer[np.ndarray, "K"], sizes: Integer[np.ndarray, "K"]) -> Int64[np.ndarray, "N"]:
    """The concatenation of the ranges start, start + 1, ..., start + size - 1 of all spans."""
    before = np.cumsum(sizes) - sizes
    return np.arange(sizes.sum()) + np.repeat(starts - before, sizes)
