"""Held-out evaluation during training: how it is computed, which step is best, and when a run stops early."""

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
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
Evaluator = Callable[[dict[str, Any], int], dict[str, float]]  # (parameters, steps done) -> metrics by name


def make_evaluator(plan: Plan, mesh: Mesh, batches: Callable[[int, Rows], Iterator[Any]], batch_size: int) -> Evaluator:
    """Returns an evaluator of the plan's objective over batches(steps done, rows), `rows` of global ones of batch_size.

    Rows that fill up a batch have weight 0. Without batches there are no metrics. `rows` are those that the devices
    of this process own; every process must yield the same number of batches. Each batch is requested and placed while
    the devices compute the one before it.
    """
    return make_source_evaluator(plan, mesh, lambda steps_done, rows: {"": batches(steps_done, rows)}, batch_size)


def make_source_evaluator(
    plan: Plan, mesh: Mesh, sources: Callable[[int, Rows], Mapping[str, Iterator[Any]]], batch_size: int
) -> Evaluator:
    """Returns an evaluator over the batches of several sources by name, as make_evaluator does over those of one.

    The metrics are those of the rows of all sources together, each row counted once, and as NAME/METRIC those of each
    source with a name.
    """
    replicated, options = sharding.replicated(mesh), sharding.options(mesh)
    step = jax.jit(evaluation_step, static_argnums=0, out_shardings=replicated, compiler_options=options)
    rows = sharding.local_rows(batch_size, mesh)

    def sum_up(params: dict[str, Any], batches: Iterator[Any]) -> Any:
        total = None
        computing: tuple[Terms, Counts] | None = None
        for batch in batches:
            # Placed before this waits for the batch before it, so that the devices always have work.
            placed = sharding.place(extended_batch(plan.objective, batch), batch_size, mesh)
            total = _add(total, computing)
            computing = step(plan, params, placed)
        return _add(total, computing)

    def divide(total: Any) -> dict[str, float]:
        terms, counts = jax.tree.map(jnp.float32, total)
        return finite_means(terms, counts, plan.objective.term_weights)

    def run(params: dict[str, Any], steps_done: int) -> dict[str, float]:
        totals = {name: sum_up(params, batches) for name, batches in sources(steps_done, rows).items()}
        totals = {name: total for name, total in totals.items() if total is not None}
        if not totals:
            return {}
        metrics = divide(functools.reduce(functools.partial(jax.tree.map, operator.add), totals.values()))
        for name, total in totals.items():
            if name:
                metrics |= {f"{name}/{metric}": value for metric, value in divide(total).items()}
        return metrics

    return run


def _add(total: Any, part: tuple[Terms, Counts] | None) -> Any:
    """The sums, as a tree of floats, with those of one more batch, for which this waits. None stands for no batch."""
    if part is None:
        return total
    values = jax.tree.map(float, jax.device_get(part))  # float64, so that the sums over many batches stay exact
    return values if total is None else jax.tree.map(operator.add, total, values)


def finite_means(terms: Terms, counts: Counts, weights: Mapping[str, float]) -> dict[str, float]:
    """`objectives.means` of totals, without the metrics of a term whose count is 0.

    The loss comes first and the others follow by name: the order of the keys in logs, checkpoints and on the screen.
    """
    metrics = {name: float(value) for name, value in means(terms, counts, weights).items()}
    ordered = sorted(metrics, key=lambda name: (name != "loss", name))
    return {name: metrics[name] for name in ordered if not np.isnan(metrics[name])}


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


class EarlyStop:
    """Counts evaluations since the best one (Goodfellow et al. 2016, algorithm 7.1, whose p is `patience`).

    `step` and `evaluation` are those of the best so far, the earliest among equals; `step` is None until the metric
    was finite once. A value that is not finite counts as no improvement.
    """

    def __init__(
        self,
        patience: int,
        best: Best,
        saved: Mapping[str, Any],
        first: int,
        evaluations: Mapping[int, Mapping[str, float]] = MappingProxyType({}),
    ) -> None:
        """Starts counting at step `first`, where the run begins or resumes.

        best          the metric and its values so far
        saved         the `state` in the checkpoint from which the run resumes
        evaluations   the metrics of the saved steps; the best of them counts where the run had no early stopping
                      until now, or used another metric
        """
        self.patience = patience
        self._best = best
        if saved.get("metric", best.metric) != best.metric:
            saved = {}
        self.step: int | None = saved.get("step")
        self.value: float = saved.get("value", math.nan)
        self.evaluation: dict[str, float] = dict(saved.get("evaluation", {}))
        self.waited: int = saved.get("waited", 0)
        earlier = best.among([step for step, found in evaluations.items() if step <= first and found])
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
        value = self._best.value_in(evaluation)
        if value is not None and (self.step is None or self._best.is_better(value, self.value)):
            self.step, self.value, self.evaluation, self.waited = step, value, dict(evaluation), 0
        else:
            self.waited += 1

    def state(self) -> dict[str, Any]:
        """Returns the part that a checkpoint keeps, as JSON values."""
        values = {"metric": self._best.metric, "waited": self.waited}
        if self.step is None:
            return values
        return values | {"step": self.step, "value": self.value, "evaluation": self.evaluation}


def check_early_stop(patience: int, best: str) -> None:
    """Raises UserError for a negative patience, or for early stopping without a metric."""
    if patience < 0:
        raise UserError(f"early_stop is {patience}; expected a number of evaluations, or 0 to train to the end")
    if patience and not best:
        raise UserError(f"early_stop={patience} needs a metric to compare evaluations by; set --config.checkpoint.best")


def has_stopped_early(patience: int, metric: str, meta: Mapping[str, Any]) -> bool:
    """Whether a run stopped early, by this metric, at the checkpoint with this metadata (empty: the run begins).

    A run that stopped by another metric goes on: its evaluations without improvement count from there (EarlyStop).
    """
    saved = meta.get("early_stop", {})
    if meta.get("unlogged", False) or saved.get("metric", metric) != metric:
        return False
    return saved.get("waited", 0) >= patience > 0
