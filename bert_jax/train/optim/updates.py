"""Parameters moved along a direction, each by a factor of its own."""

from typing import Any

import jax
from jaxtyping import Array, Float


def apply_updates(
    params: dict[str, Any], direction: dict[str, Any], rate: Float[Array, ""], factors: dict[str, Any] | None
) -> dict[str, Any]:
    """params - rate * factor * direction, a frozen parameter (factor 0) staying bit for bit as it is.

    factors are numbers, or arrays that broadcast ([L, 1, ...] on stacked layers); None: 1 for all.
    """
    if factors is None:
        return jax.tree.map(lambda value, change: value - rate * change, params, direction)
    return jax.tree.map(lambda value, change, factor: value - (rate * factor) * change, params, direction, factors)
