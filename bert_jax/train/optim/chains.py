"""Builds the Optax chain of a configuration, the factors of single parameters, and the moving average.

Read first rate_factors and decays, the learning-rate factor and the weight decay of a parameter by rules over paths;
then build, whose chain gives a direction without the learning rate; then apply_updates, and last the schedules of the
learning rate.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from bert_jax.config import OptimizerConfig
from bert_jax.errors import UserError
from bert_jax.model.layers import flatten
from bert_jax.train import rules
from bert_jax.train.optim.directions import (
    hidden_matrices,
    map_by_path,
    scale_by_adam,
    scale_by_muon,
    scale_by_stable_adam,
    scale_by_trust_ratio,
)
from bert_jax.train.rules import Trained

_WITHOUT_DECAY = tuple((pattern, 0.0) for pattern in rules.BIASES_AND_NORMS)


def rate_factors(
    config: OptimizerConfig, params: dict[str, Any], trainable: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Returns the learning-rate factors of parameters, in rules.per_layer's form, or None if all are 1.

    A factor of 0 freezes its parameter. The factor is the product of trainable (rules.trainable), config.rates and
    config.layer_decay. With layer decay, each layer learns at layer_decay times the rate of the layer above it, the
    embeddings at layer_decay times the rate of the first layer, and the heads at the full rate (Howard and Ruder 2018,
    section 3.2; Clark et al. 2020, appendix B). params may be abstract. Raises UserError for rules that rules.check
    rejects and for a layer_decay outside (0, 1].
    """
    if not 0.0 < config.layer_decay <= 1.0:
        raise UserError(f"optimizer.layer_decay is {config.layer_decay}; use 1 (no decay) or a number between 0 and 1")
    trees = [] if trainable is None else [trainable]
    if config.layer_decay != 1.0:
        decay = config.layer_decay
        trees.append(rules.per_layer(rules.by_depth(lambda depth: decay**depth, params, 1.0), params))
    if rates := rules.check(config.rates, "optimizer.rates", params):
        trees.append(rules.per_layer((*rates, (r".*", 1.0)), params))
    if not trees:
        return None
    product: dict[str, Any] = jax.tree.map(lambda *factors: np.prod(np.broadcast_arrays(*factors), axis=0), *trees)
    return product


def decays(config: OptimizerConfig, params: dict[str, Any]) -> dict[str, Any]:
    """Returns the weight decay of parameters, in rules.per_layer's form.

    The first matching rule of config.decays decides. Otherwise biases and normalization parameters have no decay, and
    all others have config.weight_decay. params may be abstract, and a part of the model's (rules.Trained.abstract).
    Raises UserError for rules that rules.check rejects; `build` refuses rules that match no parameter.
    """
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


# The exponential moving average often evaluates better than the latest parameters, above all before the learning rate
# has decayed.


def first_average(decay: float, params: dict[str, Any]) -> dict[str, Any] | None:
    """Copies the parameters as the average before the first step; None for a decay of 0."""
    return jax.tree.map(jnp.copy, params) if decay > 0.0 else None


def next_average(decay: float, step: Int[Array, ""], average: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Returns the average after update number `step`: d * average + (1 - d) * params (Polyak and Juditsky 1992).

    d is min(decay, (1 + step) / (10 + step)), as in tf.train.ExponentialMovingAverage with num_updates, so that the
    random initial parameters quickly lose their influence.
    """
    share = jnp.minimum(decay, (1.0 + step) / (10.0 + step)).astype(jnp.float32)
    # In this form the average of an unchanged value, such as a frozen parameter, stays bitwise identical.
    return jax.tree.map(lambda old, new: old + (1.0 - share) * (new - old), average, params)


Transformations = tuple[optax.GradientTransformation, ...]
Build = Callable[[OptimizerConfig, dict[str, Any]], Transformations]


def build(
    config: OptimizerConfig, params: dict[str, Any], trained: Trained | None = None
) -> optax.GradientTransformation:
    """Returns clipping by global norm (none if clip_norm is 0), followed by OPTIMIZERS[config.name].

    The resulting updates are the direction to subtract, including decoupled weight decay; the caller multiplies them by
    the learning rate. `params` may be abstract; `trained` is their updated part (None: all). Raises UserError for an
    unknown optimizer or schedule, for a value outside its range or without effect, for decays that no parameter
    matches, and for muon if the model has no matrix that it orthogonalizes.
    """
    _check(config)
    if config.name == "muon" and not any(hidden_matrices(path, leaf.ndim) for path, leaf in flatten(params).items()):
        raise UserError(
            "optimizer.name is muon, but the model has none of the matrices that it orthogonalizes: attention and "
            "feed-forward kernels of layers. Use --config.optimizer.name=adamw"
        )
    check_schedule(config)
    rules.check(config.decays, "optimizer.decays", params)
    clip = clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity()
    updated = params if trained is None else trained.abstract(params)
    # The chain stays flat because the tree structure of its state is part of the checkpoint format.
    return optax.chain(clip, *OPTIMIZERS[config.name](config, updated))


def adamw(config: OptimizerConfig, params: dict[str, Any]) -> Transformations:
    """Builds AdamW (Loshchilov and Hutter 2019, algorithm 2; Devlin et al. 2019, appendix A.2)."""
    return scale_by_adam(config), add_decay(decays(config, params))


def lamb(config: OptimizerConfig, params: dict[str, Any]) -> Transformations:
    """Builds LAMB: Adam's step plus weight decay, scaled to the norm of each tensor (You et al. 2020, algorithm 2)."""
    return scale_by_adam(config), add_decay(decays(config, params)), scale_by_trust_ratio()


def muon(config: OptimizerConfig, params: dict[str, Any]) -> Transformations:
    """Builds Muon for attention and feed-forward kernels (Jordan 2024; Liu et al. 2025), AdamW for all others."""
    labels = map_by_path(lambda path, leaf: "muon" if hidden_matrices(path, leaf.ndim) else "adam", params)
    parts = {"muon": scale_by_muon(config.momentum), "adam": scale_by_adam(config)}
    return optax.partition(parts, labels), add_decay(decays(config, params))


def stable_adamw(config: OptimizerConfig, params: dict[str, Any]) -> Transformations:
    """Builds StableAdamW, which shortens steps when gradients suddenly grow (Wortsman et al. 2023, algorithm 2)."""
    return (scale_by_stable_adam(config, decays(config, params)),)


# Maps optimizer.name to the transformations that follow clipping. An extension adds its own entry.
OPTIMIZERS: dict[str, Build] = {"adamw": adamw, "lamb": lamb, "muon": muon, "stable_adamw": stable_adamw}
_NO_MUON = frozenset(OPTIMIZERS) - {"muon"}  # an extension's optimizer may read momentum, too


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales all gradients by min(1, max_norm / norm) (Pascanu et al. 2013, algorithm 1).

    optax.clip_by_global_norm divides every gradient and then selects, which costs another pass over all gradients on a
    CPU; this version multiplies by a single factor.
    """

    def clip(updates: Any, params: Any = None) -> Any:
        factor = jnp.minimum(1.0, max_norm / jnp.maximum(optax.tree.norm(updates), jnp.finfo(jnp.float32).tiny))
        return jax.tree.map(lambda update: update * factor, updates)

    return optax.stateless(clip)


def add_decay(decays: dict[str, Any]) -> optax.GradientTransformation:
    """Adds decay * parameter to each update; a decay is a number or, for stacked layers, an array [L, 1, ...]."""

    def add(updates: Any, params: Any = None) -> Any:
        return jax.tree.map(
            lambda update, param, decay: update + decay * param if decay.any() else update, updates, params, decays
        )

    return optax.stateless(add)


def _check(config: OptimizerConfig) -> None:
    if config.name not in OPTIMIZERS:
        raise UserError(f"unknown optimizer.name {config.name!r}; choose from {', '.join(OPTIMIZERS)}")
    ranges = (
        ("beta1", 0 <= config.beta1 < 1, "a number of at least 0 and below 1, such as 0.9"),
        ("beta2", 0 <= config.beta2 < 1, "a number of at least 0 and below 1, such as 0.999"),
        ("momentum", 0 <= config.momentum < 1, "a number of at least 0 and below 1, such as 0.95"),
        ("epsilon", config.epsilon > 0, "a number above 0, such as 1e-6"),
        ("weight_decay", config.weight_decay >= 0, "0 or more"),
        ("clip_norm", config.clip_norm >= 0, "0 (no clipping) or more"),
        ("ema_decay", 0 <= config.ema_decay < 1, "0 (no average) or a number below 1, such as 0.999"),
    )
    for name, fits, wanted in ranges:
        if not fits:
            raise UserError(f"optimizer.{name} is {getattr(config, name)}; use {wanted}")
    if config.momentum != OptimizerConfig.momentum and config.name in _NO_MUON:
        raise UserError(
            f"optimizer.momentum is {config.momentum}, which is for optimizer.name=muon, but the name is "
            f"{config.name}. Omit it"
        )


def apply_updates(
    params: dict[str, Any], direction: dict[str, Any], rate: Float[Array, ""], factors: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns params - rate * factor * direction; a frozen parameter (factor 0) stays bitwise identical.

    factors holds numbers, or arrays [L, 1, ...] for stacked layers; None means 1 for all.
    """
    if factors is None:
        return jax.tree.map(lambda value, change: value - rate * change, params, direction)
    return jax.tree.map(lambda value, change, factor: value - (rate * factor) * change, params, direction, factors)


# Learning-rate schedules as functions of the step and of the completed fraction of the run.
#
# Because a schedule depends on the fraction, runs limited by minutes, tokens and steps share the same code.


def learning_rate(config: OptimizerConfig, step: Int[Array, ""], fraction: Float[Array, ""]) -> Float[Array, ""]:
    """Returns the learning rate of a step: the peak times the smaller of a warmup ramp and a decaying schedule.

    `step` is the number of completed steps, and `fraction` the completed fraction of the run, from 0 to 1. The peak is
    config.learning_rate, and the schedule ends at config.final_share of it.

    With warmup_steps, the ramp is (step + 1) / warmup_steps and the schedule starts with the run, as in
    google-research/bert, optimization.py. Two details differ from that file, which replaces the schedule by the ramp
    during warmup and whose first step has rate 0: taking the minimum avoids a jump at the end of the ramp, and this
    ramp is one step ahead. With warmup_share, the ramp takes that share of the run and the schedule runs over the rest,
    as in fairseq (polynomial_decay) and transformers (get_linear_schedule_with_warmup).

    The schedules, where x is the completed share of the schedule:

      linear        1 - x
      cosine        (1 + cos(pi x)) / 2 (Loshchilov and Hutter 2017, equation 5, without restarts)
      wsd           1 until the last decay_share of the run, then 1 - sqrt(x), where x is the completed share of that
                    last part (Hu et al. 2024, section 4; decay shape of Haegele et al. 2024, section 3). Warmup does
                    not shift the decay.
      constant      1
      inverse_sqrt  sqrt(w / s) after s steps with w warmup steps, or the same with shares of the run for warmup_share
                    (Vaswani et al. 2017, section 5.3, whose peak is (d_model w)^-0.5). With warmup_steps it does not
                    depend on the length of the run. It decays towards final_share.
    """
    if config.warmup_share > 0:
        ramp = fraction / config.warmup_share
        done = jnp.clip((fraction - config.warmup_share) / (1.0 - config.warmup_share), 0.0, 1.0)
    else:
        ramp, done = (step + 1) / max(config.warmup_steps, 1), fraction
    if config.schedule == INVERSE_SQRT:
        done = jnp.maximum(ramp, 1.0)
    elif config.schedule == "wsd":
        done = jnp.clip((fraction - (1.0 - config.decay_share)) / config.decay_share, 0.0, 1.0)
    level = config.final_share + (1.0 - config.final_share) * SHAPES[config.schedule](done)
    highest = config.learning_rate
    return (highest * jnp.clip(jnp.minimum(ramp, level), 0.0, 1.0)).astype(jnp.float32)


INVERSE_SQRT = "inverse_sqrt"

# Each shape maps the completed share of the schedule to a level from 1 down to 0; inverse_sqrt takes the elapsed time
# in units of the warmup instead.
SHAPES: dict[str, Callable[[Float[Array, ""]], Float[Array, ""]]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
    "wsd": lambda done: 1.0 - jnp.sqrt(done),
    "constant": jnp.ones_like,
    INVERSE_SQRT: lambda done: done**-0.5,
}


def check_schedule(config: OptimizerConfig) -> None:
    """Raises UserError for an unknown schedule, a value outside its range or without effect, or conflicting warmups."""
    if config.schedule not in SHAPES:
        raise UserError(f"unknown optimizer.schedule {config.schedule!r}; choose from {', '.join(SHAPES)}")
    ranges = (
        ("learning_rate", config.learning_rate >= 0, "0 or more"),
        ("warmup_steps", config.warmup_steps >= 0, "0 or more"),
        ("warmup_share", 0 <= config.warmup_share < 1, "0 or a share below 1, such as 0.06"),
        ("decay_share", 0 < config.decay_share <= 1, "a share above 0 and up to 1, such as 0.1"),
        ("final_share", 0 <= config.final_share <= 1, "a share from 0 to 1"),
    )
    for name, fits, wanted in ranges:
        if not fits:
            raise UserError(f"optimizer.{name} is {getattr(config, name)}; use {wanted}")
    if config.decay_share != OptimizerConfig.decay_share and config.schedule != "wsd":
        raise UserError(
            f"optimizer.decay_share is {config.decay_share}, which is for optimizer.schedule=wsd, but the schedule is "
            f"{config.schedule}. Omit it"
        )
    if config.final_share > 0 and config.schedule == "constant":
        raise UserError(
            f"optimizer.final_share is {config.final_share}, but optimizer.schedule=constant ends at the peak rate. "
            "Set --config.optimizer.final_share=0, or another schedule"
        )
    if config.schedule == INVERSE_SQRT and config.warmup_share <= 0 and config.warmup_steps <= 0:
        raise UserError(
            "optimizer.schedule=inverse_sqrt decays relative to the length of the warmup, but no warmup is configured; "
            "set --config.optimizer.warmup_steps or --config.optimizer.warmup_share"
        )
    if config.warmup_share > 0 and config.warmup_steps > 0:
        raise UserError(
            f"optimizer.warmup_steps is {config.warmup_steps} and optimizer.warmup_share is {config.warmup_share}; "
            "only one of them can be used, so set the other to 0"
        )


def warmup_warning(config: OptimizerConfig, steps: int) -> str:
    """Returns a warning if a run of this many steps (0: unknown) ends within its warmup; otherwise an empty text."""
    if not 0 < steps < config.warmup_steps:
        return ""
    return (
        f"warning: optimizer.warmup_steps is {config.warmup_steps}, but the run has {steps} steps, so the learning "
        "rate never reaches its peak. Set --config.optimizer.warmup_steps to less, or to 0 with "
        "--config.optimizer.warmup_share=0.06"
    )


def with_token_shares(config: OptimizerConfig, tokens: float) -> OptimizerConfig:
    """Turns warmup_tokens and decay_tokens into shares of a run of `tokens` tokens (0: it ends by steps or minutes).

    A run that ends by tokens counts its completed fraction in tokens, so its schedule is one of shares. Raises
    UserError for token counts that do not fit the run or the schedule.
    """
    counts = {name: getattr(config, name) for name in ("warmup_tokens", "decay_tokens")}
    for name, count in counts.items():
        if not 0 <= count < float("inf"):
            raise UserError(f"optimizer.{name} is {count}; use a number of tokens, or 0 for none")
        if count and not tokens:
            raise UserError(
                f"optimizer.{name} is set, but the length of the run is not counted in tokens. Set "
                "--config.tokens=N --config.steps=0 (pretraining), or use shares: optimizer.warmup_share, decay_share"
            )
        if count > tokens:
            raise UserError(f"optimizer.{name} is {count:g}, more than the run has; use at most {tokens:g}")
    if config.warmup_tokens and (config.warmup_steps > 0 or config.warmup_share > 0):
        raise UserError(
            f"optimizer.warmup_tokens is {config.warmup_tokens:g}, but optimizer.warmup_steps is {config.warmup_steps} "
            f"and optimizer.warmup_share is {config.warmup_share}; only one of them can be used, so set the others to 0"
        )
    if config.decay_tokens and config.schedule != "wsd":
        raise UserError(
            f"optimizer.decay_tokens is the decay of optimizer.schedule=wsd, but the schedule is {config.schedule}"
        )
    changes = {name.replace("tokens", "share"): count / tokens for name, count in counts.items() if count}
    return dataclasses.replace(config, **changes)
