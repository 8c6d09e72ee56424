"""The training step and the evaluation step: pure functions of state and batch."""

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from bert_jax.config import ModelConfig, OptimizerConfig
from bert_jax.model.ops import operations
from bert_jax.model.runtime import Runtime
from bert_jax.train import compiler, gradient_sums, mesh_placement, optim, partitioning
from bert_jax.train.freezing import Trained, Unfreezing
from bert_jax.train.objectives import Counts, Objective, Terms, means, total_loss
from bert_jax.train.state import TrainState


@dataclass(frozen=True, eq=False)
class Forward:
    """The constants of an evaluation step, fixed for a run."""

    model: ModelConfig
    runtime: Runtime
    objective: Objective


@dataclass(frozen=True, eq=False)
class Plan(Forward):
    """The constants of a training step, fixed for a run."""

    optimizer_config: OptimizerConfig
    optimizer: optax.GradientTransformation
    microbatches: int = 1
    factors: dict[str, Any] | None = None  # of the learning rate, by parameter (optim.rate_factors); None: 1 for all
    trained: Trained | None = None  # the part that is differentiated and that the optimizer updates; None: all
    reduction: gradient_sums.Reduction = field(default_factory=gradient_sums.Reduction)
    unfreezing: Unfreezing | None = None  # what begins to train later; None: nothing

    def part(self, params: dict[str, Any]) -> dict[str, Any]:
        """Returns what trains of a tree of parameters, or of one like it."""
        return params if self.trained is None else self.trained.take(params)

    def with_part(self, params: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
        """Returns a tree of parameters with the part that trains replaced."""
        return part if self.trained is None else self.trained.put(params, part)


def initial_state(plan: Plan, params: dict[str, Any]) -> TrainState:
    """The state before the first step."""
    average = optim.first_average(plan.optimizer_config.ema_decay, params)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, plan.optimizer.init(plan.part(params)), average, skipped=zero)


def train_step(
    plan: Plan,
    state: TrainState,
    batch: Any,
    fraction: Float[Array, ""],
    key: PRNGKeyArray,
    constants: dict[str, Any] | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """One update on a global batch: the next state, and the metrics of the step.

    fraction is the part of the run that is done before this step, and key is the run's. constants are trees that the
    objective binds next to the parameters, under names of their own; they need plan.trained, which does not have them.
    Dropout is a function of (key, step, microbatch), so the same arguments give the same result bit for bit. Where the
    loss or the gradient is not finite, the step counts (`finite` is 0 among the metrics and `skipped` grows by one),
    but parameters, optimizer state and average stay as they were.
    """
    dropout_key = jax.random.fold_in(key, state.step)
    counts = plan.objective.counts(batch)
    corrupted = plan.objective.corrupt(batch, dropout_key)
    gradients, terms = accumulate(plan, state.params, corrupted, counts, dropout_key, constants)
    if plan.unfreezing is not None:
        gradients = plan.unfreezing.mask(gradients, state.step)
    rate = optim.learning_rate(plan.optimizer_config, state.step, fraction)
    metrics = means(terms, counts, plan.objective.term_weights) | {
        "learning_rate": rate,
        "gradient_norm": optax.tree.norm(gradients),
        "tokens": (batch.sequence_ids > 0).sum(),
    }
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["gradient_norm"])
    following = descend(plan, state, gradients, rate)
    following = choose(finite, following, state._replace(skipped=state.skipped + 1))._replace(step=state.step + 1)
    return following, metrics | {"finite": finite, "skipped": following.skipped}


def jitted(plan: Plan, mesh: Mesh, state: TrainState) -> Any:
    """train_step under jax.jit, as a function of (state, batch, fraction, key).

    The state is donated, and the next one has the same shardings, which are all that is read of the state here (it may
    be abstract). Metrics are replicated.
    """
    shardings = (jax.tree.map(lambda leaf: leaf.sharding, state), partitioning.replicated(mesh))
    options = compiler.options(mesh, overlap=True)
    step = functools.partial(train_step, plan)
    return jax.jit(step, donate_argnums=0, out_shardings=shardings, compiler_options=options)


def evaluation_step(plan: Forward, params: dict[str, Any], batch: Any) -> tuple[Terms, Counts]:
    """Terms and counts of one batch without dropout; the caller adds them up over batches and divides once."""
    model = plan.objective.bind(plan.model, params, plan.runtime)
    return plan.objective.apply(model, batch, None), plan.objective.counts(batch)


def descend(plan: Plan, state: TrainState, gradients: dict[str, Any], rate: Float[Array, ""]) -> TrainState:
    """The state after one update. gradients are those of the part that trains."""
    part = plan.part(state.params)
    if plan.unfreezing is None:
        direction, optimizer_state = plan.optimizer.update(gradients, state.optimizer_state, part)
    else:
        own = {"update_counts": plan.unfreezing.update_counts(state.step)}
        direction, optimizer_state = plan.optimizer.update(gradients, state.optimizer_state, part, **own)
        direction = plan.unfreezing.mask(direction, state.step)
    factors = None if plan.factors is None else plan.part(plan.factors)
    part = optim.apply_updates(part, direction, rate, factors)
    if plan.reduction.shard_optimizer:
        part = mesh_placement.constrain_update(part)
    step = state.step + 1
    average = state.average
    if average is not None:  # the average of a frozen parameter is the parameter
        of_part = optim.next_average(plan.optimizer_config.ema_decay, step, plan.part(average), part)
        average = plan.with_part(average, of_part)
    if plan.reduction.shard_optimizer:  # the average needs only the shards
        part = mesh_placement.gather_update(part)
    return TrainState(step, plan.with_part(state.params, part), optimizer_state, average, state.skipped)


def choose(good: Bool[Array, ""], following: TrainState, kept: TrainState) -> TrainState:
    """One of two states, chosen element by element, so that XLA fuses the choice into the update."""
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), following, kept)


def accumulate(
    plan: Plan,
    params: dict[str, Any],
    batch: Any,
    counts: Counts,
    dropout_key: Array,
    constants: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], Terms]:
    """Gradient of the global loss by the part that trains, and the sums, over the microbatches of a batch.

    The gradients of several microbatches are added up before they are summed over the devices (train/gradient_sums.py).
    """
    frozen_layers = 0 if plan.trained is None else plan.trained.frozen_layers(params)

    def loss(
        trained: dict[str, Any], params: dict[str, Any], runtime: Runtime, part: Any, counts: Counts, key: Array
    ) -> tuple[Float[Array, ""], Terms]:
        whole = trained if plan.trained is None else plan.trained.join(params, trained)
        runtime = dataclasses.replace(runtime, frozen_layers=frozen_layers)
        model = plan.objective.bind(plan.model, whole, runtime)
        terms = plan.objective.apply(model, part, key)
        return total_loss(terms, counts, plan.objective.term_weights), terms

    def gradient(
        runtime: Runtime, params: dict[str, Any], part: Any, counts: Counts, key: Array
    ) -> tuple[dict[str, Any], Terms]:
        gradients, terms = jax.grad(loss, has_aux=True)(plan.part(params), params, runtime, part, counts, key)
        gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients)
        return operations(runtime).whole_gradients(mesh_placement.constrain_params(gradients)), terms

    def split(leaf: Array) -> Array:
        # [B, ...] to [A, B/A, ...]. A microbatch takes every A-th row, so that each device keeps its own rows.
        return leaf.reshape(-1, plan.microbatches, *leaf.shape[1:]).swapaxes(0, 1)

    def over_parts(
        runtime: Runtime, params: dict[str, Any], batch: Any, counts: Counts, key: Array
    ) -> tuple[dict[str, Any], Terms]:
        def add(total: Any, numbered: tuple[Array, Any]) -> tuple[Any, None]:
            number, part = numbered
            found = gradient(runtime, params, part, counts, jax.random.fold_in(key, number))
            return jax.tree.map(jnp.add, total, found), None

        parts = jax.tree.map(split, batch)
        first = jax.tree.map(lambda leaf: leaf[0], parts)
        shapes = jax.eval_shape(functools.partial(gradient, runtime), params, first, counts, key)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        total, _ = jax.lax.scan(add, zeros, (jnp.arange(plan.microbatches), parts))
        return total

    sums = gradient if plan.microbatches == 1 else over_parts
    over_devices = gradient_sums.over_devices(sums, plan.runtime, plan.microbatches, plan.reduction, plan.part)
    return over_devices(params | (constants or {}), batch, counts, dropout_key)
