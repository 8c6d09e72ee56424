"""The attention kernels from XLA and libraries, and what all kernels share; choice.py says where each runs.

einsum stores all scores, runs on every platform, and defines the result that the others equal. banded computes a band
of scores for layers with a window. cuDNN (NVIDIA GPUs) and splash (TPUs) never store the scores.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bert_jax.model.attention.choice import band_block
from bert_jax.model.dropout import Seeds, dropout, element_bits, keeps, line_words
from bert_jax.model.ops import Heads
from bert_jax.model.runtime import ALONE, Placement

# Far below any score, and finite, so that a row without visible keys has no NaN.
MASKED_SCORE = -1e30


@dataclass(frozen=True)
class KernelOptions:
    """A kernel's static arguments; it ignores those that it cannot serve."""

    window: int = 0  # how many positions a query sees on either side; 0: all
    causal: bool = False  # a query sees no key after it
    dropout_rate: float = 0.0  # of the probabilities
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT
    placement: Placement = ALONE  # shards kernels that XLA cannot partition
    interpret: bool = False  # runs a kernel on any platform, slowly, for tests


@dataclass(frozen=True, kw_only=True)
class Grid(KernelOptions):
    """One device's attention, for Pallas kernels that divide it into blocks of positions (flash.py, triton.py)."""

    heads: int
    width: int
    length: int  # a multiple of the block

    @property
    def block(self) -> int:
        """Positions of a block."""
        raise NotImplementedError

    @property
    def blocks(self) -> int:
        return self.length // self.block

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return 1.0 / math.sqrt(self.width)

    def matmul(self, left: Array, right: Array, summed: tuple[tuple[int], tuple[int]]) -> Array:
        """Multiplies matrices in float32; `summed` are the axes FIRST, LAST or FIRST_OF_SECOND."""
        axes = (summed, ((), ()))
        return jax.lax.dot_general(left, right, axes, precision=self.precision, preferred_element_type=jnp.float32)

    def limit(self, visible: Array, ahead: Array) -> Array:
        """Hides keys that lie outside the window or, if causal, ahead of the query."""
        if self.window:
            visible &= jnp.abs(ahead) <= self.window
        if self.causal:
            visible &= ahead <= 0
        return visible

    def dropout(self, words: tuple[Array, Array] | None, index: Array) -> Callable[[Array], Array]:
        """Returns a function that drops elements without scaling the others.

        `words` are per query (dropout.element_bits), and `index` has the keys' positions.
        """
        if words is None:
            return lambda matrix: matrix
        # Kernels divide by the share that is kept at their end, once for a sum.
        kept = keeps(element_bits(index, *words), self.dropout_rate)
        return lambda matrix: jnp.where(kept, matrix, 0.0)


FIRST, FIRST_OF_SECOND, LAST = ((0,), (0,)), ((1,), (0,)), ((1,), (1,))  # the axes that Grid.matmul sums over


def einsum_attention(
    heads: Heads,
    visible: Bool[Array, "B 1 Q T"],
    seeds: Seeds,
    options: KernelOptions,
    bias: Float[Array, "#B N Q T"] | None = None,
    narrow: bool = False,
) -> tuple[Float[Array, "B Q N H"], Float[Array, "B N Q T"]]:
    """Computes scaled dot-product attention with dropout on the probabilities (Vaswani et al. 2017, section 3.2).

    Scores and softmax are float32 whatever the dtype of the heads. `visible` includes window and causality.

    Args:
        bias: added to the scaled scores.
        narrow: whether the scores' gradient has the dtype of the heads, which halves its memory traffic in bfloat16.

    Returns:
        The context, and the probabilities before dropout.
    """
    query, key, value = heads
    scale, precision = 1.0 / math.sqrt(query.shape[-1]), options.precision
    # Narrow scores are scaled instead of queries, since softmax reads them anyway.
    scores = (
        scores_with_narrow_gradient(query, key, precision) * scale
        if narrow
        else attention_scores(query * scale, key, precision)
    )
    if bias is not None:
        scores += bias
    # After the bias, so that no bias makes a hidden key visible.
    scores = jnp.where(visible, scores, MASKED_SCORE)
    # Dropout multiplies in float32, and the result is rounded once, for the matmul with values.
    probabilities = softmax_narrow(scores) if value.dtype == jnp.bfloat16 else jax.nn.softmax(scores, axis=-1)
    dropped = dropout(probabilities, options.dropout_rate, seeds, position_axes=2).astype(value.dtype)
    return jnp.einsum("bnqk,bknh->bqnh", dropped, value, precision=precision), probabilities


@jax.custom_vjp
def softmax_narrow(scores: Float[Array, "*shape K"]) -> Float[Array, "*shape K"]:
    """Computes softmax over the last axis in float32, and keeps only bfloat16 values for its backward pass."""
    return jax.nn.softmax(scores, axis=-1)


def _softmax_forward(scores: Array) -> tuple[Array, Array]:
    probabilities = softmax_narrow(scores)
    return probabilities, probabilities.astype(jnp.bfloat16)


def _softmax_backward(narrow: Array, gradient: Array) -> tuple[Array]:
    # The slope of the softmax, p (g - sum g p), with float32 sums.
    probabilities = narrow.astype(jnp.float32)
    return (probabilities * (gradient - (gradient * probabilities).sum(axis=-1, keepdims=True)),)


softmax_narrow.defvjp(_softmax_forward, _softmax_backward)


def attention_scores(
    query: Float[Array, "B Q N H"], key: Float[Array, "B T N H"], precision: jax.lax.Precision
) -> Float[Array, "B N Q T"]:
    """Multiplies queries and keys, in float32."""
    return jnp.einsum("bqnh,bknh->bnqk", query, key, precision=precision, preferred_element_type=jnp.float32)


scores_with_narrow_gradient = jax.custom_vjp(attention_scores, nondiff_argnums=(2,))


def _scores_forward(query: Array, key: Array, precision: jax.lax.Precision) -> tuple[Array, tuple[Array, Array]]:
    return attention_scores(query, key, precision), (query, key)


def _scores_backward(
    precision: jax.lax.Precision, factors: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    query, key = factors
    # Rounded before both matmuls, which then read half of the bytes.
    gradient = gradient.astype(query.dtype)
    query_gradient = jnp.einsum("bnqk,bknh->bqnh", gradient, key, precision=precision)
    return query_gradient, jnp.einsum("bnqk,bqnh->bknh", gradient, query, precision=precision)


scores_with_narrow_gradient.defvjp(_scores_forward, _scores_backward)


def banded_attention(
    heads: Heads, sequence_ids: Int[Array, "B T"], seeds: Seeds, options: KernelOptions
) -> Float[Array, "B T N H"]:
    """Computes einsum_attention in layers with a window, for any T.

    Rows are divided into blocks, and a block's queries attend to the keys of three blocks (causal: two), as in
    Longformer (Beltagy et al. 2020, appendix A): work and memory grow with T times the window, not with T squared.
    Dropout uses other random bits than einsum_attention. Scores and softmax are float32.
    """
    block, length = band_block(options.window), sequence_ids.shape[1]
    missing = -length % block
    sides = 1 if options.causal else 2  # neighboring blocks: before and after

    def blocks(rows: Array, fill: int = 0) -> Array:
        padded = jnp.pad(rows, [(0, 0), (0, missing)] + [(0, 0)] * (rows.ndim - 2), constant_values=fill)
        return padded.reshape(rows.shape[0], -1, block, *rows.shape[2:])

    def with_neighbors(cut: Array, fill: int = 0) -> Array:
        # A block before the first and, unless causal, one after the last: shifted copies then put every block next to
        # its neighbors.
        around = [(0, 0), (1, sides - 1)] + [(0, 0)] * (cut.ndim - 2)
        padded, count = jnp.pad(cut, around, constant_values=fill), cut.shape[1]
        shifted = [jax.lax.slice_in_dim(padded, first, first + count, axis=1) for first in range(sides + 1)]
        return jnp.concatenate(shifted, axis=2)

    query = blocks(heads[0] * (1.0 / math.sqrt(heads[0].shape[-1])))
    key, value = (with_neighbors(blocks(part)) for part in heads[1:])
    # No sequence has the id -1, so padding of the row sees and is seen by nothing else.
    sequences = blocks(sequence_ids, fill=-1)
    visible = sequences[:, :, :, None] == with_neighbors(sequences, fill=-1)[:, :, None, :]
    # Distances are the same in all blocks, so this mask is a constant of the program.
    ahead = np.arange(-block, sides * block)[None, :] - np.arange(block)[:, None]
    within = (np.abs(ahead) <= options.window) & (ahead <= 0 if options.causal else True)
    visible &= jnp.asarray(within)[None, None]
    scores = jnp.einsum(
        "bcqnh,bcknh->bcnqk", query, key, precision=options.precision, preferred_element_type=jnp.float32
    )
    probabilities = jax.nn.softmax(jnp.where(visible[:, :, None], scores, MASKED_SCORE), axis=-1)
    dropped = dropout(probabilities, options.dropout_rate, seeds).astype(value.dtype)
    context = jnp.einsum("bcnqk,bcknh->bcqnh", dropped, value, precision=options.precision)
    return context.reshape(context.shape[0], -1, *context.shape[3:])[:, :length]


def cudnn_attention(heads: Heads, visible: Bool[Array, "B 1 Q T"], options: KernelOptions) -> Float[Array, "B Q N H"]:
    """Computes einsum_attention without dropout, by cuDNN's fused kernel, for any Q and T."""
    queries, length = visible.shape[2:]
    # In training with a mask cuDNN takes even Q and T only. No query sees the key that this adds, and the query that it
    # adds sees everything.
    query, key, value = map(_even, heads)
    visible = jnp.pad(visible, ((0, 0), (0, 0), (0, 0), (0, length % 2)))
    visible = jnp.pad(visible, ((0, 0), (0, 0), (0, queries % 2), (0, 0)), constant_values=True)
    library: Literal["xla", "cudnn"] = "xla" if options.interpret else "cudnn"
    return jax.nn.dot_product_attention(query, key, value, mask=visible, implementation=library)[:, :queries]


def cudnn_attention_by_length(
    heads: Heads, lengths: Int[Array, "B"], options: KernelOptions
) -> Float[Array, "B Q N H"]:
    """Computes einsum_attention without dropout for unpacked rows, whose queries see the first `lengths` keys.

    If causal, Q is T. cuDNN reads the lengths instead of a mask, so neither pass has a T x T array. Queries in padding
    see the same keys, whereas in einsum_attention they see padding; nothing else depends on them.
    """

    def attend(query: Array, key: Array, value: Array, lengths: Array) -> Array:
        query, key, value = map(_even, (query, key, value))  # no length reaches the keys that this adds
        # Under jax.vmap (several seeds), jax before 0.11.1 wants both lengths mapped, and over their first axis: the
        # lengths of all queries are computed from the others, and a reshape moves a mapped axis to the front.
        lengths = jax.lax.reshape(lengths[None], lengths.shape)
        # cuDNN could skip the queries of padding, but what it then writes is not documented. A NaN there would reach
        # other positions in the next layer, as a value with the weight 0.
        queries = jnp.where(lengths > 0, query.shape[1], lengths)
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            query_seq_lengths=queries,
            key_value_seq_lengths=lengths,
            is_causal=options.causal,
            implementation="xla" if options.interpret else "cudnn",
        )[:, : heads[0].shape[1]]

    # jax's own partitioning of the kernel leaves the sharding of the lengths to the compiler, and rows with the lengths
    # of others would be wrong.
    return options.placement.shard_kernel(attend, ("heads", "heads", "heads", "lengths"))(*heads, lengths)


def _even(vectors: Float[Array, "B T N H"]) -> Float[Array, "B even N H"]:
    return jnp.pad(vectors, ((0, 0), (0, vectors.shape[1] % 2), (0, 0), (0, 0)))


_LANES = 128  # splash takes multiples of this number of positions
_LARGEST_BLOCK = 512


def splash_attention(
    heads: Heads, sequence_ids: Int[Array, "B T"], seeds: Seeds, options: KernelOptions
) -> Float[Array, "B T N H"]:
    """Computes einsum_attention without dropout, by the splash kernel of jax.experimental.pallas, for any T.

    Blocks outside the window are skipped.
    """
    # Imported here, since the import takes a second.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    window = options.window
    length = _LANES * -(-sequence_ids.shape[1] // _LANES)

    def attend(query: Array, key: Array, value: Array, sequences: Array) -> Array:
        mask: Any
        if window:
            mask = masks.LocalMask((length, length), (window, 0 if options.causal else window), 0)
        else:
            mask = (masks.CausalMask if options.causal else masks.FullMask)((length, length))
        block = next(size for size in range(_LARGEST_BLOCK, 0, -_LANES) if length % size == 0)
        # With one block the fused backward pass needs five matmuls instead of seven; with more it stores a sum for
        # each.
        fused = block == length
        # Half a block of queries sees two blocks of keys through a narrow window, and a whole block three. In short
        # rows, or with smaller blocks of keys, more steps cost more than it saves
        # (docs/decisions/model_and_attention.md).
        halved = block == _LARGEST_BLOCK and length > 4 * block and 0 < window <= block // 2
        queries = block // 2 if halved else block
        # Heads that do not fill the lanes are padded in memory unless positions are the last axis.
        layout = kernels.QKVLayout.SEQ_MINOR if query.shape[3] % _LANES else kernels.QKVLayout.HEAD_DIM_MINOR
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
            masks.MultiHeadMask([mask] * query.shape[2]), block_sizes=sizes, interpret=options.interpret
        )
        by_head = [part.transpose(0, 2, 1, 3) for part in (query, key, value)]
        context = jax.vmap(kernel)(*by_head, kernels.SegmentIds(sequences, sequences))
        return context.transpose(0, 2, 1, 3)

    query, key, value = heads
    # The splash kernel does not scale scores itself.
    scaled = query * (1.0 / math.sqrt(query.shape[-1])), key, value
    return run_padded(attend, scaled, sequence_ids, length, None, options)


def run_padded(
    attend: Callable[..., Array],
    heads: Heads,
    sequence_ids: Int[Array, "B T"],
    padded_length: int,
    seeds: Seeds,
    options: KernelOptions,
) -> Float[Array, "B T N H"]:
    """Runs a Pallas kernel on padded rows, each device on its shard of the rows and heads.

    Args:
        attend: called with query, key, value and sequence ids, and with the words of the dropout mask [B, T, N, 2] if
            it drops out.
    """
    rows, length, count, _ = heads[0].shape
    missing = ((0, 0), (0, padded_length - length), (0, 0), (0, 0))
    arguments = [jnp.pad(part, missing) for part in heads]
    # No sequence has the id -1, so the filler sees only itself.
    arguments.append(jnp.pad(sequence_ids, missing[:2], constant_values=-1))
    names = ["heads", "heads", "heads", "sequence_ids"]
    if seeds is not None and options.dropout_rate > 0:
        # Computed outside, where the numbers of rows and heads are those of the whole array.
        words = jnp.stack(line_words(seeds, (rows, count, length, length), position_axes=2), axis=-1)
        arguments.append(jnp.pad(words.transpose(0, 2, 1, 3), missing))
        names.append("heads")
    return options.placement.shard_kernel(attend, names)(*arguments)[:, :length]
