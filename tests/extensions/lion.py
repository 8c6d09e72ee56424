"""An optimizer of its own: Lion (Chen et al. 2023, algorithm 2), by Optax."""

from dataclasses import dataclass

import optax

from bert_jax.config import OptimizerConfig
from bert_jax.train.optim import OPTIMIZERS, add_decay, decays


@dataclass(frozen=True)
class Lion(OptimizerConfig, kind="lion"):
    """Signs of an average of gradients."""


OPTIMIZERS["lion"] = lambda config, params: (
    optax.scale_by_lion(config.beta1, config.beta2),
    add_decay(decays(config, params)),
)
