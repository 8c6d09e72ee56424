"""The Optax chain of a configuration: clipping, moments, weight decay. It gives a direction, without a rate."""

from collections.abc import Callable
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

Transformations = tuple[optax.GradientTransformation, ...]
Build = Callable[[OptimizerConfig, dict[str, Any]], Transformations]


def build(config: OptimizerConfig, params: dict[str, Any]) -> optax.GradientTransformation:
    """The transformations of OPTIMIZERS[config.name] after clipping by global norm (no clipping where clip_norm is 0).

    Its updates are the direction of descent, with decoupled weight decay; the caller multiplies them by the rate.
    params may be abstract. Raises UserError for an unknown name, or a key outside its range.
    """
    _check(config)
    check_decay(config.ema_decay)
    check_schedule(config)
    clip = clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity()
    # One flat chain: the tree of its state is part of the checkpoint format.
    return optax.chain(clip, *OPTIMIZERS[config.name](config, params))


def adamw(config: OptimizerConfig, params: dict[str, Any]) -> Transformations:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2; Devlin et al. 2019, appendix A.2)."""
    return scale_by_adam(config), add_decay(decays(config, params))


def lamb(config: OptimizerConfig, params: dict[str, Any]) -> Transformations:
    """LAMB: Adam's step and the decay, scaled to the norm of the tensor (You et al. 2020, algorithm 2)."""
    return scale_by_adam(config), add_decay(decays(config, params)), scale_by_trust_ratio()


def muon(config: OptimizerConfig, params: dict[str, Any]) -> Transformations:
    """Muon for the kernels of attention and feed-forward (Jordan 2024; Liu et al. 2025), AdamW for the rest."""
    labels = map_by_path(lambda path, leaf: "muon" if hidden_matrices(path, leaf.ndim) else "adam", params)
    parts = {"muon": scale_by_muon(config.momentum), "adam": scale_by_adam(config)}
    return optax.partition(parts, labels), add_decay(decays(config, params))


def stable_adamw(config: OptimizerConfig, params: dict[str, Any]) -> Transformations:
    """AdamW with shorter steps where gradients exceed their past (Wortsman et al. 2023, algorithm 2)."""
    return (scale_by_stable_adam(config, decays(config, params)),)


# By optimizer.name, the transformations after clipping. An extension adds its own entry here.
OPTIMIZERS: dict[str, Build] = {"adamw": adamw, "lamb": lamb, "muon": muon, "stable_adamw": stable_adamw}


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
    if config.name not in OPTIMIZERS:
        raise UserError(f"unknown optimizer.name {config.name!r}; choose from {', '.join(OPTIMIZERS)}")
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
