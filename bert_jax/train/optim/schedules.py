"""The learning rate: a function of the step and of the share of the run that is done.

So a run that is measured in minutes and one that is measured in steps go through the same code (law 4).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bert_jax.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: Int[Array, ""], fraction: Float[Array, ""]) -> Float[Array, ""]:
    """Linear warmup over warmup_steps, then linear decay to 0 with the share of the run done.

    google-research/bert optimization.py decays from step 0 and replaces the first steps by the ramp; the smaller of the
    two leaves no jump at the ramp's end. Its ramp also begins with a step at rate 0; this one begins a step further on.
    """
    ramp = (step + 1) / max(config.warmup_steps, 1)
    return (config.learning_rate * jnp.clip(jnp.minimum(ramp, 1.0 - fraction), 0.0, 1.0)).astype(jnp.float32)
