"""Values that depend on the training step: batch sizes, mask rates, folders of shards.

`StepSchedule` serves all of them. Segments say which rows each step reads, and how many (law 1).
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from bert_jax.data.masking.rule import check_rate
from bert_jax.errors import UserError

Value = TypeVar("Value")


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


def read_steps(values: Mapping[Any, Value], key: str, example: str, first: int = 0) -> StepSchedule[Value]:
    """Returns the schedule of a configuration's {STEP: VALUE}; JSON has the steps as text.

    Args:
        key: The configuration key, for messages.
        first: 0 if the schedule must begin at step 0; 1 if it may begin at any later step.

    Raises:
        UserError: for a schedule that begins elsewhere.
    """
    steps = sorted((int(step), value) for step, value in values.items())
    if not steps or not (steps[0][0] >= 1 if first else steps[0][0] == 0):
        raise UserError(f"{key} is {dict(values)!r}. Its steps must begin at {first}, such as {example}")
    return StepSchedule(tuple(step for step, _ in steps), tuple(value for _, value in steps))


def batch_schedule(schedule: Mapping[Any, int], batch_size: int) -> StepSchedule[int]:
    """Returns the rows of each step's global batch: {0: 256, 10000: 512}, or batch_size if the schedule is empty.

    Raises UserError for a schedule that does not begin at step 0, and for a batch without rows.
    """
    if not schedule:
        check_batch_size(batch_size)
        return StepSchedule.constant(batch_size)
    batches = read_steps(schedule, "batch_schedule", "{0: 256, 10000: 512}")
    for rows in batches.values:
        check_batch_size(rows, "batch_schedule")
    return batches


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
EXAMPLE = "{0: 0.30, 50000: 0.15}"


class LinearSchedule(StepSchedule[float]):
    """Values interpolated linearly between the given steps. The last one applies after its step."""

    def at(self, step: int) -> float:
        """The value at a step."""
        index = bisect.bisect_right(self.steps, step) - 1
        first, before = self.steps[index], self.values[index]
        if index + 1 == len(self.steps):
            return before
        return before + (self.values[index + 1] - before) * (step - first) / (self.steps[index + 1] - first)


def mask_rates(rate: float | None, schedule: Mapping[Any, float], shape: str = STEPS) -> StepSchedule[float] | None:
    """Returns the rates of data.mask_rate, data.mask_schedule and data.mask_shape, or None for the shards' rate.

    Args:
        shape: steps: each rate applies until the next one; linear: the rate changes linearly from each to the next.

    Raises:
        UserError: if both rates are set, for a schedule that does not begin at step 0, a rate outside (0, 1], an
            unknown shape, and a linear schedule of one rate.
    """
    if rate is not None and schedule:
        raise UserError(
            "data.mask_rate and data.mask_schedule are both set; set only one of them. --config.data.mask_rate=none "
            "unsets the rate of a recipe"
        )
    if shape not in (STEPS, LINEAR):
        raise UserError(f"unknown data.mask_shape {shape!r}; choose from {STEPS}, {LINEAR}")
    if rate is None and not schedule and shape == STEPS:
        return None
    constant = {} if rate is None else {0: rate}
    rates = read_steps(constant or schedule, "data.mask_schedule", EXAMPLE)
    if shape == LINEAR and len(rates.steps) < 2:
        raise UserError(
            "data.mask_shape is linear, but there is only one mask rate. Give at least two points, such as "
            f"--config.data.mask_schedule='{EXAMPLE}'"
        )
    for value in rates.values:
        check_rate(value)
    return LinearSchedule(rates.steps, rates.values) if shape == LINEAR else rates
