"""Attention by cuDNN's fused kernel for NVIDIA GPUs, which never stores the scores."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bert_jax.model.placement import Placement

# The first release whose backward pass writes no gradient of a mask (jax's changelog; jax-ml/jax pull request 39512).
NO_MASK_GRADIENT = (0, 11, 1)

HEAD_MULTIPLE = 8
LEAST_GENERATION = 8  # of the compute capability: Ampere
LARGEST_HEAD = 128


def cudnn_attention(
    query: Float[Array, "B Q N H"],
    key: Float[Array, "B T N H"],
    value: Float[Array, "B T N H"],
    visible: Bool[Array, "B 1 Q T"],
    *,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B Q N H"]:
    """Computes einsum_attention without dropout, by cuDNN's fused kernel, for any Q and T.

    In training with a mask, cuDNN takes even Q and T only. Odd ones are padded by one position, which no query sees as
    a key, and which sees everything as a query.
    """
    queries, length = query.shape[1], key.shape[1]
    query, key, value = map(_even, (query, key, value))
    visible = jnp.pad(visible, ((0, 0), (0, 0), (0, 0), (0, length % 2)))
    visible = jnp.pad(visible, ((0, 0), (0, 0), (0, queries % 2), (0, 0)), constant_values=True)
    return jax.nn.dot_product_attention(query, key, value, mask=visible, implementation=implementation)[:, :queries]


def cudnn_attention_by_length(
    query: Float[Array, "B Q N H"],
    key: Float[Array, "B T N H"],
    value: Float[Array, "B T N H"],
    lengths: Int[Array, "B"],
    *,
    causal: bool,
    placement: Placement,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B Q N H"]:
    """Computes einsum_attention without dropout for unpacked rows, whose queries see the first `lengths` keys.

    With causal, Q is T, and a query sees no key after it. cuDNN reads the lengths instead of a mask, so neither pass
    has an array of T x T. Queries of padding see the same keys, where those of einsum_attention see padding. No other
    position, loss or gradient depends on them. cuDNN could skip them, but what it then writes is not documented, and a
    NaN there would reach other positions in the next layer, as a value with the weight 0.

    Each device computes its rows and heads, which the placement provides: jax's own partitioning of the kernel leaves
    the sharding of the lengths to the compiler, and a part of the rows with the lengths of others would be wrong.
    """

    def attend(query: Array, key: Array, value: Array, lengths: Array) -> Array:
        query, key, value = map(_even, (query, key, value))  # no length reaches the keys that this adds
        # Under jax.vmap (several seeds), jax before 0.11.1 wants both lengths mapped, and over their first axis: the
        # lengths of all queries are computed from the others, and a reshape moves a mapped axis to the front.
        lengths = jax.lax.reshape(lengths[None], lengths.shape)
        queries = jnp.where(lengths > 0, query.shape[1], lengths)
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            query_seq_lengths=queries,
            key_value_seq_lengths=lengths,
            is_causal=causal,
            implementation=implementation,
        )[:, :count]

    count = query.shape[1]
    return placement.shard_kernel(attend, ("heads", "heads", "heads", "lengths"))(query, key, value, lengths)


def _even(vectors: Float[Array, "B T N H"]) -> Float[Array, "B even N H"]:
    return jnp.pad(vectors, ((0, 0), (0, vectors.shape[1] % 2), (0, 0), (0, 0)))
