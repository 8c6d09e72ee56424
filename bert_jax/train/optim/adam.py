"""Adam's update direction (Kingma and Ba 2015, algorithm 1), with and without bias correction."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from bert_jax.config import OptimizerConfig


def scale_by_adam(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns the transformation from gradients to Adam's direction: first moment / (sqrt(second moment) + epsilon).

    The settings are config.beta1, config.beta2 and config.epsilon. Without config.bias_correction
    the moments, which start at zero, are used uncorrected, as in google-research/bert,
    optimization.py, AdamWeightDecayOptimizer. Step t is then (1 - beta1^t) / sqrt(1 - beta2^t)
    times as long: with beta1=0.9 and beta2=0.999, three to seven times in the first hundred steps.
    Zhang et al. 2021, section 4, describe the effect on fine-tuning. The state is
    optax.ScaleByAdamState in both cases.
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
    """Returns the second moment whose square root divided the most recent direction."""
    return optax.tree.bias_correction(state.nu, config.beta2, state.count) if config.bias_correction else state.nu
