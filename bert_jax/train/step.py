"""The training step and the evaluation step: pure functions of a state and a batch.

Read in this order: TrainState, which a step passes to the next one; Plan, which is fixed for the whole run; train_step:
gradients (accumulate), then an update (descend), then the choice whether to take it. train/gradient_sums.py sums
gradients over devices.
"""

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bert_jax.config import MeshConfig, ModelConfig, OptimizerConfig
from bert_jax.model.ops import operations
from bert_jax.model.runtime import Runtime
from bert_jax.train import gradient_sums, optim, sharding
from bert_jax.train.objectives import Counts, Objective, Terms, means, total_loss
from bert_jax.train.rules import Trained, Unfreezing


class TrainState(NamedTuple):
    """Parameters, optimizer state and step count, and nothing else: no key, no clock, no position in the data.

    Data and randomness follow from the step (law 1).
    """

    step: Int[Array, ""]
    params: dict[str, Any]  # nested by module: {"encoder": {"layers": ...}}; float32
    optimizer_state: Any
    average: dict[str, Any] | None  # moving average of the parameters; None: not kept (optimizer.ema_decay 0)
    skipped: Int[Array, ""]  # steps that made no update because their loss or gradient was not finite


@dataclass(frozen=True, eq=False)
class Plan:
    """The constants of a step, fixed for a run (prepare.make_plan). An evaluation step needs the first three."""

    model: ModelConfig
    runtime: Runtime
    objective: Objective
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    optimizer: optax.GradientTransformationExtraArgs | optax.GradientTransformation = field(
        default_factory=optax.identity
    )
    microbatches: int = 1
    factors: dict[str, Any] | None = None  # learning-rate factors (optim.rate_factors); None: 1 for all
    trained: Trained | None = None  # the part that is differentiated and updated; None: all
    mesh_config: MeshConfig = field(default_factory=MeshConfig)  # its reduce_dtype and shard_optimizer count
    unfreezing: Unfreezing | None = None  # parameters that begin to train later; None: none

    def part(self, params: dict[str, Any]) -> dict[str, Any]:
        """Selects the trainable leaves of a parameter-shaped tree."""
        return params if self.trained is None else self.trained.take(params)

    def with_part(self, params: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
        """Replaces the trainable leaves of a parameter tree."""
        return part if self.trained is None else self.trained.put(params, part)


def initial_state(plan: Plan, params: dict[str, Any]) -> TrainState:
    """Returns the state before the first step."""
    # Moments only for the part that trains; the average covers all parameters, so that it can be evaluated as they are.
    average = optim.first_average(plan.optimizer_config.ema_decay, params)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, plan.optimizer.init(plan.part(params)), average, skipped=zero)


def jitted(plan: Plan, mesh: Mesh, state: TrainState) -> Any:
    """Jits train_step as a function of (state, batch, fraction, key, constants).

    The state is donated, and the next one gets its shardings; only those are read here, so it may be abstract. Metrics
    are replicated.
    """
    # Equal shardings in and out let XLA reuse the donated memory, and keep the next call from compiling again.
    shardings = (jax.tree.map(lambda leaf: leaf.sharding, state), sharding.replicated(mesh))
    options = sharding.options(mesh, plan.runtime.compiler_options, overlap=True)
    step = functools.partial(train_step, plan)
    return jax.jit(step, donate_argnums=0, out_shardings=shardings, compiler_options=options)


def train_step(
    plan: Plan,
    state: TrainState,
    batch: Any,
    fraction: Float[Array, ""],
    key: PRNGKeyArray,
    constants: dict[str, Any] | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """Makes one update on a global batch.

    Args:
        plan: the constants of the run.
        state: the state before the step.
        batch: the global batch.
        fraction: the completed part of the run before this step.
        key: the run's key. Dropout is a function of (key, step, microbatch), so the same arguments give the same
            result bit for bit.
        constants: trees that the objective binds next to the parameters, under other names; they need
            plan.trained, which does not contain them.

    Returns:
        The next state and the step's metrics. If the loss or the gradient is not finite, the step counts (`finite` is 0
        among the metrics and `skipped` grows by one), but parameters, optimizer state and average stay the same.
    """
    # From the step, so that a resumed run repeats the dropout of an uninterrupted one (law 4).
    dropout_key = jax.random.fold_in(key, state.step)
    # Denominators come from the whole global batch, before any microbatch or random change (law 3).
    counts = plan.objective.counts(batch)
    corrupted = plan.objective.corrupt(batch, dropout_key)
    gradients, terms = accumulate(plan, state.params, corrupted, counts, dropout_key, constants)
    if plan.unfreezing is not None:  # before any norm is taken, for the log or by the optimizer
        gradients = plan.unfreezing.mask(gradients, state.step)
    # Of the steps and the fraction done before this one.
    rate = optim.learning_rate(plan.optimizer_config, state.step, fraction)
    metrics = means(terms, counts, plan.objective.term_weights) | {
        "learning_rate": rate,
        "gradient_norm": optax.tree.norm(gradients),
        "tokens": (batch.sequence_ids > 0).sum(),
    }
    # A gradient can overflow although its loss is finite, and the reverse, so both are checked.
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["gradient_norm"])
    updated, left_out = descend(plan, state, gradients, rate), state._replace(skipped=state.skipped + 1)
    # The choice is made element by element, so that XLA fuses it into the update.
    following = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, left_out)
    following = following._replace(step=state.step + 1)
    return following, metrics | {"finite": finite, "skipped": following.skipped}


def accumulate(
    plan: Plan,
    params: dict[str, Any],
    batch: Any,
    counts: Counts,
    dropout_key: Array,
    constants: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], Terms]:
    """Computes the global loss's gradient by the trainable part, and the terms, over a batch's microbatches.

    The gradients of several microbatches are added up before they are summed over the devices (train/gradient_sums.py).

    Args:
        counts: the terms' denominators, over the whole global batch.
        constants: as for train_step.

    Returns:
        The gradient, float32, in the structure of plan.part(params), and the terms as sums over the batch's rows.
    """
    # Nothing trains in or below the lowest layers of a partly frozen encoder, so they need no backward pass.
    frozen_layers = 0 if plan.trained is None else plan.trained.frozen_layers(params)
    runtime = dataclasses.replace(plan.runtime, frozen_layers=frozen_layers)
    sums = functools.partial(_gradient if plan.microbatches == 1 else _gradient_over_microbatches, plan)
    over_devices = gradient_sums.over_devices(sums, runtime, plan.microbatches, plan.mesh_config, plan.part)
    return over_devices(params | (constants or {}), batch, counts, dropout_key)


def _gradient(
    plan: Plan, runtime: Runtime, params: dict[str, Any], batch: Any, counts: Counts, key: Array
) -> tuple[dict[str, Any], Terms]:
    """Computes a microbatch's float32 gradient and terms on the devices of `runtime`."""

    def loss(trained: dict[str, Any]) -> tuple[Float[Array, ""], Terms]:
        # `join`, not `put`: the program then reads a frozen layer without copying the others.
        whole = trained if plan.trained is None else plan.trained.join(params, trained)
        terms = plan.objective.apply(plan.objective.bind(plan.model, whole, runtime), batch, key)
        return total_loss(terms, counts, plan.objective.term_weights), terms

    # The loss is already divided by global counts, so gradients of microbatches and devices only add up.
    gradients, terms = jax.grad(loss, has_aux=True)(plan.part(params))
    # float32 before sums over microbatches and devices, in which bfloat16 would lose small terms.
    gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients)
    return operations(runtime).whole_gradients(sharding.constrain_params(gradients)), terms


def _gradient_over_microbatches(
    plan: Plan, runtime: Runtime, params: dict[str, Any], batch: Any, counts: Counts, key: Array
) -> tuple[dict[str, Any], Terms]:
    """Sums `_gradient` over a batch's microbatches, which have different dropout keys."""

    def add(total: Any, numbered: tuple[Array, Any]) -> tuple[Any, None]:
        number, part = numbered
        sums = _gradient(plan, runtime, params, part, counts, jax.random.fold_in(key, number))
        return jax.tree.map(jnp.add, total, sums), None

    # [B, ...] to [A, B/A, ...]. A microbatch takes every A-th row, so that each device keeps its own rows.
    parts = jax.tree.map(lambda leaf: leaf.reshape(-1, plan.microbatches, *leaf.shape[1:]).swapaxes(0, 1), batch)
    # A scan needs its carry before the first microbatch, so the shapes of the sums come from an abstract one.
    first = jax.tree.map(lambda leaf: leaf[0], parts)
    shapes = jax.eval_shape(functools.partial(_gradient, plan, runtime), params, first, counts, key)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    total, _ = jax.lax.scan(add, zeros, (jnp.arange(plan.microbatches), parts))
    return total


def descend(plan: Plan, state: TrainState, gradients: dict[str, Any], rate: Float[Array, ""]) -> TrainState:
    """Returns the state after one update by the trainable part's gradients.

    Args:
        gradients: float32, in the structure of plan.part(state.params).
        rate: the step's learning rate.
    """
    part = plan.part(state.params)
    own: dict[str, Any] = {}
    if plan.unfreezing is not None:
        own["update_counts"] = plan.unfreezing.update_counts(state.step)
    direction, optimizer_state = plan.optimizer.update(gradients, state.optimizer_state, part, **own)
    if plan.unfreezing is not None:
        direction = plan.unfreezing.mask(direction, state.step)  # weight decay included
    factors = None if plan.factors is None else plan.part(plan.factors)
    part = optim.apply_updates(part, direction, rate, factors)
    # With shard_optimizer, devices update their shards, then the average, and gather the parameters last: the average
    # needs only the shards.
    if plan.mesh_config.shard_optimizer:
        part = sharding.constrained(part, sharding.update_spec)
    step, average = state.step + 1, state.average
    if average is not None:  # the average of a frozen parameter is the parameter
        updated = optim.next_average(plan.optimizer_config.ema_decay, step, plan.part(average), part)
        average = plan.with_part(average, updated)
    if plan.mesh_config.shard_optimizer:
        part = sharding.constrained(part, sharding.parameter_spec)
    return TrainState(step, plan.with_part(state.params, part), optimizer_state, average, state.skipped)


def evaluation_step(plan: Plan, params: dict[str, Any], batch: Any) -> tuple[Terms, Counts]:
    """Returns a batch's terms and counts without dropout; the caller adds them up over batches and divides once."""
    # The plan's objective is the one for held-out rows (Evaluate), and no key means no dropout.
    model = plan.objective.bind(plan.model, params, plan.runtime)
    return plan.objective.apply(model, batch, None), plan.objective.counts(batch)
