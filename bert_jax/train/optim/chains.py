"""Builds the Optax chain of a configuration: gradient clipping, moments and weight decay.

The chain produces an update direction that is not yet multiplied by the learning rate.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bert_jax.command import UserError
from bert_jax.config import OptimizerConfig
from bert_jax.model.paths import flatten
from bert_jax.train import rules
from bert_jax.train.freezing import Trained
from bert_jax.train.optim.adam import scale_by_adam
from bert_jax.train.optim.averages import check_decay
from bert_jax.train.optim.factors import decays
from bert_jax.train.optim.muon import scale_by_muon
from bert_jax.train.optim.schedules import check_schedule
from bert_jax.train.optim.tensors import hidden_matrices, map_by_path
from bert_jax.train.optim.trust import scale_by_stable_adam, scale_by_trust_ratio

Transformations = tuple[optax.GradientTransformation, ...]
Build = Callable[[OptimizerConfig, dict[str, Any]], Transformations]


def build(
    config: OptimizerConfig, params: dict[str, Any], trained: Trained | None = None
) -> optax.GradientTransformation:
    """Returns clipping by global norm (none if clip_norm is 0), followed by OPTIMIZERS[config.name].

    The resulting updates are the direction to subtract, including decoupled weight decay; the
    caller multiplies them by the learning rate. params are those of the model, and may be abstract;
    trained is the part of them that is updated (None: all). Raises UserError for an unknown optimizer
    or schedule, for a value outside its range or without effect, for decays that no parameter matches,
    and for muon where the model has no matrix that it orthogonalizes.
    """
    _check(config)
    if config.name == "muon" and not any(hidden_matrices(path, leaf.ndim) for path, leaf in flatten(params).items()):
        raise UserError(
            "optimizer.name is muon, but the model has none of the matrices that it orthogonalizes: attention and "
            "feed-forward kernels of layers. Use --config.optimizer.name=adamw"
        )
    check_decay(config.ema_decay)
    check_schedule(config)
    rules.parse(config.decays, "optimizer.decays", params)
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

    optax.clip_by_global_norm divides every gradient and then selects, which costs another pass over
    all gradients on a CPU; this version multiplies by a single factor.
    """

    def clip(updates: Any, params: Any = None) -> Any:
        factor = jnp.minimum(1.0, max_norm / jnp.maximum(optax.tree.norm(updates), jnp.finfo(jnp.float32).tiny))
        return jax.tree.map(lambda update: update * factor, updates)

    return optax.stateless(clip)


def add_decay(decay_of: dict[str, Any]) -> optax.GradientTransformation:
    """Adds decay * parameter to each update; a decay is a number or, for stacked layers, an array [L, 1, ...]."""

    def add(updates: Any, params: Any = None) -> Any:
        return jax.tree.map(
            lambda update, param, decay: update + decay * param if decay.any() else update, updates, params, decay_of
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
    )
    for name, fits, wanted in ranges:
        if not fits:
            raise UserError(f"optimizer.{name} is {getattr(config, name)}; use {wanted}")
    if config.momentum != OptimizerConfig.momentum and config.name in _NO_MUON:
        raise UserError(
            f"optimizer.momentum is {config.momentum}, which is for optimizer.name=muon, but the name is "
            f"{config.name}. Omit it"
        )
