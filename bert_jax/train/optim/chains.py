"""The Optax chain of a configuration: clipping, moments, weight decay. It gives a direction and knows no rate."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from bert_jax.command import UserError
from bert_jax.config import OptimizerConfig
from bert_jax.train.optim.adam import scale_by_adam
from bert_jax.train.optim.averages import check_decay
from bert_jax.train.optim.factors import decays
from bert_jax.train.optim.muon import scale_by_muon
from bert_jax.train.optim.schedules import check_schedule
from bert_jax.train.optim.tensors import hidden_matrices, map_by_path
from bert_jax.train.optim.trust import scale_by_stable_adam, scale_by_trust_ratio

NAMES = ("adamw", "lamb", "muon", "stable_adamw")


def build(config: OptimizerConfig, params: dict[str, Any]) -> optax.GradientTransformation:
    """The chain of config.name, whose updates are the direction of descent; the caller multiplies them by the rate.

    Each begins with clipping by global norm, unless clip_norm is 0, and has decoupled weight decay.

    adamw         Loshchilov and Hutter 2019, algorithm 2; Devlin et al. 2019, appendix A.2
    lamb          Adam's step and the decay, as long as the tensor is (You et al. 2020, algorithm 2)
    muon          of the kernels of attention and feed-forward (Jordan 2024; Liu et al. 2025); adamw of the rest
    stable_adamw  adamw, shortened where gradients are larger than their past (Wortsman et al. 2023, algorithm 2)

    params may be abstract. Raises UserError for a name that is not one of these, or a key out of its range.
    """
    _check(config)
    check_decay(config.ema_decay)
    check_schedule(config)
    clip = clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity()
    decay_of = decays(config, params)
    decay = add_decay(decay_of)
    if config.name == "lamb":
        return optax.chain(clip, scale_by_adam(config), decay, scale_by_trust_ratio())
    if config.name == "stable_adamw":
        return optax.chain(clip, scale_by_stable_adam(config, decay_of))
    if config.name == "muon":
        labels = map_by_path(lambda path, leaf: "muon" if hidden_matrices(path, leaf.ndim) else "adam", params)
        parts = {"muon": scale_by_muon(config.momentum), "adam": scale_by_adam(config)}
        return optax.chain(clip, optax.partition(parts, labels), decay)
    return optax.chain(clip, scale_by_adam(config), decay)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales all gradients by min(1, max_norm / norm) (Pascanu et al. 2013, algorithm 1).

    One factor, where Optax's own divides each gradient and then chooses: on a CPU that is another pass over them all.
    """

    def clip(updates: Any, params: Any = None) -> Any:
        factor = jnp.minimum(1.0, max_norm / jnp.maximum(optax.tree.norm(updates), jnp.finfo(jnp.float32).tiny))
        return jax.tree.map(lambda update: update * factor, updates)

    return optax.stateless(clip)


def add_decay(decay_of: dict[str, Any]) -> optax.GradientTransformation:
    """Adds each parameter times its decay, a number or [L, 1, ...] on stacked layers."""

    def add(updates: Any, params: Any = None) -> Any:
        return jax.tree.map(
            lambda update, param, decay: update + decay * param if decay.any() else update, updates, params, decay_of
        )

    return optax.stateless(add)


def _check(config: OptimizerConfig) -> None:
    if config.name not in NAMES:
        raise UserError(f"optimizer.name is {config.name!r}; use {', '.join(NAMES)}")
    ranges = (
        ("beta1", 0 <= config.beta1 < 1, "a number from 0 to below 1, as 0.9"),
        ("beta2", 0 <= config.beta2 < 1, "a number from 0 to below 1, as 0.999"),
        ("momentum", 0 <= config.momentum < 1, "a number from 0 to below 1, as 0.95"),
        ("epsilon", config.epsilon > 0, "a number over 0, as 1e-6"),
        ("weight_decay", config.weight_decay >= 0, "0 or more"),
        ("clip_norm", config.clip_norm >= 0, "0 (no clipping) or more"),
    )
    for name, fits, wanted in ranges:
        if not fits:
            raise UserError(f"optimizer.{name} is {getattr(config, name)}; use {wanted}")
