"""The length of a run in tokens."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLength:
    """A run that ends once its steps have read this many tokens.

    tokens   the length, config.tokens
    before   the number of tokens that all steps before a step read, as a function of that step which never falls
             (PhasedLoader.tokens_before; train/branch.py), so that all processes and every restart know it without
             counting
    """

    tokens: float
    before: Callable[[int], float]

    def share(self, step: int) -> float:
        """Returns the share of the run that is done before a step, from 0 to 1."""
        return min(1.0, self.before(step) / self.tokens)

    @property
    def steps(self) -> int:
        """The number of steps of the run: the first step before which all tokens are read."""
        most = 1
        while self.share(most) < 1.0:
            most *= 2
        least = most // 2  # steps before it are too few, unless it is 0
        while least + 1 < most:
            middle = (least + most) // 2
            least, most = (least, middle) if self.share(middle) >= 1.0 else (middle, most)
        return most
