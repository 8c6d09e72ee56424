"""Applies an update direction to the parameters, with a learning-rate factor for each parameter."""

from typing import Any

import jax
from jaxtyping import Array, Float


def apply_updates(
    params: dict[str, Any], direction: dict[str, Any], rate: Float[Array, ""], factors: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns params - rate * factor * direction; a frozen parameter (factor 0) stays bitwise identical.

    factors holds numbers, or arrays [L, 1, ...] for stacked layers; None means a factor of 1 for
    every parameter.
    """
    if factors is None:
        return jax.tree.map(lambda value, change: value - rate * change, params, direction)
    return jax.tree.map(lambda value, change, factor: value - (rate * factor) * change, params, direction, factors)
