"""AdamW as BERT used it, as an Optax chain without a learning rate, and the learning rate as a function.

The rate is a function of the step and of the share of the run that is done, so that a run that is measured in
minutes and one that is measured in steps go through the same code (law 4).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from bert_jax.command import UserError
from bert_jax.config import OptimizerConfig
from bert_jax.train import rules


def build(config: OptimizerConfig, params: dict[str, Any]) -> optax.GradientTransformation:
    """Clipping by global norm, Adam with bias correction, decoupled weight decay (Devlin et al. 2019, appendix A.2).

    params may be abstract. The chain gives the direction of descent; the caller multiplies it by the rate.
    """
    if config.name != "adamw":
        raise UserError(f"optimizer.name is {config.name!r}; use adamw")
    return optax.chain(
        clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity(),
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
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


def learning_rate(config: OptimizerConfig, step: Int[Array, ""], fraction: Float[Array, ""]) -> Float[Array, ""]:
    """Linear warmup over warmup_steps, then linear decay to 0 with the share of the run done.

    google-research/bert optimization.py decays from step 0 and replaces the first steps by the ramp; the smaller of the
    two leaves no jump at the ramp's end. Its ramp also begins with a step at rate 0; this one begins a step further on.
    """
    ramp = (step + 1) / max(config.warmup_steps, 1)
    return (config.learning_rate * jnp.clip(jnp.minimum(ramp, 1.0 - fraction), 0.0, 1.0)).astype(jnp.float32)


def apply_updates(
    params: dict[str, Any], direction: dict[str, Any], rate: Float[Array, ""], factors: dict[str, Any] | None
) -> dict[str, Any]:
    """params - rate * direction, a frozen parameter (factor 0) staying bit for bit as it is."""
    if factors is None:
        return jax.tree.map(lambda value, change: value - rate * change, params, direction)
    return jax.tree.map(lambda value, change, factor: value - (rate * factor) * change, params, direction, factors)
