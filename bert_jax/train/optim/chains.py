"""The Optax chain of a configuration: clipping, moments, weight decay. It gives a direction and knows no rate."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from bert_jax.command import UserError
from bert_jax.config import OptimizerConfig
from bert_jax.train import rules
from bert_jax.train.optim.adam import scale_by_adam
from bert_jax.train.optim.averages import check_decay

NAMES = ("adamw",)


def build(config: OptimizerConfig, params: dict[str, Any]) -> optax.GradientTransformation:
    """The chain of config.name, whose updates are the direction of descent; the caller multiplies them by the rate.

    adamw  clipping by global norm, Adam, decoupled weight decay (Devlin et al. 2019, appendix A.2)

    params may be abstract. Raises UserError for a name that is not one of these, or a
    key out of its range.
    """
    if config.name not in NAMES:
        raise UserError(f"optimizer.name is {config.name!r}; use {', '.join(NAMES)}")
    check_decay(config.ema_decay)
    return optax.chain(
        clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity(),
        scale_by_adam(config),
        optax.add_decayed_weights(config.weight_decay, mask=rules.tree_of(rules.WEIGHT_DECAY_RULES, params)),
    )


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales all gradients by min(1, max_norm / norm) (Pascanu et al. 2013, algorithm 1).

    One factor, where Optax's own divides each gradient and then chooses: on a CPU that is another pass over them all.
    """

    def clip(updates: Any, params: Any = None) -> Any:
        factor = jnp.minimum(1.0, max_norm / jnp.maximum(optax.tree.norm(updates), jnp.finfo(jnp.float32).tiny))
        return jax.tree.map(lambda update: update * factor, updates)

    return optax.stateless(clip)
