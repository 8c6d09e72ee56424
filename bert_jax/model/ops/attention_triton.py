"""Attention with dropout by Pallas kernels for NVIDIA GPUs that never store the scores (Dao et al. 2022; Dao 2023).

As those for TPUs (attention_flash.py), the kernels drop exactly the probabilities that einsum_attention drops. They
read heads where the projections write them, [B, T, N, H]. A row of up to 128 positions is one block, for which the
backward pass is one kernel with five matmuls. Longer rows have two backward kernels, one of which computes the gradient
of a block of queries, the other those of a block of keys and values.

On an H200 their outputs and gradients equal those of einsum, and BERT-Base trains 1.09 (T=128) and 1.16 times (T=512)
as fast as with it. Other tests run them in interpret mode on a CPU. jax 0.11 calls Pallas's Triton backend deprecated.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from bert_jax.model.dropout import line_words
from bert_jax.model.placement import Placement

LEAST_BLOCK = 16  # the smallest tile of a matmul in Triton
WHOLE_ROW = 128  # rows of up to this many positions are one block
BLOCK = 64  # positions of a block of longer rows
HEAD_WIDTHS = (16, 32, 64, 128)
HOPPER, TIMED_WIDTH = "9.0", 64  # the compute capability and the head width for which the kernels were timed


@dataclass(frozen=True)
class Grid:
    """The shape of a row for the kernels, whose grid has a cell for each row, head and block of positions."""

    width: int
    length: int  # a multiple of the block
    window: int = 0
    causal: bool = False
    dropout_rate: float = 0.0
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT
    interpret: bool = False

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return 1.0 / math.sqrt(self.width)

    @property
    def block(self) -> int:
        return self.length if self.length <= WHOLE_ROW else BLOCK

    @property
    def blocks(self) -> int:
        return self.length // self.block


def padded_length(length: int) -> int:
    """Returns the positions of a row for the kernels: Triton takes powers of two."""
    if length <= WHOLE_ROW:
        return max(LEAST_BLOCK, 2 ** (length - 1).bit_length())
    return -(-length // BLOCK) * BLOCK


def triton_attention(
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
    placement: Placement,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Computes einsum_attention with the same dropout. A window of 0 means none; no block outside it is skipped.

    Scores and softmax are float32, and matmuls accumulate in float32. Each device computes its shard of the rows and
    heads, as placement.shard_kernel gives it. `interpret` runs the kernels on any platform, slowly, for tests.
    """
    rows, length, heads, width = query.shape
    missing = padded_length(length) - length
    padded = [jnp.pad(part, ((0, 0), (0, missing), (0, 0), (0, 0))) for part in (query, key, value)]
    # No sequence has the id -1, so the filler sees only itself.
    arguments = [*padded, jnp.pad(sequence_ids, ((0, 0), (0, missing)), constant_values=-1)]
    names = ["heads", "heads", "heads", "sequence_ids"]
    if seeds is not None and dropout_rate > 0:
        # Computed outside, where the numbers of rows and heads are those of the whole array.
        words = jnp.stack(line_words(seeds, (rows, heads, length, length), position_axes=2), axis=-1)
        arguments.append(jnp.pad(words.transpose(0, 2, 1, 3), ((0, 0), (0, missing), (0, 0), (0, 0))))
        names.append("heads")
    else:
        dropout_rate = 0.0

    def attend(query: Array, key: Array, value: Array, sequences: Array, *words: Array) -> Array:
        grid = Grid(width, query.shape[1], window, causal, dropout_rate, precision, interpret)
        of_lines = words[0].transpose(0, 2, 3, 1) if words else None
        return _attend(grid, query, key, value, sequences, of_lines)

    return placement.shard_kernel(attend, names)(*arguments)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    grid: Grid,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T N H"],
    value: Float[Array, "B T N H"],
    sequences: Int[Array, "B T"],
    words: UInt32[Array, "B N 2 T"] | None,
) -> Float[Array, "B T N H"]:
    return _forward(grid, query, key, value, sequences, words)[0]


def _forward(grid: Grid, *arguments: Any) -> tuple[Array, tuple[Any, ...]]:
    # Imported here, since the import of Pallas takes a second.
    from bert_jax.model.ops import attention_triton_kernels as kernels

    context, logsumexp = kernels.forward(grid, *arguments)
    return context, (*arguments, context, logsumexp)


def _backward(grid: Grid, kept: tuple[Any, ...], gradient: Array) -> tuple[Any, ...]:
    from bert_jax.model.ops import attention_triton_kernels as kernels

    arguments = (*kept, gradient)
    return (*kernels.backward(grid, *arguments), None, None)


_attend.defvjp(_forward, _backward)
