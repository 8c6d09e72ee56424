"""Updates measured by their tensor: LAMB's trust ratio, and the clipping of StableAdamW."""

import re
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from bert_jax.config import OptimizerConfig
from bert_jax.train import rules
from bert_jax.train.optim.adam import corrected_square, scale_by_adam
from bert_jax.train.optim.tensors import map_by_path, own_axes


def scale_by_trust_ratio() -> optax.GradientTransformation:
    """Each tensor's update as long as the tensor is: times |parameter| / |update| (You et al. 2020, algorithm 2).

    A norm is one of a tensor of one layer; of queries, keys and values each; of a gate and what it gates each. phi is
    the identity. Biases and norms keep their update, as in google-research/albert, lamb_optimizer.py
    (exclude_from_layer_adaptation); so does a tensor whose norm, or whose update's, is 0. On one matrix equal to
    optax.scale_by_trust_ratio, which takes one norm of a stack, and of biases too.
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
    """StableAdamW: Adam's step and the weight decay, divided by max(1, RMS) (Wortsman et al. 2023, algorithm 2).

    RMS is the root of the mean of g^2 / max(u, epsilon^2) over a tensor (of one layer; queries, keys and values apart),
    u the mean of squares: over 1 where gradients are larger than their past says, as before a spike of the loss. It
    takes the place of clipping the gradients' norm. The state is optax.ScaleByAdamState.
    """
    adam = scale_by_adam(config)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        direction, following = adam.update(gradients, state, params)
        squares = corrected_square(config, following)

        def stable(path: str, change: Array, gradient: Array, square: Array, param: Array, decay: Any) -> Array:
            relative = jnp.square(gradient) / jnp.maximum(square, config.epsilon**2)
            rms = jnp.sqrt(relative.mean(axis=own_axes(path, gradient.ndim), keepdims=True))
            return (change + decay * param) / jnp.maximum(1.0, rms)

        return map_by_path(stable, direction, gradients, squares, params, decays), following

    return optax.GradientTransformation(adam.init, update)


def _norm(array: Float[Array, "..."], axes: tuple[int, ...]) -> Float[Array, "..."]:
    return jnp.sqrt(jnp.square(array.astype(jnp.float32)).sum(axis=axes, keepdims=True))
