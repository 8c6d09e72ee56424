"""One program for several runs: their batches and states stacked, and the train step mapped over the runs."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Key

from bert_jax.train import compiler, partitioning, steps
from bert_jax.train.run import Run, Source
from bert_jax.train.state import TrainState


class StackedSource:
    """The batches of several sources, [B, K, ...]: those of run k are [:, k]. All of a step have one shape."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self.fingerprints = sources[0].fingerprints
        self.changes = sources[0].changes

    def rows_at(self, step: int) -> int:
        """Returns the number of rows of a step's global batch, for each run."""
        return self._sources[0].rows_at(step)

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Any:
        """Returns the global batches of a step, or those rows of each."""
        batches = [source.batch(step, rows) for source in self._sources]
        return jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *batches)


def stack_states(states: Sequence[TrainState], running: Sequence[bool]) -> TrainState:
    """Returns the stacked state, with the step of the runs that still train. Frees each leaf once it is copied."""
    step = next(itertools.compress([state.step for state in states], running), states[0].step)

    def stack(*leaves: jax.Array) -> jax.Array:
        whole = jax.block_until_ready(jnp.stack(leaves))
        for leaf in leaves:
            leaf.delete()
        return whole

    return TrainState(step, *jax.tree.map(stack, *[tuple(state)[1:] for state in states]))


def jitted(plan: steps.Plan, mesh: Mesh, state: TrainState) -> Any:
    """Returns the jitted `train_step` of a stacked state, for (state, batch, fraction, *step_arguments)."""
    shardings = (jax.tree.map(lambda leaf: leaf.sharding, state), partitioning.replicated(mesh))
    options = compiler.options(mesh, overlap=plan.overlap)
    step = functools.partial(train_step, plan)
    return jax.jit(step, donate_argnums=0, out_shardings=shardings, compiler_options=options)


def train_step(
    plan: steps.Plan,
    state: TrainState,
    batch: Any,
    fraction: Float[Array, ""],
    keys: Key[Array, "K"],
    peaks: Float[Array, "K"],
    running: Bool[Array, "K"],
) -> tuple[TrainState, dict[str, Array]]:
    """Maps steps.train_step over the runs, each with its own key and peak learning rate; ended runs do not change.

    Everything but the step has a leading axis of runs, batches have it second, and metrics are [K].
    """

    def step(own: tuple[Any, ...], batch: Any, key: Array, peak: Array, running: Array) -> tuple[Any, dict[str, Array]]:
        before = TrainState(state.step, *own)
        following, metrics = steps.train_step(plan, before, batch, fraction, key, peak)
        return steps.choose(running, following, before)[1:], metrics

    own, metrics = jax.vmap(step, in_axes=(0, 1, 0, 0, 0))(tuple(state)[1:], batch, keys, peaks, running)
    return TrainState(state.step + 1, *own), metrics


def step_arguments(runs: Sequence[Run], running: Sequence[bool], mesh: Mesh) -> tuple[Any, ...]:
    """Returns the keys, peak learning rates and running flags of the runs, on all devices."""
    keys = jnp.stack([jax.random.key(run.config.seed, impl=run.config.prng) for run in runs])
    peaks = np.array([run.config.optimizer.learning_rate for run in runs], np.float32)
    values = (keys, peaks, np.array(running))
    return tuple(jax.device_put(value, partitioning.replicated(mesh)) for value in values)


@functools.cache
def taking(mesh: Mesh) -> Callable[..., Any]:
    """A function that takes one run's part of a stacked tree; one program serves all, as their index is an argument."""
    return jax.jit(
        lambda index, tree: jax.tree.map(lambda leaf: leaf[index], tree), out_shardings=partitioning.replicated(mesh)
    )
