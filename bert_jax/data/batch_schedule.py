"""Which rows a step reads: how many, from which data set, and after how many rows that earlier steps read (law 1)."""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bert_jax.command import UserError
from bert_jax.data import step_schedule


@dataclass(frozen=True)
class BatchSchedule:
    """The number of rows of a global batch by step. Each value applies until the next one; a ramp has a few values."""

    steps: tuple[int, ...]  # ascending, the first 0
    rows: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> "BatchSchedule":
        """Parses `0:256,10000:512`. Raises UserError for invalid syntax or order, and for a batch without rows."""
        schedule = cls(*step_schedule.parse(text, "batch_schedule", int, "0:256,10000:512"))
        for rows in schedule.rows:
            check_batch_size(rows, f"batch_schedule {text!r}")
        return schedule

    @classmethod
    def constant(cls, rows: int) -> "BatchSchedule":
        """The same batch size at all steps. Raises UserError for a size below 1."""
        check_batch_size(rows)
        return cls((0,), (rows,))

    def rows_at(self, step: int) -> int:
        """The number of rows of the global batch of a step, B(s)."""
        return self.rows[bisect.bisect_right(self.steps, step) - 1]


class BatchSegment(NamedTuple):
    """Consecutive steps that read batches of one size from one data set."""

    first: int  # the first step
    end: int | None  # the step after the last; None: no end
    rows: int  # of each batch
    before: int  # rows of the data set that earlier steps read

    def contains(self, step: int) -> bool:
        return self.first <= step and (self.end is None or step < self.end)


def batch_segments(batches: BatchSchedule, phases: Sequence[tuple[int, str]]) -> list[list[BatchSegment]]:
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
        fingerprint, rows = phases[phase][1], batches.rows_at(first)
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
