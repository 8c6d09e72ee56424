"""Learning-rate factors and weight decays of single parameters, both chosen by rules over parameter paths."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from bert_jax.command import UserError
from bert_jax.config import OptimizerConfig
from bert_jax.train import rules


def rate_factors(
    config: OptimizerConfig, params: dict[str, Any], trainable: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Returns the learning-rate factor of each parameter, in the form of rules.per_layer, or None if all are 1.

    A factor of 0 freezes its parameter. The factor is the product of trainable (rules.trainable),
    config.rates and config.layer_decay. With layer decay, each layer learns at layer_decay times
    the rate of the layer above it, the embeddings at layer_decay times the rate of the first layer,
    and the heads at the full rate (Howard and Ruder 2018, section 3.2; Clark et al. 2020,
    appendix B). params may be abstract. Raises UserError for rules that rules.parse rejects and for
    a layer_decay outside (0, 1].
    """
    if not 0.0 < config.layer_decay <= 1.0:
        raise UserError(f"optimizer.layer_decay is {config.layer_decay}; use 1 (no decay) or a number between 0 and 1")
    trees = [] if trainable is None else [trainable]
    if config.layer_decay != 1.0:
        decay = config.layer_decay
        trees.append(rules.per_layer(rules.by_depth(lambda depth: decay**depth, params, 1.0), params))
    if given := rules.parse(config.rates, "optimizer.rates", params):
        trees.append(rules.per_layer((*given, (r".*", 1.0)), params))
    if not trees:
        return None
    product: dict[str, Any] = jax.tree.map(lambda *factors: np.prod(np.broadcast_arrays(*factors), axis=0), *trees)
    return product


@dataclass(frozen=True, eq=False)
class Unfreezing:
    """Gradual unfreezing: a parameter of stage s (rules.stages) is trained from step s * every on.

    Raises ValueError if `every` is below 1.
    """

    stages: dict[str, Any]
    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"the number of steps between unfrozen layers is {self.every}; use 1 or more")


def factors_at(
    factors: dict[str, Any] | None, unfreezing: Unfreezing | None, step: Int[Array, ""]
) -> dict[str, Any] | None:
    """Returns the learning-rate factors at a step; they are 0 for parameters that are still frozen.

    A parameter that is still frozen has gradients and moments like any other and only lacks its
    update. If its moments started at zero when it is unfrozen, while the step count for the bias
    correction is already large, its first steps would be about three times too long.
    """
    if unfreezing is None:
        return factors
    stage = step // unfreezing.every
    learns = jax.tree.map(lambda begins: (begins <= stage).astype(jnp.float32), unfreezing.stages)
    if factors is None:
        return learns
    return jax.tree.map(lambda factor, open_now: factor * open_now, factors, learns)


def decays(config: OptimizerConfig, params: dict[str, Any]) -> dict[str, Any]:
    """Returns the weight decay of each parameter, in the form of rules.per_layer.

    The first matching rule of config.decays decides. Where none matches, biases and normalization
    parameters have no decay and all other parameters have config.weight_decay. params may be
    abstract. Raises UserError for rules that rules.parse rejects.
    """
    given = rules.parse(config.decays, "optimizer.decays", params)
    none = tuple((pattern, 0.0) for pattern in rules.BIASES_AND_NORMS)
    return rules.per_layer((*given, *none, (r".*", config.weight_decay)), params)


def without_frozen(gradients: dict[str, Any], factors: dict[str, Any] | None) -> dict[str, Any]:
    """Sets the gradients of frozen parameters (factor 0) to zero, so that clipping ignores them in the global norm."""
    if factors is None:
        return gradients

    def mask(gradient: jax.Array, factor: Any) -> jax.Array:
        return gradient if np.all(factor) else gradient * jnp.float32(np.asarray(factor) != 0)

    return jax.tree.map(mask, gradients, factors)
