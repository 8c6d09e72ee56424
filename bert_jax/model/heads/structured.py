"""Heads with structure: a CRF over tags and its tag schemes, classes of spans, and relations between spans."""

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from bert_jax.config import ModelConfig
from bert_jax.model.dropout import Seeds
from bert_jax.model.heads.basic import Network
from bert_jax.model.heads.config import SpanHeads
from bert_jax.model.layers import activation, child_key, dense
from bert_jax.model.runtime import Runtime
from bert_jax.model.transformer import gather_positions

# Entity tags of IOB1 and IOB2 (O, B-X, I-X) and of IOBES (O, B-X, I-X, E-X, S-X): outside an entity, or the
# beginning, inside, end or single word of one. Files with a single type of entity may omit the type (B, I, O).
ENTITY_TAG = re.compile(r"O|[BIES](-.+)?")


class Scheme(NamedTuple):
    """The tag ids that a scheme allows: pairs [from][to], first and last tags."""

    pairs: tuple[tuple[bool, ...], ...]
    first: tuple[bool, ...]
    last: tuple[bool, ...]


def marks_entities(tags: Collection[str]) -> bool:
    """Tells whether tags mark entities (O, B-X, I-X ...), rather than plain classes."""
    # Tags without types mark entities if they include O and also B or I; other sets of such letters are classes.
    bare = any(len(tag) == 1 for tag in tags if tag != "O")
    if bare and not ("O" in tags and {"B", "I"} & set(tags)):
        return False
    return any(tag != "O" for tag in tags) and all(ENTITY_TAG.fullmatch(tag) for tag in tags)


def marks_ends(tags: Collection[str]) -> bool:
    """Tells whether entity tags are IOBES, which mark the last word of an entity."""
    return any(tag[:1] in ("E", "S") for tag in tags)


def lacks_beginnings(tags: Collection[str]) -> bool:
    """Tells whether tags other than IOBES have an I-X without its B-X."""
    return not marks_ends(tags) and any(tag[0] == "I" and "B" + tag[1:] not in tags for tag in tags)


# Whether a tag cannot follow another one. O also comes before the first tag, and in IOBES after the last.


def breaks_iob1(last: str, tag: str) -> bool:
    """B-X only separates two X."""
    return tag[0] == "B" and (last == "O" or last[2:] != tag[2:])


def breaks_iob2(last: str, tag: str) -> bool:
    """I-X follows only B-X or I-X."""
    return tag[0] == "I" and (last == "O" or last[2:] != tag[2:])


def breaks_iobes(last: str, tag: str) -> bool:
    """I-X and E-X follow B-X or I-X, and nothing else does."""
    inside = last[0] in "BI"
    return inside != (tag[0] in "IE") or (inside and last[2:] != tag[2:])


def recognize_scheme(labels: Sequence[str]) -> Scheme | None:
    """Recognizes a tag scheme, given the tags by id: IOBES if a tag marks an end, IOB1 if an I-X has no B-X, else IOB2.

    None if they do not mark entities.
    """
    if not marks_entities(labels):
        return None
    ends = marks_ends(labels)
    breaks = breaks_iobes if ends else breaks_iob1 if lacks_beginnings(labels) else breaks_iob2
    return Scheme(
        tuple(tuple(not breaks(last, tag) for tag in labels) for last in labels),
        tuple(not breaks("O", tag) for tag in labels),
        tuple(not (ends and breaks(tag, "O")) for tag in labels),
    )


HIGHEST = jax.lax.Precision.HIGHEST
# The score of a step or an item that cannot be chosen. It is finite, so that a row in which none can has no NaN.
IMPOSSIBLE = -1e30


Logits = Float[Array, "B T C"]
Tagged = Bool[Array, "B T"]
Ids = Int[Array, "B T"]


class Allowed(NamedTuple):
    """The paths that a chain may take; others have the probability 0 and are never decoded."""

    transitions: Bool[Array, "C C"]  # from the row's tag to the column's
    first: Bool[Array, "#B C"]
    last: Bool[Array, "#B C"]


def allowed_by(scheme: Scheme | None, whole: Bool[Array, "B 2"] | None = None) -> Allowed | None:
    """Returns the paths that a scheme of tags allows; None: all.

    `whole` says whether each row begins and ends with a sentence. A row that does so within a sentence may have any tag
    first or last.
    """
    if scheme is None:
        return None
    first, last = jnp.array([scheme.first]), jnp.array([scheme.last])
    # A row that begins or ends within a sentence may do so within an entity.
    if whole is not None:
        first, last = first | ~whole[:, :1], last | ~whole[:, 1:]
    return Allowed(jnp.array(scheme.pairs), first, last)


class CRF(nnx.Module):
    """Scores of neighboring tags (Lafferty et al. 2001, section 3; Lample et al. 2016, section 2.2).

    Parameters: transitions [C,C], from the row's tag to the column's; start [C] and end [C], for the first and the
    last tag of a chain. They begin at zero, where the best path is that of independent tags.

    A chain runs through the `tagged` positions of a sequence in order, since only the first token of a word may have a
    tag. Each sequence of a packed row is a chain. A row's value is the sum over its chains, and 0 without any.

    Scores of paths outside `allowed` are far below all others.
    """

    def __init__(self, config: ModelConfig, tags: int, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.transitions = nnx.Param(jnp.zeros((tags, tags)))
        self.start = nnx.Param(jnp.zeros(tags))
        self.end = nnx.Param(jnp.zeros(tags))

    def score(
        self, logits: Logits, tags: Ids, tagged: Tagged, sequence_ids: Ids, allowed: Allowed | None = None
    ) -> Float[Array, "B"]:
        """Sums the tags' logits and the transitions between them: s(X, y) of Lample et al.

        Args:
            tags: tag ids; any where `tagged` is False.
            tagged: the positions with a tag.
            allowed: the paths that may be taken (allowed_by); None: all.
        """
        classes = logits.shape[-1]
        transitions, start, end = self._scores(allowed)
        before = _tagged_before(tagged)
        first = _first_of_chain(tagged, sequence_ids)
        # The last of a chain is the first one if a row is read backwards.
        last = _first_of_chain(tagged[:, ::-1], sequence_ids[:, ::-1])[:, ::-1]
        # A transition needs a tag before it in the same chain.
        inner = tagged & ~first
        # One-hot matmuls, since the gradient of a look-up would be a scatter.
        chosen = jax.nn.one_hot(tags, classes) * tagged[..., None]
        previous = jax.nn.one_hot(jnp.take_along_axis(tags, before, axis=1), classes) * inner[..., None]
        return (
            jnp.einsum("btc,btc->b", chosen, logits.astype(jnp.float32), precision=HIGHEST)
            + jnp.einsum("bti,ij,btj->b", previous, transitions, chosen, precision=HIGHEST)
            + ((chosen * first[..., None]).sum(axis=1) * start).sum(axis=-1)
            + ((chosen * last[..., None]).sum(axis=1) * end).sum(axis=-1)
        )

    def log_partition(
        self, logits: Logits, tagged: Tagged, sequence_ids: Ids, allowed: Allowed | None = None
    ) -> Float[Array, "B"]:
        """Computes log-sum-exp of the scores over all paths, by the forward algorithm."""
        return self._forward(logits, tagged, sequence_ids, allowed, jax.nn.logsumexp)[0]

    def decode(
        self, logits: Logits, tagged: Tagged, sequence_ids: Ids, allowed: Allowed | None = None
    ) -> tuple[Int[Array, "B T"], Float[Array, "B"]]:
        """Returns the path with the highest score (Viterbi 1967), with 0 where there is no tag, and that score."""
        score, (forward, last) = self._forward(logits, tagged, sequence_ids, allowed, jnp.max)
        transitions, _, end = self._scores(allowed)

        def back(tag: Array, position: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            # The best tag before this position; before the first tag of a chain, the best end of the chain before.
            before, tagged, first = position
            leaving = jnp.where(first[:, None], end, transitions.T[tag])
            return jnp.where(tagged, (before + leaving).argmax(axis=-1), tag), jnp.where(tagged, tag, 0)

        # Backwards from the best end: each position's tag follows from the tag after it.
        first = _first_of_chain(tagged, sequence_ids)
        best = (last + end).argmax(axis=-1)
        _, path = jax.lax.scan(back, best, (forward, tagged.T, first.T), reverse=True)
        return path.T, score

    def _scores(
        self, allowed: Allowed | None
    ) -> tuple[Float[Array, "C C"], Float[Array, "#B C"], Float[Array, "#B C"]]:
        """Returns the scores of transitions, first and last tags."""
        scores = self.transitions[...], self.start[...][None], self.end[...][None]
        if allowed is None:
            return scores
        transitions, start, end = (
            jnp.where(may, score, IMPOSSIBLE) for may, score in zip(allowed, scores, strict=True)
        )
        return transitions, start, end

    def _forward(
        self, logits: Logits, tagged: Tagged, sequence_ids: Ids, allowed: Allowed | None, reduce: Callable[..., Array]
    ) -> tuple[Float[Array, "B"], tuple[Float[Array, "T B C"], Float[Array, "B C"]]]:
        """Reduces over all paths, and over those at each tag before each position and after the last one."""
        transitions, start, end = self._scores(allowed)

        def step(carry: tuple[Array, Array], position: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
            before, closed = carry  # paths by their last tag; and all of them, as if the chain ended here
            logits, tagged, first = position
            moved = reduce(before[:, :, None] + transitions[None], axis=1)
            # A chain begins with the value of all chains before it, so that a row's value is their sum.
            begun = closed[:, None] + start
            # Positions without a tag pass both values on.
            after = jnp.where(tagged[:, None], jnp.where(first[:, None], begun, moved) + logits, before)
            return (after, jnp.where(tagged, reduce(after + end, axis=-1), closed)), before

        # The initial zeros count nowhere: the first tagged position begins a chain.
        first = _first_of_chain(tagged, sequence_ids)
        by_position = (logits.astype(jnp.float32).swapaxes(0, 1), tagged.T, first.T)
        initial = (jnp.zeros_like(by_position[0][0]), jnp.zeros(logits.shape[0]))
        (last, closed), forward = jax.lax.scan(step, initial, by_position)
        return closed, (forward, last)


def _tagged_before(tagged: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the last tagged position before each position of its row; 0 if there is none."""
    positions = jax.lax.broadcasted_iota(jnp.int32, tagged.shape, 1)
    latest = jax.lax.cummax(jnp.where(tagged, positions, -1), axis=1)
    return jnp.maximum(jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1), 0)


def _first_of_chain(tagged: Bool[Array, "B T"], sequence_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Tells whether a position is the first tagged one of its sequence."""
    before = _tagged_before(tagged)
    follows = jnp.take_along_axis(tagged, before, axis=1) & (
        jnp.take_along_axis(sequence_ids, before, axis=1) == sequence_ids
    )
    positions = jax.lax.broadcasted_iota(jnp.int32, tagged.shape, 1)
    return tagged & ~(follows & (before < positions))


# Spans of up to K positions are stored in arrays [B, T, K]: entry [t, n - 1] is the span of length n (1 to K) that
# begins at position t. For spans of words, pass the hidden states of the words' first tokens (gather_positions).
# Source: Jurafsky and Martin, Speech and Language Processing, 3rd edition, "Fine-tuning for Span-Based Applications".
PARTS = 3  # of a span's vector: begin, end, content


class SpanVectors(nnx.Module):
    """The vector [s_i; e_j; g_ij] of the span from position i to position j.

    boundaries  hidden     s_i = h_i, e_j = h_j
                networks   s_i and e_j are outputs of a dense layer each and the activation, since the beginning and the
                           end of a span are different questions
    content     mean       g_ij is the mean of h_i ... h_j
                attention  their sum, weighted by the softmax within the span of a score from a two-layer network
                           (Lee et al. 2017, section 4.2)
    """

    def __init__(self, config: ModelConfig, spans: SpanHeads, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        if spans.boundaries == "networks":
            self.start = dense(config, config.width, runtime=runtime, key=child_key(key, "start"))
            self.end = dense(config, config.width, runtime=runtime, key=child_key(key, "end"))
        if spans.content == "attention":
            self.attention = Network(config, config.width, 1, runtime=runtime, key=child_key(key, "attention"))
        self.activation = config.activation
        self.spans = spans
        self.runtime = runtime

    def __call__(self, hidden: Float[Array, "B T D"], seeds: Seeds = None) -> Float[Array, "B T K G"]:
        """Returns the vectors, G = 3D; they mean nothing for entries outside possible_spans."""
        start = end = hidden
        if self.spans.boundaries == "networks":
            function = activation(self.activation)
            start, end = function(self.start(hidden)), function(self.end(hidden))
        length = self.spans.length
        ends = ahead(end, length)
        starts = jnp.broadcast_to(start[:, :, None], ends.shape)
        # The content: a softmax over the positions of each span; equal scores give the mean.
        scores = (
            self.attention(hidden, seeds)[..., 0] if self.spans.content == "attention" else jnp.zeros(hidden.shape[:2])
        )
        inside = jnp.tril(jnp.ones((length, length), bool))  # the positions of a span, by its length
        # A span has one position at least, so -inf leaves no softmax empty.
        weights = jax.nn.softmax(jnp.where(inside[None, None], ahead(scores, length)[:, :, None], -jnp.inf), axis=-1)
        weights = weights.astype(hidden.dtype)
        content = jnp.einsum("btlk,btkd->btld", weights, ahead(hidden, length), precision=self.runtime.precision)
        return jnp.concatenate([starts, ends, content], axis=-1)


class SpanClassifier(Network):
    """A two-layer network: float32 logits for each span's class, or one logit for whether it is a span at all."""

    def __init__(self, config: ModelConfig, classes: int, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        super().__init__(config, PARTS * config.width, classes, runtime=runtime, key=key)


class SpanPairs(Network):
    """A two-layer network over [g; g'; g * g']: float32 logits for the relation from span g to span g'.

    The vector follows Lee et al. 2017, section 4.1, without features, and its use for relations, with class 0 for none,
    Luan et al. 2018, section 3.
    """

    def __init__(self, config: ModelConfig, classes: int, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        super().__init__(config, 3 * PARTS * config.width, classes, runtime=runtime, key=key)

    def __call__(self, vectors: Float[Array, "B P G"], seeds: Seeds = None) -> Float[Array, "B P P C"]:
        """Returns the relation from span p to span q at [p, q]."""
        # Span p varies along axis 1, span q along axis 2.
        shape = (vectors.shape[0], vectors.shape[1], *vectors.shape[1:])
        first, second = jnp.broadcast_to(vectors[:, :, None], shape), jnp.broadcast_to(vectors[:, None], shape)
        return super().__call__(jnp.concatenate([first, second, first * second], axis=-1), seeds)


def possible_spans(sequence_ids: Int[Array, "B T"], length: int) -> Bool[Array, "B T K"]:
    """Tells which spans of up to `length` positions lie in one sequence; padding is no sequence."""
    return (ahead(sequence_ids, length) == sequence_ids[:, :, None]) & (sequence_ids > 0)[:, :, None]


def choose_spans(
    scores: Float[Array, "B T K"], possible: Bool[Array, "B T K"], count: int
) -> tuple[Int[Array, "B P"], Int[Array, "B P"], Bool[Array, "B P"]]:
    """Chooses the P = count best possible spans by score: first positions, lengths, and whether each is real.

    They are sorted, best first. A row may have fewer real spans; P is at most T times K. Relations are predicted
    between these spans only (Lee et al. 2017, section 5).
    """
    # top_k puts -inf last, and isfinite distinguishes these places from real spans.
    flat = jnp.where(possible, scores, -jnp.inf).reshape(scores.shape[0], -1)
    best, places = jax.lax.top_k(flat, min(count, flat.shape[1]))
    return places // scores.shape[2], places % scores.shape[2] + 1, jnp.isfinite(best)


def take_spans(
    vectors: Float[Array, "B T K G"], starts: Int[Array, "B P"], lengths: Int[Array, "B P"]
) -> Float[Array, "B P G"]:
    """Returns the vectors of some spans, by their first positions and lengths."""
    # Entry [t, n - 1] is at t * K + n - 1 of the flat spans.
    rows, positions, longest, width = vectors.shape
    return gather_positions(vectors.reshape(rows, positions * longest, width), starts * longest + lengths - 1)


def ahead(values: Array, count: int) -> Array:
    """Maps [B, T, ...] to [B, T, count, ...]: the values 0, 1, ... positions ahead; zero past the end of the row."""
    length = values.shape[1]
    padded = jnp.pad(values, [(0, 0), (0, count - 1)] + [(0, 0)] * (values.ndim - 2))
    return jnp.stack([padded[:, number : number + length] for number in range(count)], axis=2)
