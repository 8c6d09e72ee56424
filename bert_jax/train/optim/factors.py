"""Learning-rate factors and weight decays of single parameters, both chosen by rules over parameter paths."""

from typing import Any

import jax
import numpy as np

from bert_jax.command import UserError
from bert_jax.config import OptimizerConfig
from bert_jax.train import rules

_WITHOUT_DECAY = tuple((pattern, 0.0) for pattern in rules.BIASES_AND_NORMS)


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


def decays(config: OptimizerConfig, params: dict[str, Any]) -> dict[str, Any]:
    """Returns the weight decay of each parameter, in the form of rules.per_layer.

    The first matching rule of config.decays decides. Where none matches, biases and normalization
    parameters have no decay and all other parameters have config.weight_decay. params may be
    abstract, and a part of the model's (freezing.Trained.abstract). Raises UserError for rules that
    rules.parse rejects; `build` refuses those that match no parameter of the model.
    """
    given = rules.parse(config.decays, "optimizer.decays")
    return rules.per_layer((*given, *_WITHOUT_DECAY, (r".*", config.weight_decay)), params)


def overrides_weight_decay(rule_text: str, params: dict[str, Any]) -> bool:
    """Whether optimizer.decays=rule_text leaves no parameter to optimizer.weight_decay; False without rules.

    params may be abstract. Raises UserError for rules that rules.parse rejects.
    """
    given = tuple((pattern, 0.0) for pattern, _ in rules.parse(rule_text, "optimizer.decays"))
    if not given:
        return False
    left = rules.per_layer((*given, *_WITHOUT_DECAY, (r".*", 1.0)), params)
    return not any(layers.any() for layers in jax.tree.leaves(left))


def weight_decay_warning(config: OptimizerConfig, params: dict[str, Any]) -> str:
    """Returns a warning where another weight_decay than the default has no effect; otherwise nothing."""
    if config.weight_decay == OptimizerConfig.weight_decay or not overrides_weight_decay(config.decays, params):
        return ""
    return (
        f"warning: optimizer.weight_decay={config.weight_decay} has no effect, because optimizer.decays="
        f"{config.decays} matches all parameters that it is for"
    )
