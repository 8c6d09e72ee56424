"""Small heads: dense layers to logits, pooling, a learned mix of layers, a projection to a teacher's width."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bert_jax.config import ModelConfig
from bert_jax.model.dropout import Seeds, dropout
from bert_jax.model.heads.config import pool_parts
from bert_jax.model.layers import Dense, activation, child_key, dense, norm, truncated_normal
from bert_jax.model.runtime import Runtime
from bert_jax.model.transformer import gather_positions

NEXT_SENTENCE_CLASSES = 2  # is next, random
ANSWER_ENDS = 2  # first position, last position
HIDDEN_PROJECTION = "hidden_projection"  # the name of that head; only training has it
SHORTEST = 1e-12  # lengths below are not divided by, as in torch.nn.functional.normalize


class Classifier(nnx.Module):
    """Dropout and a dense layer to float32 logits, over pooled vectors or over every token."""

    def __init__(self, config: ModelConfig, outputs: int, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.dense = biased_dense(config, config.width, outputs, runtime=runtime, key=child_key(key, "dense"))
        self.dropout_rate = config.dropout

    def __call__(self, vectors: Float[Array, "B K D"], seeds: Seeds = None) -> Float[Array, "B K C"]:
        # The matmul sums in float32 anyway, and a loss should not read logits that were rounded afterwards.
        return self.dense(dropout(vectors, self.dropout_rate, seeds), dtype=jnp.float32)


class Network(nnx.Module):
    """A dense layer to the model's width, the activation, dropout, and a dense layer to float32 outputs."""

    def __init__(self, config: ModelConfig, inputs: int, outputs: int, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.hidden = dense(config, inputs, runtime=runtime, key=child_key(key, "hidden"))
        self.output = biased_dense(config, config.width, outputs, runtime=runtime, key=child_key(key, "output"))
        self.activation = config.activation
        self.dropout_rate = config.dropout

    def __call__(self, vectors: Float[Array, "B *shape I"], seeds: Seeds = None) -> Float[Array, "B *shape C"]:
        hidden = activation(self.activation)(self.hidden(vectors))
        return self.output(dropout(hidden, self.dropout_rate, seeds), dtype=jnp.float32)


def biased_dense(config: ModelConfig, inputs: int, outputs: int, *, runtime: Runtime, key: PRNGKeyArray) -> Dense:
    """Makes a dense layer that ends a head: it has a bias in every model."""
    return Dense((inputs,), (outputs,), deviation=config.initializer_range, runtime=runtime, key=key)


class LayerMix(nnx.Module):
    """gamma * sum_j softmax(s)_j h_j, over embeddings h_0 and layers h_1 to h_L (Peters et al. 2018, equation 1).

    Parameters: scores [L + 1] (s) and gamma [1], which begin as the mean of all layers. Layers are not normalized
    first, which section 3.2 has as an option. Other heads read the mix instead of the last layer.
    """

    def __init__(self, count: int) -> None:
        self.scores = nnx.Param(jnp.zeros(count))
        self.gamma = nnx.Param(jnp.ones(1))

    def __call__(self, states: Float[Array, "J *shape D"]) -> Float[Array, "*shape D"]:
        """Mixes in float32; the result has the dtype of the states."""
        factors = self.gamma[...] * self.weights()
        mixed = jnp.tensordot(factors, states.astype(jnp.float32), axes=1, precision=jax.lax.Precision.HIGHEST)
        return mixed.astype(states.dtype)

    def weights(self) -> Float[Array, " J"]:
        """Returns softmax(s): the embeddings' weight, then the layers' from the lowest up."""
        return jax.nn.softmax(self.scores[...])


class Pooler(nnx.Module):
    """A layer between hidden states and heads, by model.pooler.

    tanh        a dense layer and tanh over the [CLS] vector (google-research/bert, modeling.py)
    relu, gelu  the same with ReLU or GELU (the classifiers of DistilBERT and ELECTRA)
    transform   a dense layer, the activation and a norm over any vectors that a head reads (ModernBERT)
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.dense = dense(config, config.width, runtime=runtime, key=child_key(key, "dense"))
        if config.pooler == "transform":
            self.norm = norm(config, runtime=runtime)
        self.config = config

    def __call__(self, vectors: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        if self.config.pooler == "transform":
            return self.norm(activation(self.config.activation)(self.dense(vectors)))
        function = jnp.tanh if self.config.pooler == "tanh" else activation(self.config.pooler)
        return function(self.dense(vectors))


class AttentionPooling(nnx.Module):
    """Scores a sequence's positions for their weighted mean: a learned query [D] against a key of each position.

    attention_dot       the key is the hidden state h: q.h (the dot score of Luong et al. 2015, section 3.1)
    attention_additive  the key is tanh(W h + b): q.tanh(W h + b) (Bahdanau et al. 2015, appendix A.1.2, without a
                        decoder; so in Yang et al. 2016, equations 5 to 7)
    """

    def __init__(self, config: ModelConfig, score: str, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.query = nnx.Param(truncated_normal(child_key(key, "query"), (config.width,), config.initializer_range))
        if score == "attention_additive":
            self.dense = dense(config, config.width, runtime=runtime, key=child_key(key, "dense"))
        self.score = score
        self.runtime = runtime

    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """Returns float32 scores, whose softmax over a sequence gives the weights."""
        keys = jnp.tanh(self.dense(hidden)) if self.score == "attention_additive" else hidden
        query = self.query[...].astype(keys.dtype)
        precision = self.runtime.precision
        return jnp.einsum("btd,d->bt", keys, query, precision=precision, preferred_element_type=jnp.float32)


def pool_sequences(
    pooling: str,
    hidden: Float[Array, "B T D"],
    sequence_ids: Int[Array, "B T"],
    cls_positions: Int[Array, "B S"],
    scores: Float[Array, "B T"] | None = None,
) -> Float[Array, "B S D"]:
    """Pools each row's sequences by one of config.POOLINGS or VECTOR_POOLINGS; zeros for an absent sequence.

    Special tokens count like any other token. As in sentence-transformers, mean_sqrt_len_tokens divides the sum of n
    tokens by the root of n, and weightedmean weights the token at position i of a sequence by i.

    Args:
        cls_positions: only cls uses its values; it gives position 0's vector for an absent sequence.
        scores: by AttentionPooling, for attention poolings.
    """
    if pooling == "cls":
        return gather_positions(hidden, cls_positions)
    # [B, S, T]: whether a position belongs to sequence s. Sequences are numbered from 1, padding is 0.
    numbers = jnp.arange(1, cls_positions.shape[1] + 1)
    inside = sequence_ids[:, None, :] == numbers[None, :, None]
    if pooling == "last":
        # An absent sequence would give position 0, so its vector is set to 0 afterwards.
        last = jnp.where(inside, jnp.arange(hidden.shape[1]), 0).max(axis=-1)
        return jnp.where(inside.any(axis=2)[..., None], gather_positions(hidden, last), 0)
    if pooling == "max":
        # -inf for positions of other sequences; an absent sequence has nothing else, and is set to 0.
        highest = jnp.where(inside[..., None], hidden[:, None], -jnp.inf).max(axis=2)
        return jnp.where(inside.any(axis=2)[..., None], highest, 0)
    if pooling in ("mean_sqrt_len_tokens", "weightedmean"):
        ranks = jnp.cumsum(inside, axis=-1) if pooling == "weightedmean" else jnp.ones(inside.shape, jnp.int32)
        weights = jnp.where(inside, ranks, 0).astype(hidden.dtype)
        sizes = weights.sum(axis=-1, keepdims=True)
        weights /= jnp.maximum(sizes if pooling == "weightedmean" else jnp.sqrt(sizes), 1)
        return jnp.einsum("bst,btd->bsd", weights, hidden, precision=jax.lax.Precision.HIGHEST)
    # A softmax over the positions inside each sequence; equal scores give the mean. All zero for an absent sequence,
    # whose softmax is over a finite score, because it would be NaN over -inf alone.
    scores = jnp.zeros(hidden.shape[:2]) if scores is None else scores
    softmax = jax.nn.softmax(jnp.where(inside, scores[:, None], -1e30), axis=-1)
    weights = jnp.where(inside, softmax, 0).astype(hidden.dtype)
    return jnp.einsum("bst,btd->bsd", weights, hidden, precision=jax.lax.Precision.HIGHEST)


def pool_rows(pooling: str, hidden: Float[Array, "B T W"], sequence_ids: Int[Array, "B T"]) -> Float[Array, "B _"]:
    """Pools each row's only sequence in float32, by one pooling or several (pool_parts); zeros for a filler."""
    # The sequence begins at position 0, and S is 1.
    first = jnp.zeros((hidden.shape[0], 1), jnp.int32)
    hidden = hidden.astype(jnp.float32)
    vectors = [pool_sequences(part, hidden, sequence_ids, first)[:, 0] for part in pool_parts(pooling)]
    return jnp.concatenate(vectors, axis=-1)


def unit_vectors(vectors: Float[Array, "*B W"]) -> Float[Array, "*B W"]:
    """Divides vectors by their length; one of length 0 stays 0."""
    # The square root of 0 has no derivative, so the maximum is taken before it.
    squares = jnp.square(vectors).sum(axis=-1, keepdims=True)
    return vectors / jnp.sqrt(jnp.maximum(squares, SHORTEST**2))


class HiddenProjection(nnx.Module):
    """A dense layer from the model's width to its teacher's, the same for all layers; for training only.

    In Jiao et al. 2020, equation 8, each layer may have its own; their code has one (modeling.py, fit_dense).
    """

    def __init__(self, config: ModelConfig, width: int, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.dense = biased_dense(config, config.width, width, runtime=runtime, key=child_key(key, "dense"))

    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        return self.dense(hidden)
