"""Which rows a step reads: how many, and after how many rows that earlier steps of its phase read (law 1)."""

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from bert_jax.command import UserError
from bert_jax.data import step_schedule
from bert_jax.data.step_schedule import StepSchedule


def batch_schedule(text: str, batch_size: int) -> StepSchedule[int]:
    """The number of rows of each step's global batch, B(s): `0:256,10000:512`, or batch_size if the text is empty.

    Raises UserError for invalid syntax or order, and for a batch without rows.
    """
    if not text:
        check_batch_size(batch_size)
        return StepSchedule.constant(batch_size)
    schedule = step_schedule.parse(text, "batch_schedule", int, "0:256,10000:512")
    for rows in schedule.values:
        check_batch_size(rows, f"batch_schedule {text!r}")
    return schedule


class BatchSegment(NamedTuple):
    """Consecutive steps of one phase that read batches of one size."""

    first: int  # the first step
    end: int | None  # the step after the last; None: no end
    rows: int  # of each batch
    before: int  # rows that earlier steps of the phase read

    def contains(self, step: int) -> bool:
        return self.first <= step and (self.end is None or step < self.end)

    def steps_before(self, step: int) -> int:
        """How many steps of the segment come before a step."""
        return max(0, (step if self.end is None else min(step, self.end)) - self.first)


def batch_segments(batches: StepSchedule[int], starts: Sequence[int]) -> list[list[BatchSegment]]:
    """The segments of each phase, from the first step of each phase. The first phase begins at step 0."""
    borders = sorted({*batches.steps, *starts})
    found: list[list[BatchSegment]] = [[] for _ in starts]
    for first, end in itertools.zip_longest(borders, borders[1:]):
        segments = found[bisect.bisect_right(starts, first) - 1]
        before = sum(segment.rows * segment.steps_before(first) for segment in segments)
        segments.append(BatchSegment(first, end, batches.at(first), before))
    return found


def check_batch_size(rows: int, where: str = "") -> None:
    """Raises UserError for a batch without rows."""
    if rows < 1:
        source = f" in {where}" if where else ""
        flag = "" if where else ", for example --config.batch_size=256"
        raise UserError(f"batch_size is {rows}{source}. Use at least one row{flag}")
