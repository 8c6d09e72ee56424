"""Attention with dropout for NVIDIA GPUs by Pallas kernels that never store the scores (Dao et al. 2022; Dao 2023).

Like those for TPUs (flash.py), they drop exactly the probabilities that einsum_attention drops. They read heads where
the projections write them, [B, T, N, H]. A row of up to 128 positions is one block, for which the backward pass is one
kernel with five matmuls. Longer rows have two backward kernels: one for queries, one for keys and values.

A cell of a kernel's grid has one row, one head and one query block, or in the kernel of their gradients one key block.
It loops over the blocks of the other kind. Scores are [queries, keys] of two blocks.

On an H200 outputs and gradients equal those of einsum, and BERT-Base trains 1.09 (T=128) and 1.16 times (T=512) as fast
(docs/plan.md). Tests run the kernels in interpret mode on a CPU. jax 0.11 calls Pallas's Triton backend deprecated.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int, UInt32

from bert_jax.model.attention.choice import TRITON_BLOCK, TRITON_WHOLE_ROW, triton_length
from bert_jax.model.attention.kernels import FIRST, FIRST_OF_SECOND, LAST, MASKED_SCORE, Grid, KernelOptions, run_padded
from bert_jax.model.dropout import Seeds
from bert_jax.model.ops import Heads


class TritonGrid(Grid):
    """The kernels' grid, with a cell for each row, head and block of positions."""

    @property
    def block(self) -> int:
        return self.length if self.length <= TRITON_WHOLE_ROW else TRITON_BLOCK


Ids = Int[Array, "B T"]
Lines = Float[Array, "B T N H"]
Words = UInt32[Array, "B N 2 T"]  # of each query's dropout mask


def triton_attention(heads: Heads, sequence_ids: Ids, seeds: Seeds, options: KernelOptions) -> Float[Array, "B T N H"]:
    """Computes einsum_attention with the same dropout; no block outside the window is skipped.

    Scores and softmax are float32, and matmuls accumulate in float32.
    """

    def attend(query: Array, key: Array, value: Array, sequences: Array, *words: Array) -> Array:
        _, length, count, width = query.shape
        grid = TritonGrid(**vars(options), heads=count, width=width, length=length)
        # Words come as [B, T, N, 2] and are read by line, [B, N, 2, T].
        by_line = words[0].transpose(0, 2, 3, 1) if words else None
        return _attend(grid, query, key, value, sequences, by_line)

    return run_padded(attend, heads, sequence_ids, triton_length(sequence_ids.shape[1]), seeds, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(grid: TritonGrid, query: Lines, key: Lines, value: Lines, sequences: Ids, words: Words | None) -> Lines:
    return _forward(grid, query, key, value, sequences, words)[0]


class Queries(NamedTuple):
    """A block of queries with per-query metadata."""

    vectors: Array  # [Q, H]
    ids: Array  # [Q], of sequences
    words: tuple[Array, Array] | None  # [Q] each, of the dropout mask
    first: Any  # the position of the first


class Keys(NamedTuple):
    """A block of keys and values."""

    vectors: Array  # [K, H]
    values: Array  # [K, H]
    ids: Array  # [K]
    first: Any


def _forward(
    grid: TritonGrid, query: Lines, key: Lines, value: Lines, sequences: Ids, words: Words | None
) -> tuple[Lines, tuple[Any, ...]]:
    """Returns the context and the residuals, which include each query's log-sum-exp."""
    own, whole = _specs(grid)
    # One number a query (log-sum-exp), from which the backward kernels compute the probabilities again.
    statistic = jax.ShapeDtypeStruct((len(query), grid.heads, grid.length), jnp.float32)
    context, logsumexp = _call(
        grid,
        _forward_kernel,
        len(query),
        [own.heads, whole.heads, whole.heads, whole.ids, None if words is None else own.words],
        [own.heads, own.statistic],
        [jax.ShapeDtypeStruct(query.shape, query.dtype), statistic],
    )(query, key, value, sequences, words)
    return context, (query, key, value, sequences, words, context, logsumexp)


def _backward(grid: TritonGrid, residuals: tuple[Any, ...], gradient: Lines) -> tuple[Lines | None, ...]:
    query, key, value, sequences, words, context, logsumexp = residuals
    own, whole = _specs(grid)
    average = None
    if grid.blocks > 1:  # else the kernel has all scores of a query, and sums over them
        # The sum over keys of probability times slope, by context times gradient. The context is divided by the kept
        # share and the slopes are not, hence the factor.
        products = context.astype(jnp.float32) * gradient.astype(jnp.float32)
        average = products.sum(axis=-1).transpose(0, 2, 1) * (1.0 - grid.dropout_rate)
    like = jax.ShapeDtypeStruct(query.shape, query.dtype)

    def run(kernel: Any, queries: "_Specs", keys: "_Specs", results: int) -> Any:
        specs = [
            *(queries.heads, keys.heads, keys.heads, whole.ids),
            None if words is None else queries.words,
            queries.statistic,
            None if average is None else queries.statistic,
            queries.heads,
        ]
        call = _call(grid, kernel, len(query), specs, [own.heads] * results, [like] * results)
        return call(query, key, value, sequences, words, logsumexp, average, gradient)

    if grid.blocks == 1:
        gradients = run(_whole_kernel, own, own, 3)
    else:
        # A cell owns the block whose gradient it sums, so no two cells write to one place.
        gradients = [*run(_queries_kernel, own, whole, 1), *run(_keys_kernel, whole, own, 2)]
    return *gradients, None, None


_attend.defvjp(_forward, _backward)


def _forward_kernel(
    grid: TritonGrid, query: Any, key: Any, value: Any, sequences: Any, words: Any, context: Any, logsumexp: Any
) -> None:
    """Computes a block's context by a softmax over one block of keys after the other (Milakov and Gimelshein 2018)."""
    queries = _queries(grid, query[...], sequences, words, pl.program_id(2), 0)

    def add(number: Any, before: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        weighted, largest, total = before
        keys = _keys(grid, key, value, sequences, number, number)
        scores = _scores(grid, queries, keys)
        # MASKED_SCORE is finite: if a query sees nothing in its first blocks, their weights are exp(0) = 1, and
        # `shrink` makes them 0 at the first key that it sees.
        after = jnp.maximum(largest, scores.max(axis=1))
        shrink, weights = jnp.exp(largest - after), jnp.exp(scores - after[:, None])
        # Dropout zeroes weights of the sum, and leaves the total that divides it.
        dropped = _dropout(grid, queries, keys)(weights).astype(value.dtype)
        weighted = weighted * shrink[:, None] + grid.matmul(dropped, keys.values, FIRST_OF_SECOND)
        return weighted, after, total * shrink + weights.sum(axis=1)

    # The weighted sum of values, and each query's largest score and total.
    line = functools.partial(jnp.full, (grid.block,), dtype=jnp.float32)
    begin = jnp.zeros((grid.block, grid.width), jnp.float32), line(MASKED_SCORE), line(0.0)
    weighted, largest, total = _over_blocks(grid, add, begin)
    context[...] = (weighted / (total[:, None] * (1.0 - grid.dropout_rate))).astype(context.dtype)
    logsumexp[...] = largest + jnp.log(total)


def _whole_kernel(grid: TritonGrid, query: Any, key: Any, value: Any, sequences: Any, words: Any, *more: Any) -> None:
    """Computes all three gradients of a one-block row."""
    logsumexp, average, gradient, query_gradient, key_gradient, value_gradient = more
    queries = _queries(grid, query[...], sequences, words, 0, 0)
    keys = _keys(grid, key, value, sequences, 0, 0)
    slopes = gradient[...]
    dropped, score_gradient = _gradients(grid, queries, keys, logsumexp[...], average, slopes)
    # Scores have the scale, so the gradients of queries and keys get it here; that of values has none.
    _store(grid, query_gradient, grid.matmul(score_gradient, keys.vectors, FIRST_OF_SECOND), grid.scale)
    _store(grid, key_gradient, grid.matmul(score_gradient, queries.vectors, FIRST), grid.scale)
    _store(grid, value_gradient, grid.matmul(dropped, slopes, FIRST))


def _queries_kernel(grid: TritonGrid, query: Any, key: Any, value: Any, sequences: Any, words: Any, *more: Any) -> None:
    """Computes a query block's gradient."""
    logsumexp, average, gradient, query_gradient = more
    queries = _queries(grid, query[...], sequences, words, pl.program_id(2), 0)
    statistics = logsumexp[...], average[...], gradient[...]

    def add(number: Any, before: Array) -> Array:
        keys = _keys(grid, key, value, sequences, number, number)
        _, score_gradient = _gradients(grid, queries, keys, *statistics)
        return before + grid.matmul(score_gradient, keys.vectors, FIRST_OF_SECOND)

    sums = _over_blocks(grid, add, jnp.zeros((grid.block, grid.width), jnp.float32))
    _store(grid, query_gradient, sums, grid.scale)


def _keys_kernel(grid: TritonGrid, query: Any, key: Any, value: Any, sequences: Any, words: Any, *more: Any) -> None:
    """Computes the gradients for a key block and its values."""
    logsumexp, average, gradient, key_gradient, value_gradient = more
    keys = _keys(grid, key, value, sequences, pl.program_id(2), 0)

    def add(number: Any, before: tuple[Array, Array]) -> tuple[Array, Array]:
        # The cell has whole rows of queries, and takes one block of them at a time.
        place = pl.ds(number * grid.block, grid.block)
        queries = _queries(grid, query[place, :], sequences, words, number, number)
        slopes = gradient[place, :]
        dropped, score_gradient = _gradients(grid, queries, keys, logsumexp[place], average[place], slopes)
        key_sums = before[0] + grid.matmul(score_gradient, queries.vectors, FIRST)
        return key_sums, before[1] + grid.matmul(dropped, slopes, FIRST)

    zeros = jnp.zeros((grid.block, grid.width), jnp.float32)
    key_sums, value_sums = _over_blocks(grid, add, (zeros, zeros))
    _store(grid, key_gradient, key_sums, grid.scale)
    _store(grid, value_gradient, value_sums)


def _gradients(
    grid: TritonGrid, queries: Queries, keys: Keys, logsumexp: Array, average: Array | None, slopes: Array
) -> tuple[Array, Array]:
    """Returns the probabilities after dropout and the scores' gradient, [Q, K], both unscaled (Dao 2023, algorithm 2).

    logsumexp and average are [Q]; slopes, the context's gradient, are [Q, H]. If average is None, it is computed here
    from the keys, which are then the whole row.
    """
    drop = _dropout(grid, queries, keys)
    probabilities = jnp.exp(_scores(grid, queries, keys) - logsumexp[:, None])
    probability_gradient = drop(grid.matmul(slopes, keys.values, LAST))
    if average is None:
        # Both factors leave out the division by the kept share, which _store makes up for.
        average = (probability_gradient * probabilities).sum(axis=1)
    score_gradient = probabilities * (probability_gradient - average[:, None])
    return drop(probabilities).astype(slopes.dtype), score_gradient.astype(slopes.dtype)


def _scores(grid: TritonGrid, queries: Queries, keys: Keys) -> Array:
    """Returns the scaled and masked scores of two blocks."""
    visible = queries.ids[:, None] == keys.ids[None, :]
    if grid.window or grid.causal:
        positions = jnp.arange(grid.block)
        visible = grid.limit(visible, (keys.first + positions)[None, :] - (queries.first + positions)[:, None])
    return jnp.where(visible, grid.matmul(queries.vectors, keys.vectors, LAST) * grid.scale, MASKED_SCORE)


def _dropout(grid: TritonGrid, queries: Queries, keys: Keys) -> Callable[[Array], Array]:
    if queries.words is None:
        # Nothing is dropped, so the index does not matter.
        return grid.dropout(None, keys.ids)
    # Keys are numbered from the row's first position, so that the masks are einsum's.
    index = (keys.first + jnp.arange(grid.block)).astype(jnp.uint32)
    first, second = queries.words
    return grid.dropout((first[:, None], second[:, None]), index[None, :])


def _queries(grid: TritonGrid, vectors: Array, sequences: Any, words: Any, number: Any, read: Any) -> Queries:
    """Reads query block `number` of the row, whose words are block `read` of the cell."""
    first, place = number * grid.block, pl.ds(read * grid.block, grid.block)
    query_words = None if words is None else (words[0, place], words[1, place])
    return Queries(vectors, sequences[pl.ds(first, grid.block)], query_words, first)


def _keys(grid: TritonGrid, key: Any, value: Any, sequences: Any, number: Any, read: Any) -> Keys:
    """Reads key block `number` of the row, which is block `read` of the cell."""
    first, place = number * grid.block, pl.ds(read * grid.block, grid.block)
    return Keys(key[place, :], value[place, :], sequences[pl.ds(first, grid.block)], first)


def _over_blocks(grid: TritonGrid, add: Any, begin: Any) -> Any:
    return add(0, begin) if grid.blocks == 1 else jax.lax.fori_loop(0, grid.blocks, add, begin)


def _store(grid: TritonGrid, result: Any, sums: Array, factor: float = 1.0) -> None:
    # The factor of dropout, 1 / (1 - rate), comes here once per sum, in float32 and before rounding.
    result[...] = (sums * (factor / (1.0 - grid.dropout_rate))).astype(result.dtype)


class _Specs(NamedTuple):
    """The part of each array that a cell reads or writes."""

    heads: pl.BlockSpec
    statistic: pl.BlockSpec
    words: pl.BlockSpec
    ids: pl.BlockSpec


def _specs(grid: TritonGrid) -> tuple[_Specs, _Specs]:
    """Returns the parts for a cell's own block, and for the whole row."""

    def parts(length: int, block: Callable[[Any], Any]) -> _Specs:
        return _Specs(
            pl.BlockSpec((None, length, None, grid.width), lambda row, head, own: (row, block(own), head, 0)),
            pl.BlockSpec((None, None, length), lambda row, head, own: (row, head, block(own))),
            pl.BlockSpec((None, None, 2, length), lambda row, head, own: (row, head, 0, block(own))),
            pl.BlockSpec((None, length), lambda row, head, own: (row, block(own))),
        )

    return parts(grid.block, lambda own: own), parts(grid.length, lambda own: 0)


def _call(
    grid: TritonGrid, kernel: Any, rows: int, in_specs: Any, out_specs: Any, out_shape: Any
) -> Callable[..., Any]:
    return pl.pallas_call(
        functools.partial(kernel, grid),
        grid=(rows, grid.heads, grid.blocks),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        # Eight warps share the scores of a row of 128 positions, four those of two smaller blocks.
        compiler_params=triton.CompilerParams(num_warps=8 if grid.block > TRITON_BLOCK else 4, num_stages=1),
        interpret=grid.interpret,
        name=f"triton_attention{kernel.__name__}",
    )
