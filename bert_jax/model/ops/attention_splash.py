"""Attention by the splash kernel for TPUs, which never has the scores in memory (jax.experimental.pallas)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bert_jax.model.placement import Placement

LANES = 128  # the kernel takes slots by multiples of these
_LARGEST_BLOCK = 512
HEAD_MULTIPLE = 8  # of these widths of heads 8 to 192 were compiled, for TPU v4 to v6e


def splash_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T N H"],
    value: Float[Array, "B T N H"],
    sequence_ids: Int[Array, "B T"],
    *,
    window: int,
    causal: bool,
    placement: Placement,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """einsum_attention without dropout, for any T. A window of 0 is none; blocks outside of it are left out.

    XLA cannot cut the kernel over devices: the placement gives each its share of the rows and of the heads. `interpret`
    runs it on any platform, slowly, for tests.
    """
    slots = query.shape[1]
    missing = -slots % LANES
    query = query * (1.0 / math.sqrt(query.shape[-1]))
    padded = [jnp.pad(part, ((0, 0), (0, missing), (0, 0), (0, 0))) for part in (query, key, value)]
    # No sequence has the id -1: what fills the row up sees itself alone.
    sequences = jnp.pad(sequence_ids, ((0, 0), (0, missing)), constant_values=-1)
    attend: Any = functools.partial(_attend, window=window, causal=causal, interpret=interpret)
    cut = placement.shard_kernel(attend, ("heads", "heads", "heads", "sequence_ids"))
    return cut(*padded, sequences)[:, :slots]


def _attend(
    query: Array, key: Array, value: Array, sequences: Array, *, window: int, causal: bool, interpret: bool
) -> Array:
    # Only here, for it takes a second to import.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    slots, heads = query.shape[1:3]
    shape = (slots, slots)
    mask: Any
    if window:
        mask = masks.LocalMask(shape, (window, 0 if causal else window), 0)
    else:
        mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    block = next(size for size in range(_LARGEST_BLOCK, 0, -LANES) if slots % size == 0)
    fused = block == slots  # five products in the backward pass, not seven; of more blocks it would keep a sum each
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=None if fused else block,
        block_kv_dq=None if fused else block,
        use_fused_bwd_kernel=fused,
    )
    kernel = kernels.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * heads), block_sizes=sizes, interpret=interpret
    )
    by_head = [part.transpose(0, 2, 1, 3) for part in (query, key, value)]
    context = jax.vmap(kernel)(*by_head, kernels.SegmentIds(sequences, sequences))
    return context.transpose(0, 2, 1, 3)
