"""Names of held-out metrics, the direction in which each improves, and which step has the best one.

This module does not import jax, since data preparation also draws curves of these metrics.
"""

import math
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any

from bert_jax.command import UserError

PREFIX = "eval_"  # the logs write eval_loss for what the evaluation itself calls loss
_LOWER_IS_BETTER = ("loss", "perplexity", "mse")


def lower_is_better(metric: str) -> bool:
    """Whether a metric falls as a model improves, as losses do; others (accuracy, F1, correlation) rise.

    The name of a source, as in wiki/mlm_loss, does not count.
    """
    return any(word in metric.rpartition("/")[2] for word in _LOWER_IS_BETTER)


def is_threshold(metric: str) -> bool:
    """Whether a metric of a task is a threshold that dev decides, and no score: threshold/LABEL, best_f1_thresh."""
    return "/" in metric or metric.endswith(("threshold", "_thresh"))


class Best:
    """Finds the step with the best value of a held-out metric, the earliest among equals.

    `values` is the metric by step, and may grow while this is in use; a step without a value is never the best.
    """

    def __init__(self, metric: str, values: MutableMapping[int, float]) -> None:
        if not metric.startswith(PREFIX):
            raise UserError(
                f"checkpoint.best is {metric!r}; expected a held-out metric as logs name it, such as eval_loss"
            )
        self.metric, self.values = metric, values
        self._sign = 1.0 if lower_is_better(metric) else -1.0

    def note(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Records the value of a step, if the metric was measured there and is finite."""
        value = self.value_in(evaluation)
        if value is not None:
            self.values[step] = value

    def value_in(self, evaluation: Mapping[str, float]) -> float | None:
        """Returns the value of the metric in an evaluation; None if it was not measured or is not finite."""
        value = float(evaluation.get(self.metric.removeprefix(PREFIX), math.nan))
        return value if math.isfinite(value) else None

    def is_better(self, value: float, other: float) -> bool:
        """Whether one value of the metric is better than another."""
        return self._sign * value < self._sign * other

    def check_among(self, measured: Collection[str]) -> None:
        """Raises UserError when the metric is not one of those that are measured."""
        if self.metric.removeprefix(PREFIX) not in measured:
            names = ", ".join(PREFIX + name for name in measured)
            raise UserError(f"checkpoint.best is {self.metric!r}, which this run does not measure; choose from {names}")

    def beaten_by(self, evaluation: Mapping[str, float]) -> bool:
        """Whether an evaluation is better than that of every step recorded so far."""
        value = self.value_in(evaluation)
        return value is not None and all(self.is_better(value, other) for other in self.values.values())

    def among(self, steps: Sequence[int]) -> int | None:
        """Returns the best of these steps, or None when none of them was measured."""
        measured = [step for step in steps if step in self.values]
        return min(measured, key=lambda step: (self._sign * self.values[step], step), default=None)

    def described(self, step: int) -> dict[str, Any]:
        """Returns the content of best.json when this step is the best."""
        better = "lower" if lower_is_better(self.metric) else "higher"
        return {"step": step, "metric": self.metric, "value": self.values[step], "better": better}

    def recall(self, described: Mapping[str, Any], steps: Sequence[int]) -> None:
        """Records the content of best.json, if it is about this metric and one of these steps."""
        if described.get("metric") == self.metric and described.get("step") in steps:
            self.values.setdefault(described["step"], described["value"])
