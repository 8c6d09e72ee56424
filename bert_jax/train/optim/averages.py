"""The moving average of parameters: often better than the last of them, before the rate has fallen above all."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from bert_jax.command import UserError


def check_decay(decay: float) -> None:
    """Raises UserError for a decay outside [0, 1)."""
    if not 0.0 <= decay < 1.0:
        raise UserError(f"optimizer.ema_decay is {decay}; use 0 (no average) or a number below 1, as 0.999")


def first_average(decay: float, params: dict[str, Any]) -> dict[str, Any] | None:
    """The average before the first step: the parameters themselves, in memory of their own; None for a decay of 0."""
    return jax.tree.map(jnp.copy, params) if decay > 0.0 else None


def next_average(
    decay: float, step: Int[Array, ""], average: dict[str, Any] | None, params: dict[str, Any]
) -> dict[str, Any] | None:
    """The average once `step` updates have led to params: d * average + (1 - d) * params (Polyak and Juditsky 1992).

    d is the smaller of decay and (1 + step) / (10 + step), as tf.train.ExponentialMovingAverage has it by num_updates:
    the first parameters, which are noise, are then soon forgotten.
    """
    if average is None:
        return None
    kept = jnp.minimum(decay, (1.0 + step) / (10.0 + step)).astype(jnp.float32)
    # One difference and one product: what does not move, as a frozen parameter, stays bit for bit.
    return jax.tree.map(lambda old, new: old + (1.0 - kept) * (new - old), average, params)
