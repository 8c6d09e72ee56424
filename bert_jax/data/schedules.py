"""Values that depend on the training step, such as batch sizes, mask rates and folders of shards.

A `StepSchedule` holds any of them. A `BatchSegment` tells which rows its steps read (law 1).
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
    """A value for every step. A listed value applies from its step until the next listed step."""

    steps: tuple[int, ...]  # ascending
    values: tuple[Value, ...]

    @classmethod
    def constant(cls, value: Value) -> "StepSchedule[Value]":
        """Returns a schedule with one value at all steps."""
        return cls((0,), (value,))

    def at(self, step: int) -> Value:
        """Returns the value at a step."""
        # The latest listed step that is not after `step`; a step that is listed itself already has its new value.
        return self.values[bisect.bisect_right(self.steps, step) - 1]


def read_steps(values: Mapping[Any, Value], key: str, example: str, first: int = 0) -> StepSchedule[Value]:
    """Reads a {STEP: VALUE} of the configuration. Steps may be text, as in JSON, and in any order.

    Args:
        key: The configuration key, for errors.
        example: A valid schedule, for errors.
        first: 0 if the schedule must begin at step 0; 1 if it must begin at a later step.

    Raises:
        UserError: The schedule is empty or begins at another step.
    """
    steps = sorted((int(step), value) for step, value in values.items())
    if not steps or not (steps[0][0] >= 1 if first else steps[0][0] == 0):
        raise UserError(f"{key} is {dict(values)!r}. Its steps must begin at {first}, such as {example}")
    return StepSchedule(tuple(step for step, _ in steps), tuple(value for _, value in steps))


def batch_schedule(schedule: Mapping[Any, int], batch_size: int) -> StepSchedule[int]:
    """Returns the global batch size by step: `schedule`, or batch_size at all steps if it is empty.

    Raises:
        UserError: The schedule does not begin at step 0, or a batch has no rows.
    """
    if not schedule:
        check_batch_size(batch_size)
        return StepSchedule.constant(batch_size)
    batches = read_steps(schedule, "batch_schedule", "{0: 256, 10000: 512}")
    for rows in batches.values:
        check_batch_size(rows, "batch_schedule")
    return batches


def check_batch_size(rows: int, source: str = "") -> None:
    """Raises UserError for a batch without rows. `source` names the configuration key if it is not batch_size."""
    if rows < 1:
        problem = f"batch_size is {rows}" + (f" in {source}" if source else "")
        example = "" if source else ", for example --config.batch_size=256"
        raise UserError(f"{problem}. Use at least one row{example}")


class BatchSegment(NamedTuple):
    """Consecutive steps of a phase whose batches have one size."""

    first: int  # first step
    end: int | None  # step after the last one; None: no end
    rows: int  # in each batch
    before: int  # rows that earlier segments of the phase read

    def contains(self, step: int) -> bool:
        """Returns whether the step is in the segment."""
        return self.first <= step and (self.end is None or step < self.end)

    def steps_before(self, step: int) -> int:
        """Counts the segment's steps before a step."""
        return max(0, (step if self.end is None else min(step, self.end)) - self.first)


def batch_segments(batches: StepSchedule[int], starts: Sequence[int]) -> list[list[BatchSegment]]:
    """Returns every phase's segments, given the phases' first steps (0 for the first one)."""
    # A segment ends where the batch size or the phase changes.
    borders = sorted({*batches.steps, *starts})
    phases: list[list[BatchSegment]] = [[] for _ in starts]
    # zip_longest pairs the last border with None: the last segment has no end.
    for first, end in itertools.zip_longest(borders, borders[1:]):
        segments = phases[bisect.bisect_right(starts, first) - 1]
        # Rows are numbered from 0 in each phase, because every phase has a mixture of its own.
        before = sum(segment.rows * segment.steps_before(first) for segment in segments)
        segments.append(BatchSegment(first, end, batches.at(first), before))
    return phases


# Mask rates: constant between the steps of a schedule, as in mmBERT (Marone et al. 2025, section 3: 30%, then 15%, then
# 5%), or linear over the whole run (Ankner et al. 2024: from 30% to 15%).

STEPS, LINEAR = "steps", "linear"  # the values of data.mask_shape
EXAMPLE = "{0: 0.30, 50000: 0.15}"


class LinearSchedule(StepSchedule[float]):
    """Values interpolated linearly between the given steps. The last value applies after its step."""

    def at(self, step: int) -> float:
        """Returns the value at a step."""
        index = bisect.bisect_right(self.steps, step) - 1
        first, before = self.steps[index], self.values[index]
        # There is no later point to interpolate to.
        if index + 1 == len(self.steps):
            return before
        return before + (self.values[index + 1] - before) * (step - first) / (self.steps[index + 1] - first)


def mask_rates(rate: float | None, schedule: Mapping[Any, float], shape: str = STEPS) -> StepSchedule[float] | None:
    """Returns the mask rates by step, or None for the rate of the shards.

    Args:
        rate: data.mask_rate.
        schedule: data.mask_schedule.
        shape: data.mask_shape. `steps` keeps a rate until the next step of the schedule, `linear` interpolates.

    Raises:
        UserError: Both rates are set, the schedule does not begin at step 0, a rate is outside (0, 1], the shape is
            unknown, or a linear schedule has a single rate.
    """
    if rate is not None and schedule:
        raise UserError(
            "data.mask_rate and data.mask_schedule are both set; set only one of them. --config.data.mask_rate=none "
            "unsets the rate of a recipe"
        )
    if shape not in (STEPS, LINEAR):
        raise UserError(f"unknown data.mask_shape {shape!r}; choose from {STEPS}, {LINEAR}")
    # A linear shape without rates is not the shards' rate: read_steps reports the missing schedule.
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
