"""Attention in plain XLA, which stores the scores. It runs on every platform, and the other kernels equal it."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from bert_jax.model.dropout import dropout

# Far below any score, and finite, so that a row without visible keys has no NaN.
MASKED_SCORE = -1e30


def einsum_attention(
    query: Float[Array, "B Q N H"],
    key: Float[Array, "B T N H"],
    value: Float[Array, "B T N H"],
    visible: Bool[Array, "B 1 Q T"],
    *,
    bias: Float[Array, "#B N Q T"] | None = None,
    dropout_rate: float,
    seeds: UInt32[Array, "B 2"] | None,
    precision: jax.lax.Precision,
    narrow: bool = False,
) -> tuple[Float[Array, "B Q N H"], Float[Array, "B N Q T"]]:
    """Computes scaled dot-product attention with dropout on the probabilities (Vaswani et al. 2017, section 3.2).

    Also returns the probabilities before dropout. A bias is added to the scaled scores. Scores and softmax are float32
    whatever the dtype of the arguments.

    With `narrow` the gradient of the scores has the dtype of the arguments, so that half as much of it is written and
    read where that is bfloat16. Scores are then scaled instead of queries, since softmax reads them anyway.
    """
    scale = 1.0 / math.sqrt(query.shape[-1])
    scores = narrow_scores_of(query, key, precision) * scale if narrow else scores_of(query * scale, key, precision)
    if bias is not None:
        scores += bias
    scores = jnp.where(visible, scores, MASKED_SCORE)
    probabilities = softmax_narrow(scores) if value.dtype == jnp.bfloat16 else jax.nn.softmax(scores, axis=-1)
    dropped = dropout(probabilities, dropout_rate, seeds, position_axes=2).astype(value.dtype)
    return jnp.einsum("bnqk,bknh->bqnh", dropped, value, precision=precision), probabilities


@jax.custom_vjp
def softmax_narrow(scores: Float[Array, "*shape K"]) -> Float[Array, "*shape K"]:
    """Computes softmax over the last axis in float32, for whose backward pass only bfloat16 values are kept."""
    return jax.nn.softmax(scores, axis=-1)


def _softmax_forward(scores: Array) -> tuple[Array, Array]:
    probabilities = softmax_narrow(scores)
    return probabilities, probabilities.astype(jnp.bfloat16)


def _softmax_backward(kept: Array, gradient: Array) -> tuple[Array]:
    probabilities = kept.astype(jnp.float32)
    return (probabilities * (gradient - (gradient * probabilities).sum(axis=-1, keepdims=True)),)


softmax_narrow.defvjp(_softmax_forward, _softmax_backward)


def scores_of(
    query: Float[Array, "B Q N H"], key: Float[Array, "B T N H"], precision: jax.lax.Precision
) -> Float[Array, "B N Q T"]:
    """Returns the products of queries and keys in float32."""
    return jnp.einsum("bqnh,bknh->bnqk", query, key, precision=precision, preferred_element_type=jnp.float32)


narrow_scores_of = jax.custom_vjp(scores_of, nondiff_argnums=(2,))


def _scores_forward(query: Array, key: Array, precision: jax.lax.Precision) -> tuple[Array, tuple[Array, Array]]:
    return scores_of(query, key, precision), (query, key)


def _scores_backward(precision: jax.lax.Precision, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    query, key = kept
    gradient = gradient.astype(query.dtype)
    of_query = jnp.einsum("bnqk,bknh->bqnh", gradient, key, precision=precision)
    return of_query, jnp.einsum("bnqk,bqnh->bknh", gradient, query, precision=precision)


narrow_scores_of.defvjp(_scores_forward, _scores_backward)
