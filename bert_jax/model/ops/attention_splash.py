"""Attention by the splash kernel for TPUs, which never stores the scores (jax.experimental.pallas)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bert_jax.model.placement import Placement

LANES = 128  # the kernel takes multiples of this number of positions
_LARGEST_BLOCK = 512
HEAD_MULTIPLE = 8  # head widths from 8 to 192 were compiled for TPU v4 to v6e


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
    """Computes einsum_attention without dropout, for any T.

    A window of 0 means none; blocks outside the window are skipped.

    XLA cannot partition the kernel, so the placement gives each device its shard of the rows and heads. `interpret`
    runs the kernel on any platform, slowly, for tests.
    """
    length = query.shape[1]
    missing = -length % LANES
    query = query * (1.0 / math.sqrt(query.shape[-1]))
    padded = [jnp.pad(part, ((0, 0), (0, missing), (0, 0), (0, 0))) for part in (query, key, value)]
    # No sequence has the id -1, so the filler sees only itself.
    sequences = jnp.pad(sequence_ids, ((0, 0), (0, missing)), constant_values=-1)
    attend: Any = functools.partial(_attend, window=window, causal=causal, interpret=interpret)
    cut = placement.shard_kernel(attend, ("heads", "heads", "heads", "sequence_ids"))
    return cut(*padded, sequences)[:, :length]


def _attend(
    query: Array, key: Array, value: Array, sequences: Array, *, window: int, causal: bool, interpret: bool
) -> Array:
    # Imported here, since the import takes a second.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = query.shape[1:3]
    shape = (length, length)
    mask: Any
    if window:
        mask = masks.LocalMask(shape, (window, 0 if causal else window), 0)
    else:
        mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    block = next(size for size in range(_LARGEST_BLOCK, 0, -LANES) if length % size == 0)
    # With one block the fused backward pass needs five matmuls instead of seven; with more it stores a sum for each.
    fused = block == length
    # Half a block of queries sees two blocks of keys through a narrow window, and a whole block three. In short rows,
    # or with smaller blocks of keys, more steps cost more than it saves (docs/decisions/model_and_attention.md).
    halved = block == _LARGEST_BLOCK and length > 4 * block and 0 < window <= block // 2
    queries = block // 2 if halved else block
    # Heads that do not fill the lanes are padded in memory unless positions are the last axis.
    layout = kernels.QKVLayout.SEQ_MINOR if query.shape[3] % LANES else kernels.QKVLayout.HEAD_DIM_MINOR
    sizes = kernels.BlockSizes(
        block_q=queries,
        block_kv=block,
        block_q_dkv=queries,
        block_kv_dkv=block,
        block_q_dq=None if fused else queries,
        block_kv_dq=None if fused else block,
        use_fused_bwd_kernel=fused,
        q_layout=layout,
        k_layout=layout,
        v_layout=layout,
    )
    kernel = kernels.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * heads), block_sizes=sizes, interpret=interpret
    )
    by_head = [part.transpose(0, 2, 1, 3) for part in (query, key, value)]
    context = jax.vmap(kernel)(*by_head, kernels.SegmentIds(sequences, sequences))
    return context.transpose(0, 2, 1, 3)
