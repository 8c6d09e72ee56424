"""Adam's moments (Kingma and Ba 2015, algorithm 1), with and without the correction of their bias."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from bert_jax.config import OptimizerConfig


def scale_by_adam(config: OptimizerConfig) -> optax.GradientTransformation:
    """The mean of gradients over the root of the mean of their squares, by config.beta1, beta2 and epsilon.

    Without config.bias_correction both means begin at zero and stay as they are, as in google-research/bert,
    optimization.py, AdamWeightDecayOptimizer: step t is then (1 - beta1^t) / sqrt(1 - beta2^t) times as long, with 0.9
    and 0.999 three to seven times in the first hundred steps (Zhang et al. 2021, section 4, on what that does to
    fine-tuning). The state is optax.ScaleByAdamState either way.
    """
    corrected = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    if config.bias_correction:
        return corrected

    def update(gradients: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, Any]:
        mean = optax.tree.update_moment(gradients, state.mu, config.beta1, 1)
        square = optax.tree.update_moment_per_elem_norm(gradients, state.nu, config.beta2, 2)
        direction = jax.tree.map(lambda first, second: first / (jnp.sqrt(second) + config.epsilon), mean, square)
        return direction, optax.ScaleByAdamState(state.count + 1, mean, square)

    return optax.GradientTransformation(corrected.init, update)


def corrected_square(config: OptimizerConfig, state: optax.ScaleByAdamState) -> Any:
    """The mean of squares that the last direction was divided by the root of."""
    return optax.tree.bias_correction(state.nu, config.beta2, state.count) if config.bias_correction else state.nu
