"""Adam's update direction (Kingma and Ba 2015, algorithm 1), with and without bias correction."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from bert_jax.config import OptimizerConfig
from bert_jax.train.optim.tensors import map_by_path

UpdateCounts = Mapping[str, Array] | None


def scale_by_adam(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns the transformation from gradients to Adam's direction: first moment / (sqrt(second moment) + epsilon).

    The settings are config.beta1, config.beta2 and config.epsilon. Without config.bias_correction
    the moments, which start at zero, are used uncorrected, as in google-research/bert,
    optimization.py, AdamWeightDecayOptimizer. Step t is then (1 - beta1^t) / sqrt(1 - beta2^t)
    times as long: with beta1=0.9 and beta2=0.999, three to seven times in the first hundred steps.
    Zhang et al. 2021, section 4, describe the effect on fine-tuning. The state is
    optax.ScaleByAdamState in both cases.

    `update` accepts `update_counts`, the number of updates of each parameter by path, this one included, for parameters
    that begin to train after the first step (train/freezing.py). Their bias is corrected by that number.
    """
    corrected = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)

    def update(
        gradients: Any,
        state: optax.ScaleByAdamState,
        params: Any = None,
        *,
        update_counts: UpdateCounts = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        if config.bias_correction and update_counts is None:
            return corrected.update(gradients, state, params)
        mean = optax.tree.update_moment(gradients, state.mu, config.beta1, 1)
        square = optax.tree.update_moment_per_elem_norm(gradients, state.nu, config.beta2, 2)
        following = optax.ScaleByAdamState(state.count + 1, mean, square)
        if config.bias_correction:
            mean = _without_bias(mean, config.beta1, following.count, update_counts)
        divisor = corrected_square(config, following, update_counts)
        direction = jax.tree.map(lambda first, second: first / (jnp.sqrt(second) + config.epsilon), mean, divisor)
        return direction, following

    return optax.GradientTransformationExtraArgs(corrected.init, update)


def corrected_square(config: OptimizerConfig, state: optax.ScaleByAdamState, update_counts: UpdateCounts = None) -> Any:
    """Returns the second moment whose square root divided the most recent direction."""
    return _without_bias(state.nu, config.beta2, state.count, update_counts) if config.bias_correction else state.nu


def _without_bias(moment: Any, decay: float, count: Array, update_counts: UpdateCounts) -> Any:
    if update_counts is None:
        return optax.tree.bias_correction(moment, decay, count)
    # By path, since a part of the parameters, such as those that Muon leaves to Adam, has some of the paths only.
    return map_by_path(lambda path, leaf: leaf / (1 - decay ** update_counts[path]), moment)
