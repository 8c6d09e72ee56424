"""The mask rate as a function of the training step: constant between the points of a schedule, or falling linearly.

mmBERT lowers its rate from phase to phase (Marone et al. 2025, section 3: 30%, then 15%, then 5%). Ankner et al. 2024
lower it linearly over the whole run, from 30% to 15%.
"""

import bisect

from bert_jax.command import UserError
from bert_jax.data import step_schedule
from bert_jax.data.masking.rule import check_rate
from bert_jax.data.step_schedule import StepSchedule

STEPS, LINEAR = "steps", "linear"  # the values of data.mask_shape
EXAMPLE = "0:0.30,50000:0.15"


class LinearSchedule(StepSchedule[float]):
    """A value for each step, interpolated linearly between the given ones. The last one applies after its step."""

    def at(self, step: int) -> float:
        """The value at a step."""
        index = bisect.bisect_right(self.steps, step) - 1
        first, before = self.steps[index], self.values[index]
        if index + 1 == len(self.steps):
            return before
        return before + (self.values[index + 1] - before) * (step - first) / (self.steps[index + 1] - first)


def mask_rates(rate: float | None, schedule: str, shape: str = STEPS) -> StepSchedule[float] | None:
    """The rates of data.mask_rate, data.mask_schedule and data.mask_shape, or None for the rate of the shards.

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

    shape   steps: each rate applies until the next one; linear: the rate changes linearly from each to the next
    Raises UserError for invalid syntax or order, for rates outside (0, 1], for an unknown shape, and for a linear
    schedule of one rate.
    """
    if shape not in (STEPS, LINEAR):
        raise UserError(f"unknown data.mask_shape {shape!r}; choose from {STEPS}, {LINEAR}")
    if rate is None:
        schedule = step_schedule.parse(text, "data.mask_schedule", float, EXAMPLE)
    else:
        schedule = StepSchedule.constant(rate)
    for each in schedule.values:
        check_rate(each)
    if shape == STEPS:
        return schedule
    if len(schedule.steps) < 2:
        raise UserError(
            "data.mask_shape is linear, but there is only one mask rate. Give at least two points, such as "
            f"--config.data.mask_schedule={EXAMPLE}"
        )
    return LinearSchedule(schedule.steps, schedule.values)
