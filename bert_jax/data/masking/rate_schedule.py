"""The mask rate as a function of the training step, as mmBERT lowers its rate from phase to phase.

Marone et al. 2025, section 3: 30%, then 15%, then 5%.
"""

from bert_jax.data import step_schedule
from bert_jax.data.masking.rule import check_rate
from bert_jax.data.step_schedule import StepSchedule


def rate_schedule(text: str, rate: float | None = None) -> StepSchedule[float]:
    """The rates of `0:0.30,50000:0.15,90000:0.05`, or one rate at all steps if it is given.

    Raises UserError for invalid syntax or order, and for rates outside (0, 1].
    """
    if rate is None:
        schedule = step_schedule.parse(text, "data.mask_schedule", float, "0:0.30,50000:0.15")
    else:
        schedule = StepSchedule.constant(rate)
    for each in schedule.values:
        check_rate(each)
    return schedule
