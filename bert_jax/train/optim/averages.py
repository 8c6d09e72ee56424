"""The exponential moving average of the parameters.

The average often evaluates better than the latest parameters, above all before the learning rate
has decayed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from bert_jax.command import UserError


def check_decay(decay: float) -> None:
    """Raises UserError for a decay outside [0, 1)."""
    if not 0.0 <= decay < 1.0:
        raise UserError(f"optimizer.ema_decay is {decay}; use 0 (no average) or a number below 1, such as 0.999")


def first_average(decay: float, params: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the average before the first step: a copy of the parameters, or None for a decay of 0."""
    return jax.tree.map(jnp.copy, params) if decay > 0.0 else None


def next_average(decay: float, step: Int[Array, ""], average: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Returns the average after update number `step`: d * average + (1 - d) * params (Polyak and Juditsky 1992).

    d is min(decay, (1 + step) / (10 + step)), as in tf.train.ExponentialMovingAverage with
    num_updates, so that the random initial parameters quickly lose their influence.
    """
    kept = jnp.minimum(decay, (1.0 + step) / (10.0 + step)).astype(jnp.float32)
    # In this form the average of an unchanged value, such as a frozen parameter, stays bitwise identical.
    return jax.tree.map(lambda old, new: old + (1.0 - kept) * (new - old), average, params)
