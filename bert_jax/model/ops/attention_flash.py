"""Attention with dropout by Pallas kernels for TPUs that never store the scores (Dao et al. 2022; Dao 2023).

The kernels drop exactly the probabilities that einsum_attention drops: the hash of dropout.py is computed inside
them. The backward kernel recomputes scores and masks from queries, keys and the logarithm of each query's sum.

Nobody has run the kernels on a TPU, so that they only run where they are requested. They are tested in interpret mode
on a CPU, and libtpu compiled them for TPU v4, v5e, v5p, v6e and tpu7x.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from bert_jax.command import UserError
from bert_jax.model.dropout import line_words
from bert_jax.model.placement import Placement

LANES = 128  # the kernels take multiples of this number of positions
LARGEST_BLOCK = 512
# Scores of the heads of a cell. They are 1 MiB in float32, and the backward kernel has several arrays of their size.
SCORES_PER_CELL = LARGEST_BLOCK**2
# Elements of the query gradient of a cell's heads, over the whole row. With T=8,192 and H=64 there is one such head.
GRADIENT_PER_CELL = 8192 * 64
# Rows are limited since the backward kernel has the query gradient of a whole row in on-chip memory.
LARGEST_ROW = 2 * GRADIENT_PER_CELL


@dataclass(frozen=True)
class Grid:
    """How the attention of one device is divided into the cells of a kernel's grid.

    A cell is one row, some heads, a block of queries and a block of keys. `steps` cells share a block, of queries in
    the forward kernel and of keys in the backward kernel, and sums over these cells stay in on-chip memory. Methods
    take and return the numbers of blocks in a row; with `of_queries` the shared block is one of queries.
    """

    heads: int
    width: int
    length: int
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
        """Positions of a block. Blocks are hardly longer than the window, so that more of them can be skipped."""
        sizes = [size for size in range(LANES, LARGEST_BLOCK + 1, LANES) if self.length % size == 0]
        return next((size for size in sizes if 0 < self.window <= size), sizes[-1])

    @property
    def blocks(self) -> int:
        return self.length // self.block

    @property
    def heads_per_cell(self) -> int:
        """Short rows have several heads in a cell, since starting a cell takes time, too."""
        most = min(SCORES_PER_CELL // self.block**2, GRADIENT_PER_CELL // (self.width * self.length))
        return max(part for part in range(1, max(most, 1) + 1) if self.heads % part == 0)

    @property
    def reach(self) -> int:
        """How many blocks away a visible key can be."""
        return math.ceil(self.window / self.block) if self.window else self.blocks

    @property
    def steps(self) -> int:
        return min((1 if self.causal else 2) * self.reach + 1, self.blocks)

    def other(self, shared: Any, step: Any, of_queries: bool) -> Any:
        """Returns the block that a step adds to the shared one. Near the ends of a row it may not exist."""
        if self.steps == self.blocks:
            return step
        return shared + step - (0 if self.causal and not of_queries else self.reach)

    def fetched(self, shared: Any, step: Any, of_queries: bool) -> Any:
        """Returns the block that a step reads: if nothing in `other` is visible, the nearest with something visible."""
        first = shared if self.causal and not of_queries else 0
        last = shared if self.causal and of_queries else self.blocks - 1
        return jnp.clip(self.other(shared, step, of_queries), first, last)

    def visible(self, queries: Any, keys: Any) -> Any:
        """Returns whether any query of a block sees a key of a block, as far as their positions show."""
        if self.blocks == 1:
            return True
        near = (queries >= 0) & (queries < self.blocks) & (keys >= 0) & (keys < self.blocks)
        near &= abs(queries - keys) <= self.reach
        return near & (keys <= queries) if self.causal else near


def flash_attention(
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
    """Computes einsum_attention with the same dropout. A window of 0 means none; blocks outside it are skipped.

    Scores and softmax are float32, and matmuls accumulate in float32. Each device computes its shard of the rows and
    heads, as placement.shard_kernel gives it. `interpret` runs the kernels on any platform, slowly, for tests.

    Raises UserError if T times H exceeds LARGEST_ROW.
    """
    rows, length, heads, width = query.shape
    if length * width > LARGEST_ROW:
        raise UserError(
            f"config.model.attention=flash takes rows of up to {LARGEST_ROW // width:,} positions with heads of "
            f"{width}, got {length:,}. Use config.model.attention=auto"
        )
    missing = -length % LANES
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
        grid = Grid(query.shape[2], width, query.shape[1], window, causal, dropout_rate, precision, interpret)
        by_head = (part.transpose(0, 2, 3, 1) for part in (query, key, value))
        of_lines = words[0].transpose(0, 2, 3, 1) if words else None
        return _attend(grid, *by_head, sequences[:, None], of_lines).transpose(0, 3, 1, 2)

    return placement.shard_kernel(attend, names)(*arguments)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    grid: Grid,
    query: Float[Array, "B N H T"],
    key: Float[Array, "B N H T"],
    value: Float[Array, "B N H T"],
    sequences: Int[Array, "B 1 T"],
    words: UInt32[Array, "B N 2 T"] | None,
) -> Float[Array, "B N H T"]:
    return _forward(grid, query, key, value, sequences, words)[0]


def _forward(grid: Grid, *arguments: Any) -> tuple[Array, tuple[Any, ...]]:
    # Imported here, since the import of Pallas takes a second.
    from bert_jax.model.ops import attention_flash_kernels as kernels

    context, logsumexp = kernels.forward(grid, *arguments)
    return context, (*arguments, context, logsumexp)


def _backward(grid: Grid, kept: tuple[Any, ...], gradient: Array) -> tuple[Any, ...]:
    from bert_jax.model.ops import attention_flash_kernels as kernels

    arguments = (*kept, gradient)
    return (*kernels.backward(grid, *arguments), None, None)


_attend.defvjp(_forward, _backward)
