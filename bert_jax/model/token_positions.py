"""Where vectors are in their row, and which keys a query sees."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class TokenPositions(NamedTuple):
    """Where vectors are in their row: the position in the row, the sequence, and the position in the sequence."""

    in_row: Int[Array, "B K"]
    sequence_ids: Int[Array, "B K"]
    in_sequence: Int[Array, "B K"]

    def at(self, positions: Int[Array, "B K"]) -> "TokenPositions":
        """Returns the entries at some positions of the row, where self covers the whole row."""
        return TokenPositions(positions, *(jnp.take_along_axis(part, positions, axis=1) for part in self[1:]))


def token_positions(sequence_ids: Int[Array, "B T"], positions: Int[Array, "B T"]) -> TokenPositions:
    """Returns the TokenPositions of whole rows, from the fields of a batch."""
    in_row = jax.lax.broadcasted_iota(jnp.int32, sequence_ids.shape, 1)
    return TokenPositions(in_row, sequence_ids, positions)


def visible_keys(
    queries: TokenPositions, keys: TokenPositions, *, window: int = 0, causal: bool = False
) -> Bool[Array, "B 1 Q T"]:
    """Returns which keys a query sees: those of its own sequence, and where causal none after the query.

    Unless `window` is 0, keys are at most so many positions away.
    Padding (sequence id 0) sees padding alone: no real query sees it, and its own softmax is over something.
    """
    visible = queries.sequence_ids[:, :, None] == keys.sequence_ids[:, None, :]
    ahead = keys.in_row[:, None, :] - queries.in_row[:, :, None]
    if window:
        visible &= jnp.abs(ahead) <= window
    if causal:
        visible &= ahead <= 0
    return visible[:, None]
