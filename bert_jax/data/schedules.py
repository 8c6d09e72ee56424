"""Values that depend on the training step: batch sizes, mask rates, folders of shards.

`parse` reads `STEP:VALUE,STEP:VALUE`, `StepSchedule` holds it. Segments say which rows each step reads (law 1).
"""

import bisect
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from bert_jax.data.masking.rule import check_rate
from bert_jax.errors import UserError

Value = TypeVar("Value")
_NEXT = re.compile(r",(?=\s*-?\d+\s*:)")  # the comma before the next STEP:


@dataclass(frozen=True)
class StepSchedule(Generic[Value]):
    """A value for every step: a listed value applies from its step until the next listed one."""

    steps: tuple[int, ...]  # ascending
    values: tuple[Value, ...]

    @classmethod
    def constant(cls, value: Value) -> "StepSchedule[Value]":
        """The same value at all steps."""
        return cls((0,), (value,))

    def at(self, step: int) -> Value:
        """The value at a step."""
        return self.values[bisect.bisect_right(self.steps, step) - 1]


def parse(
    text: str, key: str, read: Callable[[str], Value], example: str, first: int = 0, *, commas: bool = False
) -> StepSchedule[Value]:
    """Parses `STEP:VALUE,STEP:VALUE`.

    Args:
      key: the configuration key, for messages.
      read: converts the text of a value; raises ValueError for an invalid one.
      example: an example for messages.
      first: 0 if the first step must be 0; 1 if it may be any later step.
      commas: whether a value may hold commas, except before a STEP:.

    Raises:
      UserError: for invalid syntax or values, and for steps that do not ascend.
    """
    try:
        pairs = [entry.split(":", 1) for entry in (_NEXT.split(text) if commas else text.split(","))]
        steps = tuple(int(step) for step, _ in pairs)
        values = tuple(read(value) for _, value in pairs)
    except ValueError:
        raise UserError(f"{key} is {text!r}, not of the form STEP:VALUE,STEP:VALUE, such as {example}") from None
    starts_right = steps[0] >= 1 if first else steps[0] == 0
    if not starts_right or any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise UserError(f"{key} is {text!r}. Its steps must ascend from {first}, such as {example}")
    return StepSchedule(steps, values)


def batch_schedule(text: str, batch_size: int) -> StepSchedule[int]:
    """B(s), the rows of each step's global batch: `0:256,10000:512`, or batch_size if the text is empty.

    Raises UserError for invalid syntax or order, and for a batch without rows.
    """
    if not text:
        check_batch_size(batch_size)
        return StepSchedule.constant(batch_size)
    schedule = parse(text, "batch_schedule", int, "0:256,10000:512")
    for rows in schedule.values:
        check_batch_size(rows, f"batch_schedule {text!r}")
    return schedule


def check_batch_size(rows: int, source: str = "") -> None:
    """Raises UserError for a batch without rows; `source` names the key that it is from, if not batch_size."""
    if rows < 1:
        problem = f"batch_size is {rows}" + (f" in {source}" if source else "")
        example = "" if source else ", for example --config.batch_size=256"
        raise UserError(f"{problem}. Use at least one row{example}")


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
    """The segments of every phase. `starts` holds the phases' first steps, beginning with 0."""
    borders = sorted({*batches.steps, *starts})
    phases: list[list[BatchSegment]] = [[] for _ in starts]
    for first, end in itertools.zip_longest(borders, borders[1:]):
        segments = phases[bisect.bisect_right(starts, first) - 1]
        before = sum(segment.rows * segment.steps_before(first) for segment in segments)
        segments.append(BatchSegment(first, end, batches.at(first), before))
    return phases


# Mask rates: constant between the points of a schedule, or falling linearly.
#
# mmBERT lowers its rate from phase to phase (Marone et al. 2025, section 3: 30%, then 15%, then 5%). Ankner et al. 2024
# lower it linearly over the whole run, from 30% to 15%.

STEPS, LINEAR = "steps", "linear"  # the values of data.mask_shape
EXAMPLE = "0:0.30,50000:0.15"


class LinearSchedule(StepSchedule[float]):
    """Values interpolated linearly between the given steps. The last one applies after its step."""

    def at(self, step: int) -> float:
        """The value at a step."""
        index = bisect.bisect_right(self.steps, step) - 1
        first, before = self.steps[index], self.values[index]
        if index + 1 == len(self.steps):
            return before
        return before + (self.values[index + 1] - before) * (step - first) / (self.steps[index + 1] - first)


def mask_rates(rate: float | None, schedule: str, shape: str = STEPS) -> StepSchedule[float] | None:
    """The rates of data.mask_rate, data.mask_schedule and data.mask_shape; None: the shards' rate.

    Raises UserError if both rates are set, and as rate_schedule does.
    """
    if rate is not None and schedule:
        raise UserError(
            "data.mask_rate and data.mask_schedule are both set; set only one of them. --config.data.mask_rate=none "
            "unsets the rate of a recipe"
        )
    if rate is None and not schedule and shape == STEPS:
        return None
    return rate_schedule(schedule, rate, shape)


def rate_schedule(text: str, rate: float | None = None, shape: str = STEPS) -> StepSchedule[float]:
    """The rates of `0:0.30,50000:0.15,90000:0.05`, or one rate at all steps if it is given.

    Args:
      shape: steps: a rate applies until the next one; linear: rates in between are interpolated.

    Raises:
      UserError: for invalid syntax or order, rates outside (0, 1], an unknown shape, and a linear schedule of one rate.
    """
    if shape not in (STEPS, LINEAR):
        raise UserError(f"unknown data.mask_shape {shape!r}; choose from {STEPS}, {LINEAR}")
    constant = None if rate is None else StepSchedule.constant(rate)
    schedule = constant or parse(text, "data.mask_schedule", float, EXAMPLE)
    for value in schedule.values:
        check_rate(value)
    if shape == STEPS:
        return schedule
    if len(schedule.steps) < 2:
        raise UserError(
            "data.mask_shape is linear, but there is only one mask rate. Give at least two points, such as "
            f"--config.data.mask_schedule={EXAMPLE}"
        )
    return LinearSchedule(schedule.steps, schedule.values)
