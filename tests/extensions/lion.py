"""An optimizer of its own: Lion (Chen et al. 2023, algorithm 2), by Optax."""

import optax

from bert_jax.train.optim import OPTIMIZERS, add_decay, decays

OPTIMIZERS["lion"] = lambda config, params: (
    optax.scale_by_lion(config.beta1, config.beta2),
    add_decay(decays(config, params)),
)
