"""Held-out evaluation during training: sums over all batches, divided once (law 3)."""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bert_jax.train import compiler, partitioning
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
    replicated, options = partitioning.replicated(mesh), compiler.options(mesh)
    step = jax.jit(evaluation_step, static_argnums=0, out_shardings=replicated, compiler_options=options)
    rows = partitioning.local_rows(batch_size, mesh)

    def total_of(params: dict[str, Any], batches: Iterator[Any]) -> Any:
        total = None
        computing: tuple[Terms, Counts] | None = None
        for batch in batches:
            placed = partitioning.place(extended_batch(plan.objective, batch), batch_size, mesh)
            total = _add(total, computing)
            computing = step(plan, params, placed)
        return _add(total, computing)

    def metrics_of(total: Any) -> dict[str, float]:
        terms, counts = jax.tree.map(jnp.float32, total)
        return finite_means(terms, counts, plan.objective.term_weights)

    def run(params: dict[str, Any], steps_done: int) -> dict[str, float]:
        totals = {name: total_of(params, batches) for name, batches in sources(steps_done, rows).items()}
        totals = {name: total for name, total in totals.items() if total is not None}
        if not totals:
            return {}
        metrics = metrics_of(functools.reduce(functools.partial(jax.tree.map, operator.add), totals.values()))
        for name, total in totals.items():
            if name:
                metrics |= {f"{name}/{metric}": value for metric, value in metrics_of(total).items()}
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
