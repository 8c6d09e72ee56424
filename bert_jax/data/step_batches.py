"""Batches by step, made several steps at a time where steps are requested in order."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.data.batch_schedule import BatchSegment
from bert_jax.data.example import Batch

# Positions that are made together if steps are requested in order: numpy's calls then cost little even for batches of
# a few rows. The number changes no batch.
_BLOCK_POSITIONS = 1 << 18


class _Block(NamedTuple):
    """The most recently made batches: those of some consecutive steps, concatenated."""

    first: int
    steps: int
    picked: Int64[np.ndarray, "K"]
    batches: Batch


class StepBatches:
    """The batches of the steps of some segments, from a function that makes rows by number.

    seq_len   the positions of a row
    what      the data, for messages
    make      (numbers [R], steps [R]) -> these rows of the segments' data, each as its step reads it, as one Batch
    lanes     divides the number of rows of all batches. The rows of a batch whose numbers are equal modulo this follow
              one another in it, so that a process, which loads consecutive rows, reads few lanes
    """

    def __init__(
        self,
        segments: Sequence[BatchSegment],
        seq_len: int,
        what: str,
        make: Callable[[np.ndarray, np.ndarray], Batch],
        lanes: int = 1,
    ) -> None:
        self.segments, self._lanes = tuple(segments), lanes
        self._seq_len, self._what, self._make = seq_len, what, make
        self._block: _Block | None = None

    @property
    def changes(self) -> tuple[int, ...]:
        """The first step of each segment: from it on, batches may have another number of rows."""
        return tuple(segment.first for segment in self.segments)

    def rows_at(self, step: int) -> int:
        """The number of rows of a step's global batch. Raises ValueError for a step outside the segments."""
        return self._segment(step).rows

    def rows_before(self, step: int) -> int:
        """The number of rows that the steps of the segments before this one read."""
        return sum(segment.rows * segment.steps_before(step) for segment in self.segments)

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Batch:
        """The global batch of a step, or only the selected `rows` of it, which alone are then made.

        The arrays are read-only. Raises ValueError for a step outside the segments, such as a negative one.
        """
        segment = self._segment(step)
        picked = np.arange(segment.rows, dtype=np.int64)[slice(None) if rows is None else rows]
        block = self._block
        same = block is not None and np.array_equal(block.picked, picked)
        if block is None or not same or not block.first <= step < block.first + block.steps:
            # If steps are requested in order, several steps are made together.
            in_order = block is not None and same and step == block.first + block.steps
            steps = max(1, _BLOCK_POSITIONS // max(1, self._seq_len * picked.size)) if in_order else 1
            if segment.end is not None:  # a block does not cross segments
                steps = min(steps, segment.end - step)
            block = self._block = _Block(step, steps, picked, self._batches(segment, step, steps, picked))
        begin = (step - block.first) * picked.size
        return Batch(*(field if field is None else field[begin : begin + picked.size] for field in block.batches))

    def _segment(self, step: int) -> BatchSegment:
        found = next((segment for segment in self.segments if segment.contains(step)), None)
        if found is None:
            raise ValueError(f"no batch of {self._what} is assigned to step {step}")
        return found

    def _batches(self, segment: BatchSegment, first: int, count: int, picked: Int64[np.ndarray, "K"]) -> Batch:
        """The picked rows of `count` consecutive steps of a segment, concatenated."""
        steps = np.arange(first, first + count)
        lane, index = np.divmod(picked, segment.rows // self._lanes)
        within = index * self._lanes + lane  # `picked` itself with one lane
        numbers = segment.before + (steps[:, None] - segment.first) * segment.rows + within
        made = self._make(numbers.reshape(-1), np.repeat(steps, picked.size))
        for field in made:
            if field is not None:
                field.flags.writeable = False
        return made
