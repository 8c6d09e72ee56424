"""Which rows a step reads: how many, of which data set, and after how many read before (law 1)."""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bert_jax.command import UserError
from bert_jax.data import step_schedule


@dataclass(frozen=True)
class BatchSchedule:
    """Rows of a global batch that each hold from their step until the next one's: a ramp is a few such steps."""

    steps: tuple[int, ...]  # ascending, the first 0
    rows: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> "BatchSchedule":
        """From `0:256,10000:512`. Raises UserError for another form or order, and a batch without rows."""
        schedule = cls(*step_schedule.parse(text, "batch_schedule", int, "0:256,10000:512"))
        for rows in schedule.rows:
            check_batch_size(rows, f"batch_schedule {text!r}")
        return schedule

    @classmethod
    def constant(cls, rows: int) -> "BatchSchedule":
        """One batch size at all steps. Raises UserError for one below 1."""
        check_batch_size(rows)
        return cls((0,), (rows,))

    def rows_at(self, step: int) -> int:
        """B(s)."""
        return self.rows[bisect.bisect_right(self.steps, step) - 1]


class BatchSegment(NamedTuple):
    """Steps one after another that read batches of one size from one data set."""

    first: int  # step
    end: int | None  # the step behind the last; None: without end
    rows: int  # of each batch
    before: int  # rows of the data set that earlier steps have read

    def holds(self, step: int) -> bool:
        return self.first <= step and (self.end is None or step < self.end)


def batch_segments(batches: BatchSchedule, phases: Sequence[tuple[int, str]]) -> list[list[BatchSegment]]:
    """The segments of each phase, a phase being its first step and the fingerprint of the data set it reads.

    The first phase begins at step 0, and each ends where the next begins. A data set that an earlier phase has read is
    read on from there: no row is left out, and none comes twice in an epoch.
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
        place = f" of {where}" if where else ""
        change = "in its place" if where else "--config.batch_size=N"
        raise UserError(f"batch_size {rows}{place}: a batch has at least one row; give {change}, N >= 1")
