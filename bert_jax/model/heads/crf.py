"""A linear-chain conditional random field over tags: the score of a path, the sum over all paths, the best path."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from bert_jax.config import ModelConfig
from bert_jax.model.runtime import Runtime

HIGHEST = jax.lax.Precision.HIGHEST


class CRF(nnx.Module):
    """Scores of tags beside each other (Lafferty et al. 2001, section 3; Lample et al. 2016, section 2.2).

    transitions [C,C], from the row's tag to the column's; start [C] and end [C], of a chain's first and last tag. All
    zero at first, where the best path is that of independent tags.

    A chain runs through the `tagged` slots of a sequence, in order, whatever lies between them: tags may stand on the
    first piece of a word only. Each sequence of a packed row is a chain of its own, and a row's figures are the sums
    over its chains; 0 for a row without any.
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
        """s(X, y) of Lample et al.: the logits of the tags, and the transitions on their way."""
        classes = logits.shape[-1]
        before = _slot_before(tagged)
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
        """The path of the greatest score, 0 in slots that are not tagged, and that score (Viterbi 1967)."""
        score, (forward, last) = self._forward(logits, tagged, sequence_ids, jnp.max)
        transitions, end = self.transitions[...], self.end[...]

        def back(tag: Array, slot: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            before, tagged, first = slot
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
        """The reduction over all paths; and over those that are at a tag before each slot, and after the last one."""
        transitions, start, end = self.transitions[...], self.start[...], self.end[...]

        def step(carry: tuple[Array, Array], slot: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
            before, closed = carry  # paths by their last tag; and as if the chain ended there
            logits, tagged, first = slot
            moved = reduce(before[:, :, None] + transitions[None], axis=1)
            begun = closed[:, None] + start[None]
            after = jnp.where(tagged[:, None], jnp.where(first[:, None], begun, moved) + logits, before)
            return (after, jnp.where(tagged, reduce(after + end[None], axis=-1), closed)), before

        first = _first_of_chain(tagged, sequence_ids)
        by_slot = (logits.astype(jnp.float32).swapaxes(0, 1), tagged.T, first.T)
        initial = (jnp.zeros_like(by_slot[0][0]), jnp.zeros(logits.shape[0]))
        (last, closed), forward = jax.lax.scan(step, initial, by_slot)
        return closed, (forward, last)


def _slot_before(tagged: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """The last tagged slot before each slot of its row; 0 where there is none."""
    slots = jax.lax.broadcasted_iota(jnp.int32, tagged.shape, 1)
    latest = jax.lax.cummax(jnp.where(tagged, slots, -1), axis=1)
    return jnp.maximum(jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1), 0)


def _first_of_chain(tagged: Bool[Array, "B T"], sequence_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Whether a slot is tagged and no slot of its sequence before it is."""
    before = _slot_before(tagged)
    follows = jnp.take_along_axis(tagged, before, axis=1) & (
        jnp.take_along_axis(sequence_ids, before, axis=1) == sequence_ids
    )
    slots = jax.lax.broadcasted_iota(jnp.int32, tagged.shape, 1)
    return tagged & ~(follows & (before < slots))
