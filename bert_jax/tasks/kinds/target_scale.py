"""Regression on standardized targets, so that numbers of any size are learned at the usual learning rates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bert_jax.config import TaskConfig
from bert_jax.tasks.task import Item, Rows, Task, check_choice

# Targets up to this size, such as the scores of STS-B (0 to 5), are learned as they are.
LARGE = 10.0


@dataclass(frozen=True)
class ScaledTask(Task[Item, Rows]):
    """A regression whose head predicts (target - target_mean) / target_std, and whose loss is that of these numbers.

    Metrics and predictions are in the units of the files.

    | option | |
    |---|---|
    | scale_targets | yes, no, or auto: where the mean or the deviation of the training targets exceeds LARGE |
    | target_mean, target_std | of the training file; 0 and 1 without scaling |
    """

    scale_targets: str = TaskConfig.scale_targets
    target_mean: float = 0.0
    target_std: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("task.scale_targets", self.scale_targets, ("auto", "yes", "no"))

    def with_scale_of(self, targets: Sequence[float] | np.ndarray) -> "ScaledTask[Item, Rows]":
        """The task with the mean and the deviation of these targets, where scale_targets asks for it."""
        mean, deviation = float(np.mean(targets)), float(np.std(targets))
        if self.scale_targets == "no" or (self.scale_targets == "auto" and max(abs(mean), deviation) <= LARGE):
            return self
        return replace(self, target_mean=mean, target_std=deviation or 1.0)
