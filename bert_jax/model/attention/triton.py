"""Attention with dropout for NVIDIA GPUs by Pallas kernels that never store the scores (Dao et al. 2022; Dao 2023).

Like those for TPUs (flash.py), they drop exactly the probabilities that einsum_attention drops. They read heads where
the projections write them, [B, T, N, H]. A row of up to 128 positions is one block, for which the backward pass is one
kernel with five matmuls. Longer rows have two backward kernels: one computes the gradient of a block of queries, the
other those of a block of keys and values.

A cell of a kernel's grid has one row, one head and one block of positions: of queries, or of keys in the kernel that
computes their gradients. It loops over the blocks of the other kind. Scores are [queries, keys] of two blocks.

On an H200 outputs and gradients equal those of einsum, and BERT-Base trains 1.09 (T=128) and 1.16 times (T=512) as fast
(docs/plan.md). Tests run the kernels in interpret mode on a CPU. jax 0.11 calls Pallas's Triton backend deprecated.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int, UInt32

from bert_jax.model.attention.choice import TRITON_BLOCK, TRITON_WHOLE_ROW, triton_length
from bert_jax.model.attention.kernels import MASKED_SCORE, run_padded
from bert_jax.model.dropout import element_bits, keeps
from bert_jax.model.runtime import Placement


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
        return self.length if self.length <= TRITON_WHOLE_ROW else TRITON_BLOCK

    @property
    def blocks(self) -> int:
        return self.length // self.block


Heads = Float[Array, "B T N H"]
Ids = Int[Array, "B T"]
Words = UInt32[Array, "B N 2 T"]  # of the dropout mask, of each query

# The axes that a matmul sums over.
FIRST, FIRST_OF_SECOND, LAST = ((0,), (0,)), ((1,), (0,)), ((1,), (1,))


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
    dropout_rate = 0.0 if seeds is None else dropout_rate

    def attend(query: Array, key: Array, value: Array, sequences: Array, *words: Array) -> Array:
        grid = Grid(query.shape[3], query.shape[1], window, causal, dropout_rate, precision, interpret)
        by_line = words[0].transpose(0, 2, 3, 1) if words else None
        return _attend(grid, query, key, value, sequences, by_line)

    padded_length = triton_length(query.shape[1])
    return run_padded(attend, (query, key, value), sequence_ids, padded_length, placement, dropout_rate, seeds)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(grid: Grid, query: Heads, key: Heads, value: Heads, sequences: Ids, words: Words | None) -> Heads:
    return _forward(grid, query, key, value, sequences, words)[0]


class Queries(NamedTuple):
    """A block of queries, with what each of them has one of."""

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
    grid: Grid, query: Heads, key: Heads, value: Heads, sequences: Ids, words: Words | None
) -> tuple[Heads, tuple[Any, ...]]:
    """Returns the context, and what the backward pass reads: all of this and each query's logarithm of its sum."""
    rows, _, heads, _ = query.shape
    own, whole = _specs(grid)
    statistic = jax.ShapeDtypeStruct((rows, heads, grid.length), jnp.float32)
    context, logsumexp = _call(
        grid,
        _forward_kernel,
        (rows, heads, grid.blocks),
        [own.heads, whole.heads, whole.heads, whole.ids, None if words is None else own.words],
        [own.heads, own.statistic],
        [jax.ShapeDtypeStruct(query.shape, query.dtype), statistic],
    )(query, key, value, sequences, words)
    return context, (query, key, value, sequences, words, context, logsumexp)


def _backward(grid: Grid, residuals: tuple[Any, ...], gradient: Heads) -> tuple[Heads | None, ...]:
    """Returns the gradients of queries, keys and values from that of the context."""
    query, key, value, sequences, words, context, logsumexp = residuals
    rows, _, heads, _ = query.shape
    own, whole = _specs(grid)
    average = None
    if grid.blocks > 1:  # else the kernel has all scores of a query, and sums over them
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
        call = _call(grid, kernel, (rows, heads, grid.blocks), specs, [own.heads] * results, [like] * results)
        return call(query, key, value, sequences, words, logsumexp, average, gradient)

    if grid.blocks == 1:
        query_gradient, key_gradient, value_gradient = run(_whole_kernel, own, own, 3)
    else:
        (query_gradient,) = run(_queries_kernel, own, whole, 1)
        key_gradient, value_gradient = run(_keys_kernel, whole, own, 2)
    return query_gradient, key_gradient, value_gradient, None, None


_attend.defvjp(_forward, _backward)


def _forward_kernel(
    grid: Grid, query: Any, key: Any, value: Any, sequences: Any, words: Any, context: Any, logsumexp: Any
) -> None:
    """Computes the context of a block of queries, by a softmax over one block of keys after the other.

    Dropout zeroes weights of the sum, and leaves the total that divides it (Milakov and Gimelshein 2018).
    """
    queries = _queries(grid, query[...], sequences, words, pl.program_id(2), 0)

    def add(number: Any, before: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        weighted, largest, total = before
        keys = _keys(grid, key, value, sequences, number, number)
        scores = _scores(grid, queries, keys)
        after = jnp.maximum(largest, scores.max(axis=1))
        shrink, weights = jnp.exp(largest - after), jnp.exp(scores - after[:, None])
        kept = _dropout(grid, queries, keys)(weights).astype(value.dtype)
        weighted = weighted * shrink[:, None] + _matmul(grid, kept, keys.values, FIRST_OF_SECOND)
        return weighted, after, total * shrink + weights.sum(axis=1)

    begin = jnp.zeros((grid.block, grid.width), jnp.float32), _line(grid, MASKED_SCORE), _line(grid, 0.0)
    weighted, largest, total = _over_blocks(grid, add, begin)
    context[...] = (weighted / (total[:, None] * (1.0 - grid.dropout_rate))).astype(context.dtype)
    logsumexp[...] = largest + jnp.log(total)


def _whole_kernel(grid: Grid, query: Any, key: Any, value: Any, sequences: Any, words: Any, *others: Any) -> None:
    """Computes all three gradients of a row that is one block."""
    logsumexp, average, gradient, query_gradient, key_gradient, value_gradient = others
    queries = _queries(grid, query[...], sequences, words, 0, 0)
    keys = _keys(grid, key, value, sequences, 0, 0)
    slopes = gradient[...]
    kept, of_scores = _gradients(grid, queries, keys, logsumexp[...], average, slopes)
    _store(grid, query_gradient, _matmul(grid, of_scores, keys.vectors, FIRST_OF_SECOND), grid.scale)
    _store(grid, key_gradient, _matmul(grid, of_scores, queries.vectors, FIRST), grid.scale)
    _store(grid, value_gradient, _matmul(grid, kept, slopes, FIRST))


def _queries_kernel(grid: Grid, query: Any, key: Any, value: Any, sequences: Any, words: Any, *others: Any) -> None:
    """Computes the gradient of a block of queries."""
    logsumexp, average, gradient, query_gradient = others
    queries = _queries(grid, query[...], sequences, words, pl.program_id(2), 0)
    statistics = logsumexp[...], average[...], gradient[...]

    def add(number: Any, before: Array) -> Array:
        keys = _keys(grid, key, value, sequences, number, number)
        _, of_scores = _gradients(grid, queries, keys, *statistics)
        return before + _matmul(grid, of_scores, keys.vectors, FIRST_OF_SECOND)

    sums = _over_blocks(grid, add, jnp.zeros((grid.block, grid.width), jnp.float32))
    _store(grid, query_gradient, sums, grid.scale)


def _keys_kernel(grid: Grid, query: Any, key: Any, value: Any, sequences: Any, words: Any, *others: Any) -> None:
    """Computes the gradients of a block of keys and of its values."""
    logsumexp, average, gradient, key_gradient, value_gradient = others
    keys = _keys(grid, key, value, sequences, pl.program_id(2), 0)

    def add(number: Any, before: tuple[Array, Array]) -> tuple[Array, Array]:
        place = pl.ds(number * grid.block, grid.block)
        queries = _queries(grid, query[place, :], sequences, words, number, number)
        slopes = gradient[place, :]
        kept, of_scores = _gradients(grid, queries, keys, logsumexp[place], average[place], slopes)
        of_keys = before[0] + _matmul(grid, of_scores, queries.vectors, FIRST)
        return of_keys, before[1] + _matmul(grid, kept, slopes, FIRST)

    zeros = jnp.zeros((grid.block, grid.width), jnp.float32)
    of_keys, of_values = _over_blocks(grid, add, (zeros, zeros))
    _store(grid, key_gradient, of_keys, grid.scale)
    _store(grid, value_gradient, of_values)


def _gradients(
    grid: Grid, queries: Queries, keys: Keys, logsumexp: Array, average: Array | None, slopes: Array
) -> tuple[Array, Array]:
    """Returns the probabilities that dropout keeps, and the gradient of the scores without their factor [Q, K].

    Both still lack the factor of dropout. logsumexp and average are [Q], and slopes, the gradient of the context, are
    [Q, H] (Dao 2023, algorithm 2). An average of None is computed here, for which the keys must be those of the row.
    """
    drop = _dropout(grid, queries, keys)
    probabilities = jnp.exp(_scores(grid, queries, keys) - logsumexp[:, None])
    of_probabilities = drop(_matmul(grid, slopes, keys.values, LAST))
    if average is None:
        average = (of_probabilities * probabilities).sum(axis=1)
    of_scores = probabilities * (of_probabilities - average[:, None])
    return drop(probabilities).astype(slopes.dtype), of_scores.astype(slopes.dtype)


def _scores(grid: Grid, queries: Queries, keys: Keys) -> Array:
    """Returns the scaled scores of two blocks, which are MASKED_SCORE where a query does not see a key."""
    visible = queries.ids[:, None] == keys.ids[None, :]
    if grid.window or grid.causal:
        positions = jnp.arange(grid.block)
        ahead = (keys.first + positions)[None, :] - (queries.first + positions)[:, None]
        if grid.window:
            visible &= jnp.abs(ahead) <= grid.window
        if grid.causal:
            visible &= ahead <= 0
    return jnp.where(visible, _matmul(grid, queries.vectors, keys.vectors, LAST) * grid.scale, MASKED_SCORE)


def _dropout(grid: Grid, queries: Queries, keys: Keys) -> Callable[[Array], Array]:
    """Returns a function that zeroes what dropout drops of a matrix [Q, K], and scales nothing."""
    if queries.words is None:
        return lambda matrix: matrix
    index = (keys.first + jnp.arange(grid.block)).astype(jnp.uint32)
    first, second = (word[:, None] for word in queries.words)
    kept = keeps(element_bits(index[None, :], first, second), grid.dropout_rate)
    return lambda matrix: jnp.where(kept, matrix, 0.0)


def _queries(grid: Grid, vectors: Array, sequences: Any, words: Any, number: Any, read: Any) -> Queries:
    """Returns a block of queries: `number` is that in the row, `read` that in the part of the words that a cell has."""
    first, place = number * grid.block, pl.ds(read * grid.block, grid.block)
    of_lines = None if words is None else (words[0, place], words[1, place])
    return Queries(vectors, sequences[pl.ds(first, grid.block)], of_lines, first)


def _keys(grid: Grid, key: Any, value: Any, sequences: Any, number: Any, read: Any) -> Keys:
    """Returns a block of keys: `number` is that in the row, `read` that in the part of the keys that a cell has."""
    first, place = number * grid.block, pl.ds(read * grid.block, grid.block)
    return Keys(key[place, :], value[place, :], sequences[pl.ds(first, grid.block)], first)


def _over_blocks(grid: Grid, add: Any, begin: Any) -> Any:
    return add(0, begin) if grid.blocks == 1 else jax.lax.fori_loop(0, grid.blocks, add, begin)


def _line(grid: Grid, value: float) -> Array:
    return jnp.full((grid.block,), value, jnp.float32)


def _store(grid: Grid, result: Any, sums: Array, factor: float = 1.0) -> None:
    result[...] = (sums * (factor / (1.0 - grid.dropout_rate))).astype(result.dtype)


def _matmul(grid: Grid, one: Array, other: Array, summed: tuple[tuple[int], tuple[int]]) -> Array:
    return jax.lax.dot_general(
        one, other, (summed, ((), ())), precision=grid.precision, preferred_element_type=jnp.float32
    )


class _Specs(NamedTuple):
    """The part of each array that a cell reads or writes."""

    heads: pl.BlockSpec
    statistic: pl.BlockSpec
    words: pl.BlockSpec
    ids: pl.BlockSpec


def _specs(grid: Grid) -> tuple[_Specs, _Specs]:
    """Returns the parts of a cell's own block, and those of the whole row."""

    def parts(length: int, block: Callable[[Any], Any]) -> _Specs:
        return _Specs(
            pl.BlockSpec((None, length, None, grid.width), lambda row, head, own: (row, block(own), head, 0)),
            pl.BlockSpec((None, None, length), lambda row, head, own: (row, head, block(own))),
            pl.BlockSpec((None, None, 2, length), lambda row, head, own: (row, head, 0, block(own))),
            pl.BlockSpec((None, length), lambda row, head, own: (row, block(own))),
        )

    return parts(grid.block, lambda own: own), parts(grid.length, lambda own: 0)


def _call(
    grid: Grid, kernel: Any, cells: tuple[int, ...], in_specs: Any, out_specs: Any, out_shape: Any
) -> Callable[..., Any]:
    return pl.pallas_call(
        functools.partial(kernel, grid),
        grid=cells,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        # Eight warps share the scores of a row of 128 positions, four those of two smaller blocks.
        compiler_params=triton.CompilerParams(num_warps=8 if grid.block > TRITON_BLOCK else 4, num_stages=1),
        interpret=grid.interpret,
        name=f"triton_attention{kernel.__name__}",
    )
