"""Optimizers, learning-rate schedules and the moving average of the parameters.

Read in this order: rate_factors and decays, by rules over parameter paths; build, whose Optax chain turns gradients
into a direction without the learning rate (train/update_directions.py); apply_updates; learning_rate. All are pure
functions of arrays and work on any mesh: XLA inserts the reductions over sharded axes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from bert_jax.config import InverseSqrtSchedule, Muon, OptimizerConfig, WSDSchedule
from bert_jax.errors import UserError
from bert_jax.model.layers import flatten
from bert_jax.train import rules
from bert_jax.train.rules import Trained
from bert_jax.train.update_directions import (
    hidden_matrices,
    map_by_path,
    scale_by_adam,
    scale_by_muon,
    scale_by_stable_adam,
    scale_by_trust_ratio,
)

_WITHOUT_DECAY = tuple((pattern, 0.0) for pattern in rules.BIASES_AND_NORMS)


def rate_factors(
    config: OptimizerConfig, params: dict[str, Any], trainable: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Returns parameters' learning-rate factors, in rules.per_layer's form, or None if all are 1.

    A factor is the product of `trainable`, config.rates and config.layer_decay; 0 freezes its parameter.

    Args:
        params: the parameters, which may be abstract.
        trainable: factors 0 and 1 by rules.trainable; None: all are 1.

    Raises:
        UserError: rules.check refuses config.rates.
    """
    trees = [] if trainable is None else [trainable]
    if config.layer_decay != 1.0:
        # A layer learns at layer_decay times the rate of the layer above it, the embeddings below all layers, and the
        # heads at the full rate (Howard and Ruder 2018, section 3.2; Clark et al. 2020, appendix B).
        decay = config.layer_decay
        trees.append(rules.per_layer(rules.by_depth(lambda depth: decay**depth, params, 1.0), params))
    if rates := rules.check(config.rates, "optimizer.rates", params):
        trees.append(rules.per_layer((*rates, (r".*", 1.0)), params))
    if not trees:
        return None
    # In numpy on the host: factors are constants of the program. One factor for a whole stack broadcasts over another's
    # layers, [L, 1, ...].
    product: dict[str, Any] = jax.tree.map(lambda *factors: np.prod(np.broadcast_arrays(*factors), axis=0), *trees)
    return product


def decays(config: OptimizerConfig, params: dict[str, Any]) -> dict[str, Any]:
    """Returns parameters' weight decay, in rules.per_layer's form.

    The first matching rule of config.decays decides. Otherwise biases and normalization parameters have no decay, and
    all others have config.weight_decay. `params` may be abstract, and a part of the model (rules.Trained.abstract).

    Raises:
        UserError: rules.check refuses config.decays.
    """
    # Without params: a part may lack parameters that a rule is for. `build` checks the rules against the whole model.
    own = rules.check(config.decays, "optimizer.decays")
    return rules.per_layer((*own, *_WITHOUT_DECAY, (r".*", config.weight_decay)), params)


def overrides_weight_decay(decays: Mapping[str, float], params: dict[str, Any]) -> bool:
    """Whether optimizer.decays leaves no parameter to optimizer.weight_decay; params may be abstract."""
    own = tuple((pattern, 0.0) for pattern, _ in rules.check(decays, "optimizer.decays"))
    if not own:
        return False
    left = rules.per_layer((*own, *_WITHOUT_DECAY, (r".*", 1.0)), params)
    return not any(layers.any() for layers in jax.tree.leaves(left))


def weight_decay_warning(config: OptimizerConfig, params: dict[str, Any]) -> str:
    """Returns a warning if a weight_decay other than the default has no effect; otherwise an empty text."""
    if config.weight_decay == OptimizerConfig.weight_decay or not overrides_weight_decay(config.decays, params):
        return ""
    return (
        f"warning: optimizer.weight_decay={config.weight_decay} has no effect, because optimizer.decays="
        f"{config.decays} matches all parameters that it is for"
    )


def first_average(decay: float, params: dict[str, Any]) -> dict[str, Any] | None:
    """Copies the parameters as the average before the first step; None for a decay of 0."""
    return jax.tree.map(jnp.copy, params) if decay > 0.0 else None


def next_average(decay: float, step: Int[Array, ""], average: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Returns the average after update number `step`: d * average + (1 - d) * params (Polyak and Juditsky 1992).

    It often evaluates better than the latest parameters, above all before the learning rate has decayed.

    Args:
        decay: the largest d, which is smaller in the first updates.
        step: the update's number, from 1.
        params: the parameters after the update.
    """
    # d grows from 2/11 in the first update, as in tf.train.ExponentialMovingAverage with num_updates, so that the
    # random initial parameters quickly lose their influence.
    share = jnp.minimum(decay, (1.0 + step) / (10.0 + step)).astype(jnp.float32)
    # In this form the average of an unchanged value, such as a frozen parameter, stays bitwise identical.
    return jax.tree.map(lambda old, new: old + (1.0 - share) * (new - old), average, params)


Transformations = tuple[optax.GradientTransformation, ...]
Build = Callable[[Any, dict[str, Any]], Transformations]  # an OptimizerConfig of its kind, and parameters


def build(
    config: OptimizerConfig, params: dict[str, Any], trained: Trained | None = None
) -> optax.GradientTransformation:
    """Returns clipping by global norm (none if clip_norm is 0), followed by OPTIMIZERS[config.kind].

    The updates are the direction to subtract, decoupled weight decay included. The caller multiplies them by the
    learning rate.

    Args:
        params: the model's parameters, which may be abstract.
        trained: the updated part of them; None: all.

    Raises:
        UserError: the warmup is below 0, decays match no parameter, or muon finds no matrix to orthogonalize.
    """
    if config.schedule.warmup_steps < 0:
        raise UserError("optimizer.schedule.warmup_steps is -1, which is for fine-tuning. Use 0 or more")
    if config.kind == "muon" and not any(hidden_matrices(path, leaf.ndim) for path, leaf in flatten(params).items()):
        raise UserError(
            "optimizer is muon, but the model has none of the matrices that it orthogonalizes: attention and "
            "feed-forward kernels of layers. Use --config.optimizer=adamw"
        )
    rules.check(config.decays, "optimizer.decays", params)
    # Clipping comes first: moments are of clipped gradients, as in google-research/bert, optimization.py.
    clip = clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity()
    updated = params if trained is None else trained.abstract(params)
    # The chain stays flat because the tree structure of its state is part of the checkpoint format.
    return optax.chain(clip, *OPTIMIZERS[config.kind](config, updated))


def adamw(config: OptimizerConfig, params: dict[str, Any]) -> Transformations:
    """Builds AdamW (Loshchilov and Hutter 2019, algorithm 2; Devlin et al. 2019, appendix A.2)."""
    return scale_by_adam(config), add_decay(decays(config, params))


def lamb(config: OptimizerConfig, params: dict[str, Any]) -> Transformations:
    """Builds LAMB: Adam's step plus weight decay, scaled to the norm of each tensor (You et al. 2020, algorithm 2)."""
    return scale_by_adam(config), add_decay(decays(config, params)), scale_by_trust_ratio()


def muon(config: Muon, params: dict[str, Any]) -> Transformations:
    """Builds Muon for attention and feed-forward kernels (Jordan 2024; Liu et al. 2025), AdamW for all others."""
    labels = map_by_path(lambda path, leaf: "muon" if hidden_matrices(path, leaf.ndim) else "adam", params)
    parts = {"muon": scale_by_muon(config.momentum), "adam": scale_by_adam(config)}
    return optax.partition(parts, labels), add_decay(decays(config, params))


def stable_adamw(config: OptimizerConfig, params: dict[str, Any]) -> Transformations:
    """Builds StableAdamW, which shortens steps when gradients suddenly grow (Wortsman et al. 2023, algorithm 2)."""
    return (scale_by_stable_adam(config, decays(config, params)),)


# The transformations that follow clipping, by kind of optimizer. An extension adds its own entry.
OPTIMIZERS: dict[str, Build] = {"adamw": adamw, "lamb": lamb, "muon": muon, "stable_adamw": stable_adamw}


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales all gradients by min(1, max_norm / norm) (Pascanu et al. 2013, algorithm 1)."""

    def clip(updates: Any, params: Any = None) -> Any:
        # One multiplication. optax.clip_by_global_norm divides every gradient and then selects: one more pass on a CPU.
        factor = jnp.minimum(1.0, max_norm / jnp.maximum(optax.tree.norm(updates), jnp.finfo(jnp.float32).tiny))
        return jax.tree.map(lambda update: update * factor, updates)

    return optax.stateless(clip)


def add_decay(decays: dict[str, Any]) -> optax.GradientTransformation:
    """Adds decay * parameter to the updates; a decay is a number or, for stacked layers, an array [L, 1, ...]."""

    def add(update: Array, param: Array, decay: Any) -> Array:
        # Known when the program is traced, so that nothing is computed for parameters without decay.
        return update + decay * param if decay.any() else update

    return optax.stateless(lambda updates, params: jax.tree.map(add, updates, params, decays))


def apply_updates(
    params: dict[str, Any], direction: dict[str, Any], rate: Float[Array, ""], factors: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns params - rate * factor * direction; a frozen parameter (factor 0) stays bitwise identical.

    Args:
        direction: what `build` returns as updates, with weight decay but without the learning rate.
        factors: numbers, or arrays [L, 1, ...] for stacked layers; None: 1 for all.
    """
    if factors is None:
        return jax.tree.map(lambda value, change: value - rate * change, params, direction)
    return jax.tree.map(lambda value, change, factor: value - (rate * factor) * change, params, direction, factors)


def learning_rate(config: OptimizerConfig, step: Int[Array, ""], fraction: Float[Array, ""]) -> Float[Array, ""]:
    """Returns a step's learning rate: the peak times a warmup ramp or a decaying schedule, whichever is smaller.

    Because a schedule depends on the fraction, runs limited by minutes, tokens and steps share the same code. It ends
    at schedule.final_share of the peak, config.learning_rate. It covers the run after the warmup, or with
    schedule.from_start the whole run.

    Args:
        step: the number of completed steps.
        fraction: the completed fraction of the run, from 0 to 1.

    The schedules, with x for the completed share of the schedule:

      linear        1 - x
      cosine        (1 + cos(pi x)) / 2 (Loshchilov and Hutter 2017, equation 5, without restarts)
      wsd           1 until the last decay_share of the run, then 1 - sqrt(x), where x is the completed share of that
                    last part (Hu et al. 2024, section 4; decay shape: Haegele et al. 2024, section 3). Warmup does
                    not shift the decay.
      constant      1
      inverse_sqrt  sqrt(w / s) after s steps with w warmup steps, or the same with shares of the run for warmup_share
                    (Vaswani et al. 2017, section 5.3, whose peak is (d_model w)^-0.5). With warmup_steps it does not
                    depend on the length of the run. It decays towards final_share.
    """
    schedule = config.schedule
    warmup, from_start = schedule.warmup_steps, getattr(schedule, "from_start", True)
    # The completed fraction at which the schedule starts.
    start: Float[Array, ""] | float = 0.0
    if schedule.warmup_share > 0:
        ramp = fraction / schedule.warmup_share
        start = 0.0 if getattr(schedule, "from_start", False) else schedule.warmup_share
    elif from_start:
        # The schedule starts with the run, as in google-research/bert, optimization.py. That file replaces the schedule
        # by the ramp during warmup, and its first step has rate 0. Here the ramp is one step ahead, and the minimum
        # below avoids a jump at its end.
        ramp = (step + 1) / max(warmup, 1)
    else:
        # The schedule runs over the rest of the run, as in transformers (get_linear_schedule_with_warmup), whose first
        # step has rate 0, too. The fraction at the end of the warmup follows from the present one: in a run of n steps
        # it is (s / n) (w / s); in one that is limited by minutes or tokens, steps count as equal.
        ramp = step / warmup if warmup > 0 else jnp.ones_like(fraction)
        start = fraction * warmup / jnp.maximum(step, max(warmup, 1))
    # The rest of a run that ends within its warmup is empty.
    done = jnp.clip((fraction - start) / jnp.maximum(1.0 - start, 1e-30), 0.0, 1.0)
    if isinstance(schedule, InverseSqrtSchedule):
        done = jnp.maximum(ramp, 1.0)
    elif isinstance(schedule, WSDSchedule):
        done = jnp.clip((fraction - (1.0 - schedule.decay_share)) / schedule.decay_share, 0.0, 1.0)
    # A schedule without a final share ends at 0.
    final = getattr(schedule, "final_share", 0.0)
    level = final + (1.0 - final) * SHAPES[schedule.kind](done)
    highest = config.learning_rate
    return (highest * jnp.clip(jnp.minimum(ramp, level), 0.0, 1.0)).astype(jnp.float32)


# The level, from 1 down to 0, by kind of schedule, as a function of the schedule's completed share; inverse_sqrt takes
# the elapsed time in units of the warmup instead. An extension adds its own entry.
SHAPES: dict[str, Callable[[Float[Array, ""]], Float[Array, ""]]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
    "wsd": lambda done: 1.0 - jnp.sqrt(done),
    "constant": jnp.ones_like,
    "inverse_sqrt": lambda done: done**-0.5,
}


def warmup_warning(config: OptimizerConfig, steps: int) -> str:
    """Returns a warning if a run of `steps` steps (0: unknown) ends within its warmup; otherwise an empty text."""
    if not 0 < steps < config.schedule.warmup_steps:
        return ""
    return (
        f"warning: optimizer.schedule.warmup_steps is {config.schedule.warmup_steps}, but the run has {steps} steps, "
        "so the learning rate never reaches its peak. Set --config.optimizer.schedule.warmup_steps to less, or to 0 "
        "with --config.optimizer.schedule.warmup_share=0.06"
    )


def with_token_shares(config: OptimizerConfig, tokens: float) -> OptimizerConfig:
    """Turns the schedule's warmup_tokens and decay_tokens into shares of the run's `tokens`.

    Raises:
        UserError: a count exceeds `tokens`, or the run ends by steps or minutes (tokens=0).
    """
    # A run that ends by tokens counts its completed fraction in tokens, so its schedule is one of shares.
    changes: dict[str, Any] = {}
    for name in ("warmup_tokens", "decay_tokens"):
        count = getattr(config.schedule, name, 0.0)
        if count and not tokens:
            raise UserError(
                f"optimizer.schedule.{name} is set, but the length of the run is not counted in tokens. Set "
                "--config.tokens=N --config.steps=0 (pretraining), or use shares: warmup_share, decay_share"
            )
        if count > tokens:
            raise UserError(f"optimizer.schedule.{name} is {count:g}, more than the run has; use at most {tokens:g}")
        if count:
            changes |= {name: 0.0, name.replace("tokens", "share"): count / tokens}
    return dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, **changes)) if changes else config
