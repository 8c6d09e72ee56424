"""Held-out evaluation during training: sums over all batches, divided once (law 3)."""

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bert_jax.train import partitioning
from bert_jax.train.objectives import Counts, Terms, extended_batch, means
from bert_jax.train.steps import Forward, evaluation_step

Rows = slice | np.ndarray  # the rows of a global batch that a process loads
Evaluator = Callable[[dict[str, Any], int], dict[str, float]]  # (parameters, steps done) -> metrics by name


def make_evaluator(
    plan: Forward, mesh: Mesh, batches: Callable[[int, Rows], Iterator[Any]], batch_size: int
) -> Evaluator:
    """Returns an evaluator of the plan's objective over batches(steps done, rows), `rows` of global ones of batch_size.

    Rows that fill up a batch have weight 0. Without batches there are no metrics. `rows` are those that the devices
    of this process own; every process must yield the same number of batches. Each batch is requested and placed while
    the devices compute the one before it.
    """
    step = jax.jit(evaluation_step, static_argnums=0, out_shardings=partitioning.replicated(mesh))
    rows = partitioning.local_rows(batch_size, mesh)

    def run(params: dict[str, Any], steps_done: int) -> dict[str, float]:
        total = None
        computing: tuple[Terms, Counts] | None = None
        for batch in batches(steps_done, rows):
            placed = partitioning.place(extended_batch(plan.objective, batch), batch_size, mesh)
            total = _add(total, computing)
            computing = step(plan, params, placed)
        total = _add(total, computing)
        if total is None:
            return {}
        terms, counts = jax.tree.map(jnp.float32, total)
        return finite_means(terms, counts, plan.objective.term_weights)

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
