"""Held-out evaluation inside the loop: sums over all batches, divided once (law 3)."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bert_jax.train import partitioning
from bert_jax.train.losses import means
from bert_jax.train.steps import Forward, evaluation_step

Rows = slice | np.ndarray  # of a global batch: those that a process loads
Evaluator = Callable[[dict[str, Any], int], dict[str, float]]  # parameters and steps done in, metrics by name out


def make_evaluator(
    plan: Forward, mesh: Mesh, batches: Callable[[int, Rows], Iterator[Any]], batch_size: int
) -> Evaluator:
    """An evaluator of the plan's objective over batches(steps done, rows), those rows of batch_size global ones.

    Fillers weigh 0. Without batches there are no metrics. The rows are those that this process's devices own; every
    process is to have as many batches.
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
                    total[name] = total.get(name, 0.0) + float(value)  # added up in float64
        return finite_means(sums, counts) if sums else {}

    return run


def finite_means(sums: dict[str, float], counts: dict[str, float]) -> dict[str, float]:
    """`losses.means` of totals, without the metrics of a term that nothing was counted for."""
    as_arrays = [{name: jnp.float32(value) for name, value in part.items()} for part in (sums, counts)]
    metrics = {name: float(value) for name, value in means(*as_arrays).items()}
    return {name: value for name, value in metrics.items() if not np.isnan(value)}
