"""Held-out evaluation during training: sums over all batches, divided once (law 3)."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bert_jax.train import partitioning
from bert_jax.train.losses import means
from bert_jax.train.steps import Forward, evaluation_step

Rows = slice | np.ndarray  # the rows of a global batch that a process loads
Evaluator = Callable[[dict[str, Any], int], dict[str, float]]  # (parameters, steps done) -> metrics by name


def make_evaluator(
    plan: Forward, mesh: Mesh, batches: Callable[[int, Rows], Iterator[Any]], batch_size: int
) -> Evaluator:
    """Returns an evaluator of the plan's objective over batches(steps done, rows), `rows` of global ones of batch_size.

    Rows that fill up a batch have weight 0. Without batches there are no metrics. `rows` are those that the devices
    of this process own; every process must yield the same number of batches.
    """
    step = jax.jit(evaluation_step, static_argnums=0, out_shardings=partitioning.replicated(mesh))
    rows = partitioning.local_rows(batch_size, mesh)

    def run(params: dict[str, Any], steps_done: int) -> dict[str, float]:
        sums: dict[str, float] = {}
        counts: dict[str, float] = {}
        for batch in batches(steps_done, rows):
            batch_sums, batch_counts = jax.device_get(step(plan, params, partitioning.place(batch, batch_size, mesh)))
            for total, part in ((sums, batch_sums), (counts, batch_counts)):
                for name, value in part.items():
                    total[name] = total.get(name, 0.0) + float(value)  # in float64, so that many batches add up exactly
        return finite_means(sums, counts) if sums else {}

    return run


def finite_means(sums: dict[str, float], counts: dict[str, float]) -> dict[str, float]:
    """Returns `losses.means` of totals, without the metrics of a term for which nothing was counted."""
    as_arrays = [{name: jnp.float32(value) for name, value in part.items()} for part in (sums, counts)]
    metrics = {name: float(value) for name, value in means(*as_arrays).items()}
    return {name: value for name, value in metrics.items() if not np.isnan(value)}
