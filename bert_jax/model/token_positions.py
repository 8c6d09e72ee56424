"""Where vectors are in their row, and which keys a query sees."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@dataclass(frozen=True)
class TokenPositions:
    """Where vectors are in their row: the position in the row, the sequence, and the position in the sequence.

    unpacked   whether it is known before the batch is that each row holds one sequence at most, from the first
               position on
    """

    in_row: Int[Array, "B K"]
    sequence_ids: Int[Array, "B K"]
    in_sequence: Int[Array, "B K"]
    unpacked: bool = False

    def at(self, positions: Int[Array, "B K"]) -> "TokenPositions":
        """Returns the entries at some positions of the row, where self covers the whole row."""
        ids, numbers = (jnp.take_along_axis(part, positions, axis=1) for part in (self.sequence_ids, self.in_sequence))
        return dataclasses.replace(self, in_row=positions, sequence_ids=ids, in_sequence=numbers)


def token_positions(
    sequence_ids: Int[Array, "B T"], positions: Int[Array, "B T"], unpacked: bool = False
) -> TokenPositions:
    """Returns the TokenPositions of whole rows, from the fields of a batch."""
    in_row = jax.lax.broadcasted_iota(jnp.int32, sequence_ids.shape, 1)
    return TokenPositions(in_row, sequence_ids, positions, unpacked)


def is_unpacked(batch: Any) -> bool:
    """Returns the `unpacked` of a batch (TokenPositions); False for a batch that does not have it."""
    return getattr(batch, "unpacked", False)


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


def sequence_lengths(rows: TokenPositions) -> Int[Array, "B"]:
    """Returns the number of positions of each unpacked row that a query may see, at least 1.

    Those are the positions that are not padding. In a row of padding alone it is the first one, so that no softmax is
    over nothing.
    """
    assert rows.unpacked
    return jnp.maximum((rows.sequence_ids > 0).sum(axis=1, dtype=jnp.int32), 1)
