"""Which rows a step reads: how many, from which data set, and after how many rows that earlier steps read (law 1)."""

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
    """Consecutive steps that read batches of one size from one data set."""

    first: int  # the first step
    end: int | None  # the step after the last; None: no end
    rows: int  # of each batch
    before: int  # rows of the data set that earlier steps read

    def contains(self, step: int) -> bool:
        return self.first <= step and (self.end is None or step < self.end)

    def steps_before(self, step: int) -> int:
        """How many steps of the segment come before a step."""
        return max(0, (step if self.end is None else min(step, self.end)) - self.first)


def batch_segments(batches: StepSchedule[int], phases: Sequence[tuple[int, str]]) -> list[list[BatchSegment]]:
    """The segments of each phase; a phase is its first step and the fingerprint of its data set.

    The first phase begins at step 0, and each phase ends where the next begins. If an earlier phase has read a data
    set, a later phase resumes it there: within an epoch no row is left out or repeated.
    """
    starts = [first for first, _ in phases]
    borders = sorted({*batches.steps, *starts})
    read: dict[str, int] = {}
    found: list[list[BatchSegment]] = [[] for _ in phases]
    for first, end in itertools.zip_longest(borders, borders[1:]):
        phase = bisect.bisect_right(starts, first) - 1
        fingerprint, rows = phases[phase][1], batches.at(first)
        before = read.get(fingerprint, 0)
        found[phase].append(BatchSegment(first, end, rows, before))
        if end is not None:
            read[fingerprint] = before + (end - first) * rows
    return found


def check_batch_size(rows: int, where: str = "") -> None:
    """Raises UserError for a batch without rows."""
    if rows < 1:
        source = f" in {where}" if where else ""
        flag = "" if where else ", for example --config.batch_size=256"
        raise UserError(f"batch_size is {rows}{source}. Use at least one row{flag}")
