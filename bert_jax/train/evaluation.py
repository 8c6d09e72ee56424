"""Held-out evaluation during training: metrics over batches, the best step, and early stopping."""

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bert_jax.errors import UserError
from bert_jax.train import sharding
from bert_jax.train.objectives import Counts, Terms, extended_batch, means
from bert_jax.train.step import Plan, evaluation_step

Rows = slice | np.ndarray  # the rows of a global batch that a process loads
# Computes metrics by name from (plan, mesh, parameters, steps done). Jitted programs are shared between calls.
Evaluator = Callable[[Plan, Mesh, dict[str, Any], int], dict[str, float]]
# Called before each batch by all processes; it may raise an exception in all of them, which ends the evaluation.
before_batch: ContextVar[Callable[[], object]] = ContextVar("before_batch", default=lambda: None)


def evaluate_batches(
    plan: Plan, mesh: Mesh, params: dict[str, Any], sources: Mapping[str, Iterable[Any]], batch_size: int
) -> dict[str, float]:
    """Computes the metrics of the plan's objective over batches from one or several sources.

    Args:
        sources: batches by source name, "" for a single source. A batch holds this process's rows
            (sharding.local_rows) of a global batch; filler rows have weight 0. All processes must yield the
            same number of batches.
        batch_size: rows in a global batch.

    Returns:
        The metrics over all rows, and NAME/METRIC for every named source; empty without batches.
    """
    replicated, options = sharding.replicated(mesh), sharding.options(mesh, plan.runtime.compiler_options)
    # Sums and counts come back replicated, so that every process computes the same metrics.
    step = jax.jit(evaluation_step, static_argnums=0, out_shardings=replicated, compiler_options=options)
    # One step behind: `computing` holds the sums of a batch that the devices still compute.
    totals: dict[str, tuple[Terms, Counts]] = {}
    for name, batches in sources.items():
        total: Any = None
        computing: tuple[Terms, Counts] | None = None
        for batch in batches:
            before_batch.get()()
            # Placed before this waits for the batch before it, so that the devices always have work.
            placed = sharding.place(extended_batch(plan.objective, batch), batch_size, mesh)
            total = _add(total, computing)
            computing = step(plan, params, placed)
        if (total := _add(total, computing)) is not None:
            totals[name] = total
    if not totals:
        return {}
    # The sums of all sources are added before the division, so that a row counts once wherever it is.
    weights = plan.objective.term_weights
    metrics = _finite_means(functools.reduce(_add_trees, totals.values()), weights)
    for name, total in totals.items():
        if name:
            metrics |= {f"{name}/{metric}": value for metric, value in _finite_means(total, weights).items()}
    return metrics


_add_trees = functools.partial(jax.tree.map, operator.add)


def _add(total: Any, part: tuple[Terms, Counts] | None) -> Any:
    """Waits for one more batch's sums and adds them; None: no batch."""
    if part is None:
        return total
    values = jax.tree.map(float, jax.device_get(part))  # float64, so that sums over many batches stay exact
    return values if total is None else _add_trees(total, values)


def _finite_means(total: Any, weights: Mapping[str, float]) -> dict[str, float]:
    """Divides terms by their counts, and drops metrics whose count is 0.

    The loss comes first, the others by name. Logs, checkpoints and the screen keep this order.
    """
    # Divided in float32, as in a training step.
    terms, counts = jax.tree.map(jnp.float32, total)
    metrics = {name: float(value) for name, value in means(terms, counts, weights).items()}
    ordered = sorted(metrics, key=lambda name: (name != "loss", name))
    return {name: metrics[name] for name in ordered if not np.isnan(metrics[name])}


PREFIX = "eval_"  # logs write eval_loss for the metric that an evaluation calls loss
_LOWER_IS_BETTER = ("loss", "perplexity", "mse", "mae")


def lower_is_better(metric: str) -> bool:
    """Whether a metric falls as a model improves, as losses do; others (accuracy, F1, correlation) rise."""
    # Without the source name of e.g. wiki/mlm_loss, which may contain any word.
    return any(word in metric.rpartition("/")[2] for word in _LOWER_IS_BETTER)


def is_threshold(metric: str) -> bool:
    """Whether a task metric is a threshold chosen on dev rather than a score: threshold/LABEL, best_f1_thresh."""
    return "/" in metric or metric.endswith(("threshold", "_thresh"))


class Best:
    """Finds the step with the best value of a held-out metric, the earliest among equals.

    `values` maps steps to values and may grow. A step without a value is never the best.
    """

    def __init__(self, metric: str, values: MutableMapping[int, float]) -> None:
        if not metric.startswith(PREFIX):
            raise UserError(
                f"checkpoint.best is {metric!r}; expected a held-out metric as logs name it, such as eval_loss"
            )
        self.metric, self.values = metric, values
        # Values times the sign are smaller for better steps, so the earliest best is the minimum of (value, step).
        self._sign = 1.0 if lower_is_better(metric) else -1.0

    def note(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Records the value of a step if the metric was measured there and is finite."""
        if (value := self.value_in(evaluation)) is not None:
            self.values[step] = value

    def value_in(self, evaluation: Mapping[str, float]) -> float | None:
        """Returns the metric's value in an evaluation; None if it was not measured or is not finite."""
        value = float(evaluation.get(self.metric.removeprefix(PREFIX), math.nan))
        return value if math.isfinite(value) else None

    def is_better(self, value: float, other: float) -> bool:
        return self._sign * value < self._sign * other

    def check_among(self, measured: Collection[str]) -> None:
        """Raises UserError if the run does not measure the metric."""
        if self.metric.removeprefix(PREFIX) not in measured:
            names = ", ".join(PREFIX + name for name in measured)
            raise UserError(f"checkpoint.best is {self.metric!r}, which this run does not measure; choose from {names}")

    def beaten_by(self, evaluation: Mapping[str, float]) -> bool:
        """Whether an evaluation is better than all recorded so far."""
        value = self.value_in(evaluation)
        return value is not None and all(self.is_better(value, other) for other in self.values.values())

    def among(self, steps: Sequence[int]) -> int | None:
        """Returns the best of these steps, or None if none was measured."""
        measured = [step for step in steps if step in self.values]
        return min(measured, key=lambda step: (self._sign * self.values[step], step), default=None)


class EarlyStop:
    """Counts evaluations since the best one (Goodfellow et al. 2016, algorithm 7.1).

    `step`, `value` and `evaluation` belong to the best so far, the earliest among equals; `step` is None until the
    metric was finite once. A non-finite value counts as no improvement.

    Args:
        patience: the number of evaluations without improvement after which to stop (p in the algorithm).
        best: the metric and its values so far.
        saved: the `state` in the checkpoint from which the run resumes.
        first: the step at which the run begins or resumes.
        evaluations: the saved steps' metrics. The best of them counts if the run had no early stopping until
            now, or used another metric.
    """

    def __init__(
        self,
        patience: int,
        best: Best,
        saved: Mapping[str, Any],
        first: int,
        evaluations: Mapping[int, Mapping[str, float]] = MappingProxyType({}),
    ) -> None:
        self.patience, self._best = patience, best
        if saved.get("metric", best.metric) != best.metric:  # values of another metric do not compare
            saved = {}
        self.step: int | None = saved.get("step")
        self.value: float = saved.get("value", math.nan)
        self.evaluation: dict[str, float] = dict(saved.get("evaluation", {}))
        self.waited: int = saved.get("waited", 0)
        # Without a saved state, the count starts at the best saved evaluation, so that a worse one does not replace it.
        earlier = best.among([step for step, metrics in evaluations.items() if step <= first and metrics])
        if not saved and earlier is not None:
            self.step, self.value = earlier, best.values[earlier]
            self.evaluation = dict(evaluations[earlier])
        if self.step is not None:
            best.values[self.step] = self.value  # keeps its checkpoint even if SIGTERM came before best.json named it

    @property
    def stopped(self) -> bool:
        """Whether the run should end."""
        return self.waited >= self.patience

    def note(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Counts the evaluation of a step. Call it once for each, in order."""
        # Every evaluation counts, even one without a finite value, or a diverged run would never stop.
        value = self._best.value_in(evaluation)
        if value is not None and (self.step is None or self._best.is_better(value, self.value)):
            self.step, self.value, self.evaluation, self.waited = step, value, dict(evaluation), 0
        else:
            self.waited += 1

    def state(self) -> dict[str, Any]:
        """Returns the JSON values for a checkpoint."""
        values = {"metric": self._best.metric, "waited": self.waited}
        if self.step is None:
            return values
        return values | {"step": self.step, "value": self.value, "evaluation": self.evaluation}


def has_stopped_early(patience: int, metric: str, meta: Mapping[str, Any]) -> bool:
    """Whether a run stopped early, by this metric, at the checkpoint with this metadata (empty: the run begins)."""
    saved = meta.get("early_stop", {})
    # A run that stopped by another metric resumes: EarlyStop counts its evaluations from there. So does a run whose
    # last evaluation was interrupted, since that one still has to be counted.
    if meta.get("unlogged", False) or saved.get("metric", metric) != metric:
        return False
    return saved.get("waited", 0) >= patience > 0
