"""The mask rate as a function of the training step."""

import itertools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from bert_jax.command import UserError
from bert_jax.data.masking.rule import check_rate


@dataclass(frozen=True)
class RateSchedule:
    """Rates that each hold from their step until the next one's, as mmBERT lowers its rate from phase to phase.

    Marone et al. 2025, section 3: 30%, then 15%, then 5%.
    """

    steps: tuple[int, ...]  # ascending, the first 0
    rates: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "RateSchedule":
        """From `0:0.30,50000:0.15,90000:0.05`. Raises UserError for another form, order, or rate."""
        try:
            pairs = [entry.split(":") for entry in text.split(",")]
            steps = tuple(int(step) for step, _ in pairs)
            rates = tuple(float(rate) for _, rate in pairs)
        except ValueError:
            raise UserError(f"mask schedule {text!r}; it is STEP:RATE,STEP:RATE, as 0:0.30,50000:0.15") from None
        for rate in rates:
            check_rate(rate)
        if steps[0] != 0 or any(later <= earlier for earlier, later in itertools.pairwise(steps)):
            raise UserError(f"mask schedule {text!r}; its steps ascend from 0, as 0:0.30,50000:0.15")
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
