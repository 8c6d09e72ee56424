"""What each parameter has of its own: a factor of the learning rate, and a weight decay. Both by the rules of paths."""

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
    """The factor of the rate of each parameter, as rules.per_layer gives; 0 freezes, None is 1 for all.

    The product of trainable (rules.trainable), of config.rates and of config.layer_decay: from the top down each layer
    has layer_decay times the rate of the one above it, the embeddings that of the first layer times it once more, and
    what stands on the encoder has the whole rate (Howard and Ruder 2018, section 3.2; Clark et al. 2020, appendix B).
    params may be abstract. Raises UserError for what rules.parse refuses, or a layer_decay outside (0, 1].
    """
    if not 0.0 < config.layer_decay <= 1.0:
        raise UserError(f"optimizer.layer_decay is {config.layer_decay}; use 1 (none), or a number between 0 and 1")
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
    """Gradual unfreezing: what has a stage of rules.stages begins to learn after that many times `every` steps."""

    stages: dict[str, Any]
    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"unfreezing takes a number of steps from one layer to the next, not {self.every}")


def factors_at(
    factors: dict[str, Any] | None, unfreezing: Unfreezing | None, step: Int[Array, ""]
) -> dict[str, Any] | None:
    """The factors of the rate at a step, 0 for what does not learn yet.

    What does not learn yet has gradients and moments like all else, only no update: moments that began at zero when it
    was unfrozen, beside a count of steps that did not, would make its first steps three times as long.
    """
    if unfreezing is None:
        return factors
    stage = step // unfreezing.every
    learns = jax.tree.map(lambda begins: (begins <= stage).astype(jnp.float32), unfreezing.stages)
    if factors is None:
        return learns
    return jax.tree.map(lambda factor, open_now: factor * open_now, factors, learns)


def decays(config: OptimizerConfig, params: dict[str, Any]) -> dict[str, Any]:
    """The weight decay of each parameter, as rules.per_layer gives.

    By config.decays where one of its rules matches; else config.weight_decay, and none of biases and norms.

    params may be abstract. Raises UserError for what rules.parse refuses.
    """
    given = rules.parse(config.decays, "optimizer.decays", params)
    none = tuple((pattern, 0.0) for pattern in rules.BIASES_AND_NORMS)
    return rules.per_layer((*given, *none, (r".*", config.weight_decay)), params)


def without_frozen(gradients: dict[str, Any], factors: dict[str, Any] | None) -> dict[str, Any]:
    """The gradients, zero where the factor of the rate is: the norm that is clipped is of what learns."""
    if factors is None:
        return gradients

    def mask(gradient: jax.Array, factor: Any) -> jax.Array:
        return gradient if np.all(factor) else gradient * jnp.float32(np.asarray(factor) != 0)

    return jax.tree.map(mask, gradients, factors)
