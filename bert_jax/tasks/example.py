"""What a task's file holds, the rows it becomes, and the batch the model sees. Pure numpy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float32, Int32, Int64, Integer, Shaped


class Example(NamedTuple):
    """A text or a pair of texts, with its label as written in the file (None where the file has none)."""

    text: str
    text_pair: str | None
    label: str | None
    line: int  # in the file, from 1


class Sentence(NamedTuple):
    """The words of a sentence and their tags as written (None where the file has none)."""

    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    lines: tuple[int, ...]  # of each word in the file, from 1


Item = TypeVar("Item", Example, Sentence)


@dataclass(frozen=True)
class Split(Generic[Item]):
    """One file of a task, read: at least one item; all of them labelled or none."""

    path: Path
    items: tuple[Item, ...]
    labelled: bool


class TaskBatch(NamedTuple):
    """A fine-tuning batch (numpy or jax arrays). One sequence a row; padding has sequence id 0.

    | field | dtype, shape | |
    |---|---|---|
    | input_ids, segment_ids, sequence_ids, positions | i32[B,T] | as in the pretraining Batch |
    | labels | i32[B], f32[B] or i32[B,T] | a class, a score, or the tag of the word that starts at the slot |
    | label_weights | f32, as labels | 0: a filler row, or a slot that starts no word |
    """

    input_ids: Any
    segment_ids: Any
    sequence_ids: Any
    positions: Any
    labels: Any
    label_weights: Any


@dataclass(frozen=True, eq=False)
class TaskRows:
    """The encoded rows of a split, R of them, their N tokens one after another without padding."""

    input_ids: Int32[np.ndarray, "N"]
    first_lengths: Int32[np.ndarray, "R"]  # tokens of segment A, with [CLS] and its [SEP]
    offsets: Int64[np.ndarray, "R+1"]  # row r holds the tokens offsets[r]:offsets[r + 1]
    labels: Shaped[np.ndarray, "..."]  # [R], or [N] for tagging
    label_weights: Float32[np.ndarray, "..."]  # as labels
    pad_id: int
    truncated: int  # items that lost tokens to max_length
    # Tagging only: where each of the W words starts, and which words each sentence holds.
    word_rows: Int64[np.ndarray, "W"] | None = None
    word_slots: Int64[np.ndarray, "W"] | None = None
    sentence_offsets: Int64[np.ndarray, "K"] | None = None

    @property
    def count(self) -> int:
        """R."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64[np.ndarray, "R"]:
        """Tokens of each row."""
        return np.diff(self.offsets)

    def batch(self, indices: Integer[np.ndarray, "B"], length: int) -> TaskBatch:
        """The rows of these indices, padded to length slots; index -1 gives a filler row of weight 0."""
        filler = indices < 0
        rows = np.where(filler, 0, indices)
        lengths = np.where(filler, 0, self.lengths[rows])
        slots = np.arange(length)
        real = slots < lengths[:, None]
        tokens = np.where(real, self.offsets[rows][:, None] + slots, 0)
        positions = np.where(real, slots, 0).astype(np.int32)
        if self.word_rows is not None:
            labels = np.where(real, self.labels[tokens], 0)
            weights = np.where(real, self.label_weights[tokens], 0)
        else:
            labels = self.labels[rows]
            weights = np.where(filler, 0, self.label_weights[rows])
        return TaskBatch(
            input_ids=np.where(real, self.input_ids[tokens], self.pad_id).astype(np.int32),
            segment_ids=(real & (slots >= self.first_lengths[rows][:, None])).astype(np.int32),
            sequence_ids=real.astype(np.int32),
            positions=positions,
            labels=labels.astype(self.labels.dtype),
            label_weights=weights.astype(np.float32),
        )


def spans(starts: Integer[np.ndarray, "K"], sizes: Integer[np.ndarray, "K"]) -> Int64[np.ndarray, "N"]:
    """start, start + 1 ... of each span, size of them, one span after another."""
    before = np.cumsum(sizes) - sizes
    return np.arange(sizes.sum()) + np.repeat(starts - before, sizes)
