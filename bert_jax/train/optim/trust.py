"""Updates rescaled per tensor: LAMB's trust ratio and StableAdamW's update clipping."""

import re
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from bert_jax.config import OptimizerConfig
from bert_jax.train import rules
from bert_jax.train.optim.adam import UpdateCounts, corrected_square, scale_by_adam
from bert_jax.train.optim.tensors import map_by_path, own_axes


def scale_by_trust_ratio() -> optax.GradientTransformation:
    """Multiplies each tensor's update by |parameter| / |update| (You et al. 2020, algorithm 2, with phi the identity).

    Norms are taken separately for each layer, for queries, keys and values, and for the two halves
    of a gated feed-forward. Updates of biases and normalization parameters are unchanged, as in
    google-research/albert, lamb_optimizer.py (exclude_from_layer_adaptation), and so are those of
    tensors whose parameter or update norm is 0. For a single matrix the result equals that of
    optax.scale_by_trust_ratio, which takes one norm of a whole stack and also scales biases.
    """

    def scale(path: str, update: Array, param: Array) -> Array:
        if any(re.search(pattern, path) for pattern in rules.BIASES_AND_NORMS):
            return update
        axes = own_axes(path, update.ndim)
        length, step = _norm(param, axes), _norm(update, axes)
        ratio = length / jnp.where(step > 0, step, 1.0)
        return update * jnp.where((length > 0) & (step > 0), ratio, 1.0)

    return optax.stateless(lambda updates, params: map_by_path(scale, updates, params))


def scale_by_stable_adam(config: OptimizerConfig, decays: dict[str, Any]) -> optax.GradientTransformation:
    """Returns StableAdamW: Adam's step plus weight decay, divided by max(1, RMS) (Wortsman et al. 2023, algorithm 2).

    RMS is the root mean square of g / max(sqrt(u), epsilon) over one tensor of one layer (queries,
    keys and values separately), where u is the second moment. It exceeds 1 when gradients are
    larger than their history predicts, as happens before a loss spike. This replaces clipping by
    the gradient norm. The state is optax.ScaleByAdamState.
    """
    adam = scale_by_adam(config)

    def update(
        gradients: Any, state: Any, params: Any = None, *, update_counts: UpdateCounts = None, **_: Any
    ) -> tuple[Any, Any]:
        direction, following = adam.update(gradients, state, params, update_counts=update_counts)
        squares = corrected_square(config, following, update_counts)

        def stable(path: str, change: Array, gradient: Array, square: Array, param: Array, decay: Any) -> Array:
            relative = jnp.square(gradient) / jnp.maximum(square, config.epsilon**2)
            rms = jnp.sqrt(relative.mean(axis=own_axes(path, gradient.ndim), keepdims=True))
            return (change + decay * param) / jnp.maximum(1.0, rms)

        return map_by_path(stable, direction, gradients, squares, params, decays), following

    return optax.GradientTransformationExtraArgs(adam.init, update)


def _norm(array: Float[Array, "..."], axes: tuple[int, ...]) -> Float[Array, "..."]:
    return jnp.sqrt(jnp.square(array.astype(jnp.float32)).sum(axis=axes, keepdims=True))
