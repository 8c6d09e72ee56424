"""Attention within a window in plain XLA. Work and memory grow with T times the window, not with T squared."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from bert_jax.model.dropout import dropout
from bert_jax.model.ops.attention_einsum import MASKED_SCORE

# Smaller blocks make matmuls too small to pay on any device.
SMALLEST_BLOCK = 16


def block_of(window: int) -> int:
    """Returns the positions of a block: a query's keys then lie in its own block and the two next to it."""
    return max(window, SMALLEST_BLOCK)


def saves(window: int, length: int) -> bool:
    """Returns whether blocks save work on rows of that length: with four blocks, 3/4 of the scores remain.

    On GPUs `auto` takes cuDNN for shorter rows, which computes all of the scores and stores none.
    """
    return length > 4 * block_of(window)


def banded_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T N H"],
    value: Float[Array, "B T N H"],
    sequence_ids: Int[Array, "B T"],
    *,
    window: int,
    causal: bool,
    dropout_rate: float,
    seeds: UInt32[Array, "B 2"] | None,
    precision: jax.lax.Precision,
) -> Float[Array, "B T N H"]:
    """Computes einsum_attention where a query sees at most `window` positions on either side, for any T.

    Rows are divided into blocks, and the queries of a block attend to the keys of three blocks (causal: two), as in
    Longformer (Beltagy et al. 2020, appendix A). Dropout uses other random bits of the row than einsum_attention.
    Scores and softmax are float32.
    """
    block, length = block_of(window), query.shape[1]
    missing = -length % block
    sides = 1 if causal else 2  # neighboring blocks: before and after

    def blocks(rows: Array, fill: int = 0) -> Array:
        padded = jnp.pad(rows, [(0, 0), (0, missing)] + [(0, 0)] * (rows.ndim - 2), constant_values=fill)
        return padded.reshape(rows.shape[0], -1, block, *rows.shape[2:])

    def with_neighbors(cut: Array, fill: int = 0) -> Array:
        around = [(0, 0), (1, sides - 1)] + [(0, 0)] * (cut.ndim - 2)
        padded, count = jnp.pad(cut, around, constant_values=fill), cut.shape[1]
        shifted = [jax.lax.slice_in_dim(padded, first, first + count, axis=1) for first in range(sides + 1)]
        return jnp.concatenate(shifted, axis=2)

    query = blocks(query * (1.0 / math.sqrt(query.shape[-1])))
    key, value = (with_neighbors(blocks(part)) for part in (key, value))
    sequences = blocks(sequence_ids, fill=-1)
    visible = sequences[:, :, :, None] == with_neighbors(sequences, fill=-1)[:, :, None, :]
    ahead = np.arange(-block, sides * block)[None, :] - np.arange(block)[:, None]
    within = (np.abs(ahead) <= window) & (ahead <= 0 if causal else True)
    visible &= jnp.asarray(within)[None, None]
    scores = jnp.einsum("bcqnh,bcknh->bcnqk", query, key, precision=precision, preferred_element_type=jnp.float32)
    probabilities = jax.nn.softmax(jnp.where(visible[:, :, None], scores, MASKED_SCORE), axis=-1)
    dropped = dropout(probabilities, dropout_rate, seeds).astype(value.dtype)
    context = jnp.einsum("bcnqk,bcknh->bcqnh", dropped, value, precision=precision)
    return context.reshape(context.shape[0], -1, *context.shape[3:])[:, :length]
