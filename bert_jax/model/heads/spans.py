"""Heads over spans of up to K positions: a vector, a class, and the relation of two spans.

Spans are stored in arrays [B, T, K]: entry [t, n - 1] is the span of length n (1 to K) that begins at position t. For
spans of words, pass the hidden states of the words' first tokens (gather_positions) instead of those of all tokens.
Source: Jurafsky and Martin, Speech and Language Processing, 3rd edition, "Fine-tuning for Span-Based Applications".
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from bert_jax.config import ModelConfig
from bert_jax.model.activations import activation
from bert_jax.model.heads.classification import Network, dense
from bert_jax.model.heads.config import SpanHeads
from bert_jax.model.layer import gather_positions
from bert_jax.model.layers import child_key
from bert_jax.model.runtime import Runtime

PARTS = 3  # of a span's vector: begin, end, content


class SpanVectors(nnx.Module):
    """The vector [s_i; e_j; g_ij] of the span from position i to position j.

    boundaries  hidden    s_i = h_i, e_j = h_j
                networks  s_i and e_j are each given by a dense layer and the activation, since the beginning and the
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

    def __call__(
        self, hidden: Float[Array, "B T D"], seeds: UInt32[Array, "B 2"] | None = None
    ) -> Float[Array, "B T K G"]:
        """G = 3D. The attention network drops out. Entries that are no span of one sequence have meaningless vectors
        (possible_spans)."""
        start = end = hidden
        if self.spans.boundaries == "networks":
            function = activation(self.activation)
            start, end = function(self.start(hidden)), function(self.end(hidden))
        ends = ahead(end, self.spans.length)
        starts = jnp.broadcast_to(start[:, :, None], ends.shape)
        return jnp.concatenate([starts, ends, self._content(hidden, seeds)], axis=-1)

    def _content(self, hidden: Float[Array, "B T D"], seeds: UInt32[Array, "B 2"] | None) -> Float[Array, "B T K D"]:
        length = self.spans.length
        scores = jnp.zeros(hidden.shape[:2])
        if self.spans.content == "attention":
            scores = self.attention(hidden, seeds)[..., 0]
        inside = jnp.tril(jnp.ones((length, length), bool))  # the positions of a span, by its length
        weights = jax.nn.softmax(jnp.where(inside[None, None], ahead(scores, length)[:, :, None], -jnp.inf), axis=-1)
        return jnp.einsum(
            "btlk,btkd->btld", weights.astype(hidden.dtype), ahead(hidden, length), precision=self.runtime.precision
        )


class SpanClassifier(Network):
    """The class of each span: float32 logits from a two-layer network; one logit for whether it is a span at all."""

    def __init__(self, config: ModelConfig, classes: int, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        super().__init__(config, PARTS * config.width, classes, runtime=runtime, key=key)


class SpanPairs(Network):
    """The relation of a span g to another g': float32 logits from a two-layer network over [g; g'; g * g'].

    The vector of a pair follows Lee et al. 2017, section 4.1, without features. Its use for relations, with class 0
    for none, follows Luan et al. 2018, section 3.
    """

    def __init__(self, config: ModelConfig, classes: int, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        super().__init__(config, 3 * PARTS * config.width, classes, runtime=runtime, key=key)

    def __call__(
        self, vectors: Float[Array, "B P G"], seeds: UInt32[Array, "B 2"] | None = None
    ) -> Float[Array, "B P P C"]:
        """The relation from span p to span q at [p, q]."""
        shape = (vectors.shape[0], vectors.shape[1], *vectors.shape[1:])
        first, second = jnp.broadcast_to(vectors[:, :, None], shape), jnp.broadcast_to(vectors[:, None], shape)
        return super().__call__(jnp.concatenate([first, second, first * second], axis=-1), seeds)


def possible_spans(sequence_ids: Int[Array, "B T"], length: int) -> Bool[Array, "B T K"]:
    """Which spans of up to `length` positions lie in one sequence; padding is no sequence."""
    return (ahead(sequence_ids, length) == sequence_ids[:, :, None]) & (sequence_ids > 0)[:, :, None]


def choose_spans(
    scores: Float[Array, "B T K"], possible: Bool[Array, "B T K"], count: int
) -> tuple[Int[Array, "B P"], Int[Array, "B P"], Bool[Array, "B P"]]:
    """The P = count best possible spans by score, best first: first positions, lengths, and whether each is real.

    A row may have fewer real spans. P is at most the number of entries of a row. Relations are predicted between
    these spans only (Lee et al. 2017, section 5).
    """
    flat = jnp.where(possible, scores, -jnp.inf).reshape(scores.shape[0], -1)
    best, places = jax.lax.top_k(flat, min(count, flat.shape[1]))
    return places // scores.shape[2], places % scores.shape[2] + 1, jnp.isfinite(best)


def take_spans(
    vectors: Float[Array, "B T K G"], starts: Int[Array, "B P"], lengths: Int[Array, "B P"]
) -> Float[Array, "B P G"]:
    """The vectors of some spans, by their first positions and lengths."""
    rows, positions, longest, width = vectors.shape
    return gather_positions(vectors.reshape(rows, positions * longest, width), starts * longest + lengths - 1)


def ahead(values: Array, count: int) -> Array:
    """[B, T, ...] to [B, T, count, ...]: the values 0, 1, ... positions after each; zero past the end of the row."""
    length = values.shape[1]
    padded = jnp.pad(values, [(0, 0), (0, count - 1)] + [(0, 0)] * (values.ndim - 2))
    return jnp.stack([padded[:, number : number + length] for number in range(count)], axis=2)
