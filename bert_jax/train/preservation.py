"""Which checkpoints stay: the newest, every k-th step, and the best by a held-out metric."""

import math
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any

import orbax.checkpoint as ocp

from bert_jax.command import UserError
from bert_jax.config import TrainConfig
from bert_jax.train.held_out import PREFIX, lower_is_better

policies = ocp.checkpoint_managers


class Best:
    """Keeps the step with the best value of a metric, the earliest of equals: an Orbax preservation policy.

    `values` is the metric by step, and may grow while the policy is used. A step without one is never the best.
    """

    def __init__(self, metric: str, values: MutableMapping[int, float]) -> None:
        if not metric.startswith(PREFIX):
            raise UserError(f"checkpoint.best is {metric!r}; name a held-out metric as in the logs: eval_loss")
        self.metric, self.values = metric, values
        self._sign = 1.0 if lower_is_better(metric) else -1.0

    def note(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Takes over a step's value, when it was measured there."""
        value = evaluation.get(self.metric.removeprefix(PREFIX), math.nan)
        if math.isfinite(value):
            self.values[step] = float(value)

    def check_among(self, measured: Collection[str]) -> None:
        """Raises UserError when the metric is none of those that are measured."""
        if self.metric.removeprefix(PREFIX) not in measured:
            names = ", ".join(PREFIX + name for name in measured)
            raise UserError(f"checkpoint.best is {self.metric!r}, which is not measured here; use one of: {names}")

    def beaten_by(self, evaluation: Mapping[str, float]) -> bool:
        """Whether a measurement is better than that of every step noted so far."""
        value = evaluation.get(self.metric.removeprefix(PREFIX), math.nan)
        return math.isfinite(value) and all(self._sign * value < self._sign * other for other in self.values.values())

    def among(self, steps: Sequence[int]) -> int | None:
        """The best of these steps, None when none of them was measured."""
        measured = [step for step in steps if step in self.values]
        return min(measured, key=lambda step: (self._sign * self.values[step], step), default=None)

    # Orbax's own protocols cannot be checked at run time, as the tests do: hence Any.
    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        best = self.among([checkpoint.step for checkpoint in checkpoints])
        return [checkpoint.step == best for checkpoint in checkpoints]

    def described(self, step: int) -> dict[str, Any]:
        """What best.json says of the best step."""
        better = "lower" if lower_is_better(self.metric) else "higher"
        return {"step": step, "metric": self.metric, "value": self.values[step], "better": better}

    def recall(self, described: Mapping[str, Any], steps: Sequence[int]) -> None:
        """Takes over what best.json says, where it is by this metric and of one of these steps."""
        if described.get("metric") == self.metric and described.get("step") in steps:
            self.values.setdefault(described["step"], described["value"])


def policy(keep: int, keep_every: int, best: Best | None) -> Any:
    """Orbax preservation: the newest `keep` steps (0: all), the multiples of `keep_every` (0: none), the best.

    Raises UserError for a negative number.
    """
    if keep < 0:
        raise UserError(f"checkpoint.keep is {keep}; use 1 or more, or 0 to keep all")
    if keep_every < 0:
        raise UserError(f"checkpoint.keep_every is {keep_every}; use a number of steps, or 0 to keep none for good")
    parts: list[policies.PreservationPolicy] = [policies.LatestN(keep or None)]
    if keep_every:
        parts.append(policies.EveryNSteps(keep_every))
    if best is not None:
        parts.append(best)
    return policies.AnyPreservationPolicy(parts)


def check_best(config: TrainConfig, evaluated: bool, measured: Sequence[str]) -> None:
    """Raises UserError when the best checkpoint is wanted of a run that measures none, or not by that metric.

    measured are the names of what is, where they are known before it is; none where they are not.
    """
    if not config.checkpoint.best:
        return
    if not evaluated:
        raise UserError(
            f"checkpoint.best={config.checkpoint.best}, but the data has no held-out part to measure. Name one by "
            "--config.data.eval, or leave out checkpoint.best"
        )
    if config.eval.every_steps <= 0:
        raise UserError(
            f"checkpoint.best={config.checkpoint.best}, but nothing is measured before the end. "
            "Set --config.eval.every_steps"
        )
    if measured:
        averages = [f"ema_{name}" for name in measured if config.optimizer.ema_decay > 0]
        Best(config.checkpoint.best, {}).check_among([*measured, *averages])
