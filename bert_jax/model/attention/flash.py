"""Attention with dropout for TPUs by Pallas kernels that never store the scores (Dao et al. 2022; Dao 2023).

They drop exactly the probabilities that einsum_attention drops, by the hash of dropout.py. Arrays of heads are
[B, N, H, T]: with positions last, heads narrower than a register's 128 lanes are not padded. Scores are transposed,
[keys, queries], so that per-query values (largest score, sum, words of the dropout mask) are a line of lanes.

Nobody has run the kernels on a TPU, so they only run on request. They are tested in interpret mode on a CPU, and libtpu
compiled them for TPU v4, v5e, v5p, v6e and tpu7x. Read FlashGrid first: it divides the work; then the two kernels.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt32

from bert_jax.errors import UserError
from bert_jax.model.attention.kernels import FIRST, FIRST_OF_SECOND, LAST, MASKED_SCORE, Grid, KernelOptions, run_padded
from bert_jax.model.dropout import Seeds
from bert_jax.model.ops import Heads

LANES = 128  # the kernels take multiples of this number of positions
LARGEST_BLOCK = 512
# Scores of the heads of a cell. They are 1 MiB in float32, and the backward kernel has several arrays of their size.
SCORES_PER_CELL = LARGEST_BLOCK**2
# Elements of the query gradient of a cell's heads, over the whole row. With T=8,192 and H=64 there is one such head.
GRADIENT_PER_CELL = 8192 * 64
# Rows are limited since the backward kernel has the query gradient of a whole row in on-chip memory.
LARGEST_ROW = 2 * GRADIENT_PER_CELL


class FlashGrid(Grid):
    """Divides one device's attention into the cells of a kernel's grid.

    A cell is one row, some heads, a query block and a key block. `steps` cells share one (the forward kernel's query
    block, the backward kernel's key block), and sums over these cells stay in on-chip memory. Methods take and return
    block numbers in a row; with `of_queries` the shared block has queries.
    """

    @property
    def block(self) -> int:
        """Positions of a block. Blocks are hardly longer than the window, so that more of them can be skipped."""
        sizes = [size for size in range(LANES, LARGEST_BLOCK + 1, LANES) if self.length % size == 0]
        return next((size for size in sizes if 0 < self.window <= size), sizes[-1])

    @property
    def heads_per_cell(self) -> int:
        """Short rows have several heads in a cell, since starting a cell takes time, too."""
        # Both limits are for on-chip memory. The number divides the heads, so that all cells have equally many.
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
        # If the steps cover the whole row, each is simply a block. Otherwise the first step is `reach` blocks before
        # the shared block, or at it if only queries at and after a key can see it.
        if self.steps == self.blocks:
            return step
        return shared + step - (0 if self.causal and not of_queries else self.reach)

    def fetched(self, shared: Any, step: Any, of_queries: bool) -> Any:
        """Returns the block that a step reads: if nothing in `other` is visible, the nearest with something visible."""
        # A cell whose block does not exist computes nothing, but its reads still need an index. The nearest block is
        # one that the cell before or after reads, too.
        first = shared if self.causal and not of_queries else 0
        last = shared if self.causal and of_queries else self.blocks - 1
        return jnp.clip(self.other(shared, step, of_queries), first, last)

    def visible(self, queries: Any, keys: Any) -> Any:
        """Whether any query in one block sees a key in another, judging by positions."""
        if self.blocks == 1:
            return True
        near = (queries >= 0) & (queries < self.blocks) & (keys >= 0) & (keys < self.blocks)
        near &= abs(queries - keys) <= self.reach
        return near & (keys <= queries) if self.causal else near


Lanes = Float[Array, "B N H T"]
Ids = Int[Array, "B 1 T"]
Words = UInt32[Array, "B N 2 T"]  # of each query's dropout mask


def flash_attention(
    heads: Heads, sequence_ids: Int[Array, "B T"], seeds: Seeds, options: KernelOptions
) -> Float[Array, "B T N H"]:
    """Computes einsum_attention with the same dropout; blocks outside the window are skipped.

    Scores and softmax are float32, and matmuls accumulate in float32.

    Raises:
        UserError: T times H exceeds LARGEST_ROW.
    """
    length, width = heads[0].shape[1], heads[0].shape[3]
    if length * width > LARGEST_ROW:
        raise UserError(
            f"config.model.attention=flash takes rows of up to {LARGEST_ROW // width:,} positions with heads of "
            f"{width}, got {length:,}. Use config.model.attention=auto"
        )

    def attend(query: Array, key: Array, value: Array, sequences: Array, *words: Array) -> Array:
        grid = FlashGrid(**vars(options), heads=query.shape[2], width=width, length=query.shape[1])
        # [B, T, N, H] becomes [B, N, H, T], with positions in the lanes.
        by_head = (part.transpose(0, 2, 3, 1) for part in (query, key, value))
        by_line = words[0].transpose(0, 2, 3, 1) if words else None
        return _attend(grid, *by_head, sequences[:, None], by_line).transpose(0, 3, 1, 2)

    return run_padded(attend, heads, sequence_ids, LANES * -(-length // LANES), seeds, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(grid: FlashGrid, query: Lanes, key: Lanes, value: Lanes, sequences: Ids, words: Words | None) -> Lanes:
    return _forward(grid, query, key, value, sequences, words)[0]


def _forward(
    grid: FlashGrid, query: Lanes, key: Lanes, value: Lanes, sequences: Ids, words: Words | None
) -> tuple[Lanes, tuple[Any, ...]]:
    """Returns the context and the residuals, which include each query's log-sum-exp."""
    specs = _specs(grid, of_queries=True)
    heads, block = grid.heads_per_cell, grid.block
    # A value for each query, [B, N, 1, T], so that queries are in the lanes as in the scores.
    statistic = jax.ShapeDtypeStruct((query.shape[0], grid.heads, 1, grid.length), jnp.float32)
    context, logsumexp = pl.pallas_call(
        functools.partial(_forward_kernel, grid),
        grid=(query.shape[0], grid.heads // heads, grid.blocks, grid.steps),
        in_specs=[specs["query_ids"], specs["key_ids"], words if words is None else specs["words"]]
        + [specs["query"], specs["key"], specs["key"]],
        out_specs=[specs["query"], specs["statistic"]],
        out_shape=[jax.ShapeDtypeStruct(query.shape, query.dtype), statistic],
        # The largest score and the total of each query, and the weighted sum of values.
        scratch_shapes=[pltpu.VMEM((heads, size, block), jnp.float32) for size in (1, 1, grid.width)],
        # Sums go from cell to cell along the last axis only.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=grid.interpret,
        name="flash_attention_forward",
    )(sequences, sequences, words, query, key, value)
    return context, (query, key, value, sequences, words, context, logsumexp)


def _backward(grid: FlashGrid, residuals: tuple[Any, ...], gradient: Lanes) -> tuple[Lanes | None, ...]:
    query, key, value, sequences, words, context, logsumexp = residuals
    specs = _specs(grid, of_queries=False)
    heads, block, width = grid.heads_per_cell, grid.block, grid.width
    # The queries' gradient is one block for the whole row, because every block of keys adds to all of it.
    whole = pl.BlockSpec((None, heads, width, grid.length), lambda row, heads, own, step: (row, heads, 0, 0))
    scratch = [(grid.blocks, heads, width, block), (heads, width, block), (heads, width, block)]
    gradients = pl.pallas_call(
        functools.partial(_backward_kernel, grid),
        grid=(query.shape[0], grid.heads // heads, grid.blocks, grid.steps),
        in_specs=[specs["query_ids"], specs["key_ids"], words if words is None else specs["words"]]
        + [specs["query"], specs["key"], specs["key"], specs["query"], specs["statistic"], specs["query"]],
        out_specs=[whole, specs["key"], specs["key"]],
        out_shape=[jax.ShapeDtypeStruct(part.shape, part.dtype) for part in (query, key, value)],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        # The query gradient is a sum over the blocks of keys, so these cells run in order.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")),
        interpret=grid.interpret,
        name="flash_attention_backward",
    )(sequences, sequences, words, query, key, value, context, logsumexp, gradient)
    return *gradients, None, None


_attend.defvjp(_forward, _backward)


def _forward_kernel(grid: FlashGrid, *arrays: Any) -> None:
    """Adds a key block to the softmax and the weighted sum of a query block (Milakov and Gimelshein 2018)."""
    query_ids, key_ids, words, query, key, value, context, logsumexp, *sums = arrays
    largest, total, weighted = sums  # over the blocks of keys
    queries, step = pl.program_id(2), pl.program_id(3)
    keys = grid.other(queries, step, of_queries=True)

    @pl.when(step == 0)
    def _() -> None:
        # MASKED_SCORE and not -inf, whose difference from itself is NaN. If a query sees nothing in its first blocks,
        # their weights are exp(0) = 1, and `shrink` makes them 0 at the first key that it sees.
        largest[...] = jnp.full(largest.shape, MASKED_SCORE, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        weighted[...] = jnp.zeros(weighted.shape, jnp.float32)

    @pl.when(grid.visible(queries, keys))
    def _() -> None:
        visible, index = _visible(grid, query_ids[...], key_ids[...], queries, keys), _key_index(grid, keys)
        for head in range(grid.heads_per_cell):
            drop = grid.dropout(_head_words(words, head), index)
            scores = jnp.where(visible, grid.matmul(key[head], query[head] * grid.scale, FIRST), MASKED_SCORE)
            before = largest[head]
            after = jnp.maximum(before, scores.max(axis=0, keepdims=True))
            shrink, weights = jnp.exp(before - after), jnp.exp(scores - after)
            largest[head] = after
            # Dropout zeroes weights of the sum, and leaves the total that divides it.
            total[head] = total[head] * shrink + weights.sum(axis=0, keepdims=True)
            dropped = drop(weights).astype(value.dtype)
            weighted[head] = weighted[head] * shrink + grid.matmul(value[head], dropped, FIRST_OF_SECOND)

    @pl.when(step == grid.steps - 1)
    def _() -> None:
        context[...] = (weighted[...] / (total[...] * (1.0 - grid.dropout_rate))).astype(context.dtype)
        # One number a query is all that the backward kernel needs to compute the probabilities again.
        logsumexp[...] = largest[...] + jnp.log(total[...])


def _backward_kernel(grid: FlashGrid, *arrays: Any) -> None:
    """Adds the contributions of a query block and a key block to the three gradients (Dao 2023, algorithm 2).

    Scores and masks are recomputed. The factor of dropout is left to the end, where the sums are smaller.
    """
    query_ids, key_ids, words, query, key, value, context, logsumexp, gradient, *results = arrays
    query_gradient, key_gradient, value_gradient, query_sums, key_sums, value_sums = results
    keys, step = pl.program_id(2), pl.program_id(3)
    queries = grid.other(keys, step, of_queries=False)
    kept_share = 1.0 - grid.dropout_rate

    @pl.when((keys == 0) & (step == 0))
    def _() -> None:
        query_sums[...] = jnp.zeros(query_sums.shape, jnp.float32)

    @pl.when(step == 0)
    def _() -> None:
        key_sums[...] = jnp.zeros(key_sums.shape, jnp.float32)
        value_sums[...] = jnp.zeros(value_sums.shape, jnp.float32)

    @pl.when(grid.visible(queries, keys))
    def _() -> None:
        visible, index = _visible(grid, query_ids[...], key_ids[...], queries, keys), _key_index(grid, keys)
        for head in range(grid.heads_per_cell):
            drop = grid.dropout(_head_words(words, head), index)
            scaled = query[head] * grid.scale
            scores = jnp.where(visible, grid.matmul(key[head], scaled, FIRST), MASKED_SCORE)
            probabilities = jnp.exp(scores - logsumexp[head])
            # Values saw the dropped probabilities; the gradient of the softmax below has those before dropout.
            value_sums[head] += grid.matmul(gradient[head], drop(probabilities).astype(value.dtype), LAST)
            slopes = drop(grid.matmul(value[head], gradient[head], FIRST))
            products = context[head].astype(jnp.float32) * gradient[head].astype(jnp.float32)
            # The sum over keys of probability times slope equals context times gradient. The context is divided by
            # kept_share and the slopes are not, hence the factor.
            average = products.sum(axis=0, keepdims=True) * kept_share
            score_gradient = (probabilities * (slopes - average)).astype(key.dtype)
            key_sums[head] += grid.matmul(scaled, score_gradient, LAST)
            query_sums[queries, head] += grid.matmul(key[head], score_gradient, FIRST_OF_SECOND)

    @pl.when(step == grid.steps - 1)
    def _() -> None:
        key_gradient[...] = (key_sums[...] / kept_share).astype(key_gradient.dtype)
        value_gradient[...] = (value_sums[...] / kept_share).astype(value_gradient.dtype)

    @pl.when((keys == grid.blocks - 1) & (step == grid.steps - 1))
    def _() -> None:
        # Written once, after the last block of keys has added its share.
        for block in range(grid.blocks):
            positions = slice(block * grid.block, (block + 1) * grid.block)
            gradients = query_sums[block] * (grid.scale / kept_share)
            query_gradient[:, :, positions] = gradients.astype(query_gradient.dtype)


def _visible(grid: FlashGrid, query_ids: Array, key_ids: Array, queries: Any, keys: Any) -> Array:
    """Returns which keys are visible to which queries of two blocks, [K, Q]."""
    column = jnp.broadcast_to(key_ids, (LANES, grid.block)).T[:, :1]
    visible = column == query_ids
    if not (grid.window or grid.causal):
        return visible
    # Distances from queries to keys: between the blocks, and within them.
    position = functools.partial(jax.lax.broadcasted_iota, jnp.int32, visible.shape)
    return grid.limit(visible, (keys - queries) * grid.block + position(0) - position(1))


def _key_index(grid: FlashGrid, keys: Any) -> Array:
    """Returns the row positions of a block's keys, [K, Q]."""
    # The mask's index counts from the row's first key, so that it is einsum's, whatever the blocks are.
    index = jax.lax.broadcasted_iota(jnp.int32, (grid.block, grid.block), 0) + keys * grid.block
    return index.astype(jnp.uint32)


def _head_words(words: Any, head: int) -> tuple[Array, Array] | None:
    return None if words is None else (words[head, 0:1], words[head, 1:2])


def _specs(grid: FlashGrid, of_queries: bool) -> dict[str, pl.BlockSpec]:
    """Returns the blocks that a cell reads or writes; the forward kernel has of_queries (FlashGrid)."""

    def shared(own: Any, step: Any) -> Any:
        return own

    other = functools.partial(grid.fetched, of_queries=of_queries)
    # A cell keeps one block, and its steps read the blocks of the other kind.
    queries, keys = (shared, other) if of_queries else (other, shared)

    # Index maps give block numbers, not positions: (row, group of heads, 0, block of positions).
    def heads(size: int, block: Any) -> pl.BlockSpec:
        shape = (None, grid.heads_per_cell, size, grid.block)
        return pl.BlockSpec(shape, lambda row, heads, own, step: (row, heads, 0, block(own, step)))

    def ids(block: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, 1, grid.block), lambda row, heads, own, step: (row, 0, block(own, step)))

    return {
        "query": heads(grid.width, queries),
        "key": heads(grid.width, keys),
        "words": heads(2, queries),
        "statistic": heads(1, queries),
        "query_ids": ids(queries),
        "key_ids": ids(keys),
    }
