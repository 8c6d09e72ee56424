"""Stops a run at a step whose loss or gradient is not finite, or counts the step as skipped.

The train step itself has then made no update (step_lib.train_step), so that the host may read the flag one step late.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from bert_jax.command import UserError
from bert_jax.config import TrainConfig
from bert_jax.storage.location import Location
from bert_jax.train.checkpoint import Checkpoints


class FiniteCheck:
    """Reads the flag of each step before anything of that step is saved.

    `skipped` counts the updates that were left out since the run began, including those before a restart.
    """

    def __init__(
        self,
        config: TrainConfig,
        skipped: int,
        workdir: Location,
        checkpoints: Checkpoints,
        report: Callable[[str], None],
    ) -> None:
        self.skipped = skipped
        self._on_nonfinite, self._skip_at_most = config.on_nonfinite, config.skip_at_most
        self._workdir, self._checkpoints, self._report = workdir, checkpoints, report

    def __call__(self, step: int, values: Mapping[str, Any]) -> bool:
        """Returns whether a step made its update; `values` are the step's metrics.

        Raises UserError, naming the step and the last checkpoint, when it did not and the run stops for that.
        """
        if values["finite"]:
            return True
        self.skipped = int(values["skipped"])
        found = f"the loss is {_format(values['loss'])} and the gradient norm {_format(values['gradient_norm'])}"
        if self._on_nonfinite == "skip" and self.skipped <= self._skip_at_most:
            self._report(
                f"{found} at step {step}: skipped this update ({self.skipped} of at most {self._skip_at_most})"
            )
            return False
        self._checkpoints.wait()  # a save may be under way
        last = self._checkpoints.latest_step()
        where = "there is no checkpoint yet" if last is None else f"the last checkpoint is step {last}"
        advice = "Lower --config.optimizer.learning_rate, lengthen --config.optimizer.warmup_steps, or "
        if self._on_nonfinite == "skip":
            advice += f"raise --config.skip_at_most={self._skip_at_most}"
        else:
            advice += "skip such steps with --config.on_nonfinite=skip"
        raise UserError(f"{found} at step {step}; {where} in {self._workdir / 'checkpoints'}. {advice}")


def _format(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else str(value)
