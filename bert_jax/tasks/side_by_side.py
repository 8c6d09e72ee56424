"""Rows of several sequences, one after another, each of which the encoder reads as a row of its own."""

import abc
import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Int64, Integer

from bert_jax.tasks.example import Item, TaskBatch, TaskRows, TokenRows


class SideBySideBatch(TaskBatch):
    """A batch [B, S * T] whose rows hold S sequences of up to T tokens, numbered from 1 in sequence_ids."""

    @property
    def unpacked(self) -> bool:
        return False


@dataclass(frozen=True, eq=False, kw_only=True)
class SideBySideRows(TaskRows[Item]):
    """Rows of S sequences, one after another; an absent sequence has no tokens."""

    first_lengths: Int32[np.ndarray, "R S"]  # tokens of segment A of each sequence

    @property
    @abc.abstractmethod
    def part_lengths(self) -> Int64[np.ndarray, "R S"]:
        """The number of tokens of each sequence."""

    @abc.abstractmethod
    def targets_of(
        self, rows: Int64[np.ndarray, "B"], present: Bool[np.ndarray, "B S"]
    ) -> tuple[Any, Float32[np.ndarray, "B"]]:
        """labels and label_weights of these rows. A filler is row 0 without a sequence; its weight is not used."""

    @property
    def lengths(self) -> Int64[np.ndarray, "R"]:
        """The number of tokens of each row's longest sequence, which determines what a batch is padded to."""
        return self.part_lengths.max(axis=1)

    def batch(self, indices: Integer[np.ndarray, "B"], length: int) -> TaskBatch:
        """The rows of these indices, [B, S * length]: each sequence padded to length."""
        count, filler = self.part_lengths.shape[1], indices < 0
        rows, parts = np.where(filler, 0, indices), np.arange(count)
        flat = self.by_part.batch(np.where(filler[:, None], -1, rows[:, None] * count + parts).ravel(), length)
        numbers = np.tile(parts + 1, len(rows))[:, None].astype(np.int32)
        shape = len(rows), -1
        labels, weights = self.targets_of(rows, ~filler[:, None] & (self.part_lengths[rows] > 0))
        return SideBySideBatch(
            input_ids=flat.input_ids.reshape(shape),
            segment_ids=flat.segment_ids.reshape(shape),
            sequence_ids=(flat.sequence_ids * numbers).reshape(shape),
            positions=flat.positions.reshape(shape),
            labels=labels,
            label_weights=np.where(filler, 0, weights).astype(np.float32),
        )

    @functools.cached_property
    def by_part(self) -> TokenRows:
        """Rows of one sequence each; an absent one has no tokens."""
        return TokenRows(
            input_ids=self.input_ids,
            first_lengths=self.first_lengths.ravel(),
            offsets=np.concatenate([[0], np.cumsum(self.part_lengths)]),
            pad_id=self.pad_id,
            truncated=0,
        )


def separated(batch: TaskBatch, present: Bool[Array, "B S"]) -> TaskBatch:
    """The batch of B * S rows of one sequence each.

    The rows are the outer axis of the reshaped arrays, so that each device keeps its own rows.
    """
    rows, count = present.shape
    ids, segments, numbers, positions = (leaf.reshape(rows * count, -1) for leaf in batch[:4])
    return TaskBatch(ids, segments, (numbers > 0).astype(jnp.int32), positions, None, None)
