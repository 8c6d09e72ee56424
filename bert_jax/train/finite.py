"""What becomes of a run at a step whose loss or gradient is not finite. The step itself has made no update then."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bert_jax.command import UserError


class FiniteCheck:
    """Reads each step's flag, before anything of that step is saved: stops the run, or says what was left out.

    `skipped` counts the updates left out since the run began, those before a restart too.
    """

    def __init__(
        self,
        choice: str,
        at_most: int,
        skipped: int,
        workdir: Path,
        last_checkpoint: Callable[[], int | None],
        say: Callable[[str], None],
    ) -> None:
        self.skipped = skipped
        self._choice, self._at_most, self._workdir = choice, at_most, workdir
        self._last_checkpoint, self._say = last_checkpoint, say

    def __call__(self, step: int, values: Mapping[str, Any]) -> bool:
        """Whether a step's update was made. values are its metrics.

        Raises UserError, with the step and the last checkpoint, when it was not and the run stops at that.
        """
        if values["finite"]:
            return True
        self.skipped = int(values["skipped"])
        found = f"the loss is {_said(values['loss'])} and the gradient's norm {_said(values['gradient_norm'])}"
        if self._choice == "skip" and self.skipped <= self._at_most:
            self._say(f"{found} at step {step}: no update ({self.skipped} of at most {self._at_most})")
            return False
        last = self._last_checkpoint()
        where = "there is no checkpoint yet" if last is None else f"the last checkpoint is step {last}"
        advice = "Lower --config.optimizer.learning_rate, lengthen --config.optimizer.warmup_steps, or "
        if self._choice == "skip":
            advice += f"raise --config.skip_at_most={self._at_most}"
        else:
            advice += "leave such steps out by --config.on_nonfinite=skip"
        raise UserError(f"{found} at step {step}; {where} in {self._workdir / 'checkpoints'}. {advice}")


def _said(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else str(value)
