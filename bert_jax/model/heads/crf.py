"""A linear-chain conditional random field over tags: a path's score, the partition function, the best path."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from bert_jax.config import ModelConfig
from bert_jax.model.runtime import Runtime

HIGHEST = jax.lax.Precision.HIGHEST


class CRF(nnx.Module):
    """Scores of neighboring tags (Lafferty et al. 2001, section 3; Lample et al. 2016, section 2.2).

    Parameters: transitions [C,C], from the row's tag to the column's; start [C] and end [C], for the first and the
    last tag of a chain. All are zero initially, where the best path is that of independent tags.

    A chain runs through the `tagged` positions of a sequence in order, and skips the positions between them, since
    only the first token of a word may have a tag. Each sequence of a packed row is a chain of its own. A row's value
    is the sum over its chains, and 0 for a row without any.
    """

    def __init__(self, config: ModelConfig, tags: int, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.transitions = nnx.Param(jnp.zeros((tags, tags)))
        self.start = nnx.Param(jnp.zeros(tags))
        self.end = nnx.Param(jnp.zeros(tags))

    def score(
        self,
        logits: Float[Array, "B T C"],
        tags: Int[Array, "B T"],
        tagged: Bool[Array, "B T"],
        sequence_ids: Int[Array, "B T"],
    ) -> Float[Array, "B"]:
        """s(X, y) of Lample et al.: the sum of the tags' logits and of the transitions between them."""
        classes = logits.shape[-1]
        before = _tagged_before(tagged)
        first = _first_of_chain(tagged, sequence_ids)
        last = _first_of_chain(tagged[:, ::-1], sequence_ids[:, ::-1])[:, ::-1]
        inner = tagged & ~first
        chosen = jax.nn.one_hot(tags, classes) * tagged[..., None]
        previous = jax.nn.one_hot(jnp.take_along_axis(tags, before, axis=1), classes) * inner[..., None]
        return (
            jnp.einsum("btc,btc->b", chosen, logits.astype(jnp.float32), precision=HIGHEST)
            + jnp.einsum("bti,ij,btj->b", previous, self.transitions[...], chosen, precision=HIGHEST)
            + jnp.einsum("btc,c->b", chosen * first[..., None], self.start[...], precision=HIGHEST)
            + jnp.einsum("btc,c->b", chosen * last[..., None], self.end[...], precision=HIGHEST)
        )

    def log_partition(
        self, logits: Float[Array, "B T C"], tagged: Bool[Array, "B T"], sequence_ids: Int[Array, "B T"]
    ) -> Float[Array, "B"]:
        """The logarithm of the sum of exp(score) over all paths, by the forward algorithm."""
        return self._forward(logits, tagged, sequence_ids, jax.nn.logsumexp)[0]

    def decode(
        self, logits: Float[Array, "B T C"], tagged: Bool[Array, "B T"], sequence_ids: Int[Array, "B T"]
    ) -> tuple[Int[Array, "B T"], Float[Array, "B"]]:
        """The path with the highest score (Viterbi 1967), with 0 where there is no tag, and that score."""
        score, (forward, last) = self._forward(logits, tagged, sequence_ids, jnp.max)
        transitions, end = self.transitions[...], self.end[...]

        def back(tag: Array, position: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            before, tagged, first = position
            leaving = jnp.where(first[:, None], end[None], transitions.T[tag])
            return jnp.where(tagged, (before + leaving).argmax(axis=-1), tag), jnp.where(tagged, tag, 0)

        first = _first_of_chain(tagged, sequence_ids)
        best = (last + end[None]).argmax(axis=-1)
        _, path = jax.lax.scan(back, best, (forward, tagged.T, first.T), reverse=True)
        return path.T, score

    def _forward(
        self,
        logits: Float[Array, "B T C"],
        tagged: Bool[Array, "B T"],
        sequence_ids: Int[Array, "B T"],
        reduce: Callable[..., Array],
    ) -> tuple[Float[Array, "B"], tuple[Float[Array, "T B C"], Float[Array, "B C"]]]:
        """The reduction over all paths, and over those at each tag before each position and after the last one."""
        transitions, start, end = self.transitions[...], self.start[...], self.end[...]

        def step(carry: tuple[Array, Array], position: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
            before, closed = carry  # paths by their last tag; and all of them, as if the chain ended here
            logits, tagged, first = position
            moved = reduce(before[:, :, None] + transitions[None], axis=1)
            begun = closed[:, None] + start[None]
            after = jnp.where(tagged[:, None], jnp.where(first[:, None], begun, moved) + logits, before)
            return (after, jnp.where(tagged, reduce(after + end[None], axis=-1), closed)), before

        first = _first_of_chain(tagged, sequence_ids)
        by_position = (logits.astype(jnp.float32).swapaxes(0, 1), tagged.T, first.T)
        initial = (jnp.zeros_like(by_position[0][0]), jnp.zeros(logits.shape[0]))
        (last, closed), forward = jax.lax.scan(step, initial, by_position)
        return closed, (forward, last)


def _tagged_before(tagged: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """The last tagged position before each position of its row; 0 where there is none."""
    positions = jax.lax.broadcasted_iota(jnp.int32, tagged.shape, 1)
    latest = jax.lax.cummax(jnp.where(tagged, positions, -1), axis=1)
    return jnp.maximum(jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1), 0)


def _first_of_chain(tagged: Bool[Array, "B T"], sequence_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Whether a position is the first tagged one of its sequence."""
    before = _tagged_before(tagged)
    follows = jnp.take_along_axis(tagged, before, axis=1) & (
        jnp.take_along_axis(sequence_ids, before, axis=1) == sequence_ids
    )
    positions = jax.lax.broadcasted_iota(jnp.int32, tagged.shape, 1)
    return tagged & ~(follows & (before < positions))
