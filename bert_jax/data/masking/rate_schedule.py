"""The mask rate as a function of the training step."""

from dataclasses import dataclass

import numpy as np

from bert_jax.array_types import Float64, Int64
from bert_jax.data import step_schedule
from bert_jax.data.masking.rule import check_rate


@dataclass(frozen=True)
class RateSchedule:
    """Mask rates that each apply from their step until the next, as mmBERT lowers its rate from phase to phase.

    Marone et al. 2025, section 3: 30%, then 15%, then 5%.
    """

    steps: tuple[int, ...]  # ascending, the first 0
    rates: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "RateSchedule":
        """Parses `0:0.30,50000:0.15,90000:0.05`. Raises UserError for invalid syntax, order or rates."""
        steps, rates = step_schedule.parse(text, "data.mask_schedule", float, "0:0.30,50000:0.15")
        for rate in rates:
            check_rate(rate)
        return cls(steps, rates)

    @classmethod
    def constant(cls, rate: float) -> "RateSchedule":
        """One rate at all steps. Raises UserError for a rate outside (0, 1]."""
        check_rate(rate)
        return cls((0,), (rate,))

    @property
    def highest(self) -> float:
        return max(self.rates)

    def at(self, steps: Int64[np.ndarray, "K"]) -> Float64[np.ndarray, "K"]:
        """The rate of each step."""
        return np.array(self.rates)[np.searchsorted(self.steps, steps, side="right") - 1]
