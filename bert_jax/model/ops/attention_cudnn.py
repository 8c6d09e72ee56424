"""Attention by cuDNN's fused kernel for NVIDIA GPUs, which never stores the scores."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

HEAD_MULTIPLE = 8
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
    query = jnp.pad(query, ((0, 0), (0, queries % 2), (0, 0), (0, 0)))
    key, value = (jnp.pad(part, ((0, 0), (0, length % 2), (0, 0), (0, 0))) for part in (key, value))
    visible = jnp.pad(visible, ((0, 0), (0, 0), (0, 0), (0, length % 2)))
    visible = jnp.pad(visible, ((0, 0), (0, 0), (0, queries % 2), (0, 0)), constant_values=True)
    return jax.nn.dot_product_attention(query, key, value, mask=visible, implementation=implementation)[:, :queries]
