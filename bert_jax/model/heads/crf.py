"""A linear-chain conditional random field over tags: a path's score, the partition function, the best path."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from bert_jax.config import ModelConfig
from bert_jax.model.heads.tag_scheme import Scheme
from bert_jax.model.runtime import Runtime

HIGHEST = jax.lax.Precision.HIGHEST
# The score of what cannot be chosen: a step of a path, or an item of a padding row, in which none can. It is finite, so
# that where nothing can be chosen there is no NaN.
IMPOSSIBLE = -1e30


class Allowed(NamedTuple):
    """The paths that a chain may take; all others have the probability 0 and are never decoded."""

    transitions: Bool[Array, "C C"]  # from the row's tag to the column's
    first: Bool[Array, "#B C"]
    last: Bool[Array, "#B C"]


def allowed_by(scheme: Scheme | None, whole: Bool[Array, "B 2"] | None = None) -> Allowed | None:
    """The paths that a scheme of tags allows; None: all.

    whole: whether the first and the last tag of each row are those of a whole sentence. Where a row begins or ends
    within a sentence, any tag may be the first or the last one.
    """
    if scheme is None:
        return None
    first, last = jnp.array([scheme.first]), jnp.array([scheme.last])
    if whole is not None:
        first, last = first | ~whole[:, :1], last | ~whole[:, 1:]
    return Allowed(jnp.array(scheme.pairs), first, last)


class CRF(nnx.Module):
    """Scores of neighboring tags (Lafferty et al. 2001, section 3; Lample et al. 2016, section 2.2).

    Parameters: transitions [C,C], from the row's tag to the column's; start [C] and end [C], for the first and the
    last tag of a chain. All are zero initially, where the best path is that of independent tags.

    A chain runs through the `tagged` positions of a sequence in order, and skips the positions between them, since
    only the first token of a word may have a tag. Each sequence of a packed row is a chain of its own. A row's value
    is the sum over its chains, and 0 for a row without any.

    With `allowed`, the scores of paths that it excludes are far below those of all others.
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
        allowed: Allowed | None = None,
    ) -> Float[Array, "B"]:
        """s(X, y) of Lample et al.: the sum of the tags' logits and of the transitions between them."""
        classes = logits.shape[-1]
        transitions, start, end = self._scores(allowed)
        before = _tagged_before(tagged)
        first = _first_of_chain(tagged, sequence_ids)
        last = _first_of_chain(tagged[:, ::-1], sequence_ids[:, ::-1])[:, ::-1]
        inner = tagged & ~first
        chosen = jax.nn.one_hot(tags, classes) * tagged[..., None]
        previous = jax.nn.one_hot(jnp.take_along_axis(tags, before, axis=1), classes) * inner[..., None]
        return (
            jnp.einsum("btc,btc->b", chosen, logits.astype(jnp.float32), precision=HIGHEST)
            + jnp.einsum("bti,ij,btj->b", previous, transitions, chosen, precision=HIGHEST)
            + ((chosen * first[..., None]).sum(axis=1) * start).sum(axis=-1)
            + ((chosen * last[..., None]).sum(axis=1) * end).sum(axis=-1)
        )

    def log_partition(
        self,
        logits: Float[Array, "B T C"],
        tagged: Bool[Array, "B T"],
        sequence_ids: Int[Array, "B T"],
        allowed: Allowed | None = None,
    ) -> Float[Array, "B"]:
        """The logarithm of the sum of exp(score) over all paths, by the forward algorithm."""
        return self._forward(logits, tagged, sequence_ids, allowed, jax.nn.logsumexp)[0]

    def decode(
        self,
        logits: Float[Array, "B T C"],
        tagged: Bool[Array, "B T"],
        sequence_ids: Int[Array, "B T"],
        allowed: Allowed | None = None,
    ) -> tuple[Int[Array, "B T"], Float[Array, "B"]]:
        """The path with the highest score (Viterbi 1967), with 0 where there is no tag, and that score."""
        score, (forward, last) = self._forward(logits, tagged, sequence_ids, allowed, jnp.max)
        transitions, _, end = self._scores(allowed)

        def back(tag: Array, position: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            before, tagged, first = position
            leaving = jnp.where(first[:, None], end, transitions.T[tag])
            return jnp.where(tagged, (before + leaving).argmax(axis=-1), tag), jnp.where(tagged, tag, 0)

        first = _first_of_chain(tagged, sequence_ids)
        best = (last + end).argmax(axis=-1)
        _, path = jax.lax.scan(back, best, (forward, tagged.T, first.T), reverse=True)
        return path.T, score

    def _scores(
        self, allowed: Allowed | None
    ) -> tuple[Float[Array, "C C"], Float[Array, "#B C"], Float[Array, "#B C"]]:
        """The scores of transitions, of first and of last tags."""
        scores = self.transitions[...], self.start[...][None], self.end[...][None]
        if allowed is None:
            return scores
        transitions, start, end = (
            jnp.where(may, score, IMPOSSIBLE) for may, score in zip(allowed, scores, strict=True)
        )
        return transitions, start, end

    def _forward(
        self,
        logits: Float[Array, "B T C"],
        tagged: Bool[Array, "B T"],
        sequence_ids: Int[Array, "B T"],
        allowed: Allowed | None,
        reduce: Callable[..., Array],
    ) -> tuple[Float[Array, "B"], tuple[Float[Array, "T B C"], Float[Array, "B C"]]]:
        """The reduction over all paths, and over those at each tag before each position and after the last one."""
        transitions, start, end = self._scores(allowed)

        def step(carry: tuple[Array, Array], position: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
            before, closed = carry  # paths by their last tag; and all of them, as if the chain ended here
            logits, tagged, first = position
            moved = reduce(before[:, :, None] + transitions[None], axis=1)
            begun = closed[:, None] + start
            after = jnp.where(tagged[:, None], jnp.where(first[:, None], begun, moved) + logits, before)
            return (after, jnp.where(tagged, reduce(after + end, axis=-1), closed)), before

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
