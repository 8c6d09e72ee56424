"""The cross-entropy of tokens over a large vocabulary, without the logits of all its tokens at once.

The forward pass visits the vocabulary in chunks and keeps, for each vector, the largest logit so far and the sum of
exponentials relative to it (the online softmax of Milakov and Gimelshein 2018, section 3). The backward pass computes
the logits of a chunk again, and from them the chunk's rows of the table's gradient. The label's logit is picked by
comparison, so that there is no scatter, and the gradient of logits has the dtype of the vectors, as every other operand
of a matmul.

Of R vectors and chunks of K tokens, R x K logits exist at a time instead of R x V. The price is one more matmul.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Scalar = Float[Array, ""]

LANES = 128  # matmuls prefer dimensions that are multiples of it


def chunked_sums(
    rows: Float[Array, "R E"],
    table: Float[Array, "V E"],
    bias: Float[Array, "V"] | None,
    labels: Int[Array, "R"],
    weights: Float[Array, "R"],
    *,
    vocab_size: int,
    chunk: int,
    precision: jax.lax.Precision,
    unrolled: bool = False,
) -> tuple[Scalar, Scalar, Scalar]:
    """Returns losses.vocabulary_sums of the logits of rows, table and bias; those from vocab_size on are -inf.

    A chunk has at most `chunk` tokens. Chunks are of one size, which fits the vocabulary.

    With `unrolled` the chunks are not visited by a scan, which copies the table to pad it and to take chunks from it,
    and the last one may be shorter. XLA may then keep the logits for the backward pass instead of computing them again.
    """
    parts = math.ceil(len(table) / chunk)
    unit = math.gcd(chunk, LANES)
    size = math.ceil(len(table) / parts / unit) * unit
    return _sums(rows, table, bias, labels, weights, _Chunks(vocab_size, size, precision, unrolled))


@dataclass(frozen=True)
class _Chunks:
    """How the vocabulary is visited: as chunked_sums takes it, with the size that all chunks have."""

    vocab_size: int
    size: int
    precision: jax.lax.Precision
    unrolled: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _sums(
    rows: Array,
    table: Array,
    bias: Array | None,
    labels: Array,
    weights: Array,
    chunks: _Chunks,
) -> tuple[Array, Array, Array]:
    return _forward(rows, table, bias, labels, weights, chunks)[0]


def _forward(
    rows: Array,
    table: Array,
    bias: Array | None,
    labels: Array,
    weights: Array,
    chunks: _Chunks,
) -> tuple[tuple[Array, Array, Array], tuple[Any, ...]]:
    def add(found: tuple[Array, Array, Array], part: tuple[Array, Array, Array]) -> tuple[Any, None]:
        top, total, picked = found
        first, tokens, biases = part
        logits = _logits(rows, tokens, biases, chunks.precision)
        if chunks.unrolled:
            higher, total = _joined((top, total), _exponentials(logits))
        else:
            higher = jnp.maximum(top, logits.max(axis=1))
            total = total * jnp.exp(top - higher) + jnp.exp(logits - higher[:, None]).sum(axis=1)
        picked += jnp.where(_is_label(labels, first, len(tokens)), logits, 0).sum(axis=1)
        return (higher, total, picked), None

    zeros = jnp.zeros(len(rows))
    loop, parts = _loop(table, bias, rows.dtype, chunks)
    (top, total, picked), _ = loop(add, (zeros - jnp.inf, zeros, zeros), parts)
    normalizer = top + jnp.log(total)
    each = normalizer - picked
    sums = (each * weights).sum(), ((picked >= top) * weights).sum(), (normalizer**2 * weights).sum()
    return sums, (rows, table, bias, labels, weights, normalizer, each)


def _backward(
    chunks: _Chunks,
    kept: tuple[Any, ...],
    gradients: tuple[Array, Array, Array],
) -> tuple[Any, ...]:
    rows, table, bias, labels, weights, normalizer, each = kept
    of_loss, _, of_squares = gradients
    of_labels = of_loss * weights
    of_probabilities = of_labels + 2 * of_squares * normalizer * weights

    def add(of_rows: Array, part: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        first, tokens, biases = part
        probabilities = jnp.exp(_logits(rows, tokens, biases, chunks.precision) - normalizer[:, None])
        of_logits = probabilities * of_probabilities[:, None]
        of_logits -= jnp.where(_is_label(labels, first, len(tokens)), of_labels[:, None], 0)
        narrow = of_logits.astype(rows.dtype)
        # Unrolled chunks leave the compiler the choice of what to read for this sum; half of the bytes are enough.
        of_logits = jax.lax.optimization_barrier(narrow).astype(jnp.float32) if chunks.unrolled else of_logits
        matmul = functools.partial(jnp.einsum, precision=chunks.precision, preferred_element_type=jnp.float32)
        of_rows += matmul("rv,ve->re", narrow, tokens)
        return of_rows, (matmul("rv,re->ve", narrow, rows), of_logits.sum(axis=0))

    loop, parts = _loop(table, bias, rows.dtype, chunks)
    of_rows, (of_table, of_bias) = loop(add, jnp.zeros(rows.shape), parts)
    return (
        of_rows.astype(rows.dtype),
        of_table.reshape(-1, table.shape[1])[: len(table)].astype(table.dtype),
        None if bias is None else of_bias.reshape(-1)[: len(table)].astype(bias.dtype),
        np.zeros(labels.shape, jax.dtypes.float0),
        of_loss * each + of_squares * normalizer**2,
    )


_sums.defvjp(_forward, _backward)


def _loop(table: Array, bias: Array | None, dtype: Any, chunks: _Chunks) -> tuple[Any, Any]:
    """Returns jax.lax.scan and the stacked chunks, or a function that does the same with a list of chunks."""
    if not chunks.unrolled:
        return jax.lax.scan, _parts(table, bias, dtype, chunks)
    parts, chunk = [], chunks.size
    for first in range(0, len(table), chunk):
        tokens = np.arange(first, min(first + chunk, len(table)))
        biases = jnp.zeros(len(tokens)) if bias is None else bias[first : first + chunk].astype(jnp.float32)
        part = table[first : first + chunk].astype(dtype)
        parts.append((jnp.int32(first), part, jnp.where(tokens < chunks.vocab_size, biases, -jnp.inf)))
    return _visit_each, parts


def _visit_each(add: Any, found: Any, parts: list[Any]) -> tuple[Any, Any]:
    outputs = []
    for part in parts:
        found, output = add(found, part)
        outputs.append(output)
    return found, None if outputs[0] is None else jax.tree.map(lambda *each: jnp.concatenate(each), *outputs)


Exponentials = tuple[Array, Array]  # the largest of some logits, and the sum of exponentials relative to it


def _joined(one: Exponentials, other: Exponentials) -> Exponentials:
    # At least the smallest number: -inf, of the padding, minus itself would not be 0.
    top = jnp.maximum(jnp.maximum(one[0], other[0]), jnp.finfo(jnp.float32).min)
    return top, one[1] * jnp.exp(one[0] - top) + other[1] * jnp.exp(other[0] - top)


def _exponentials(logits: Float[Array, "R K"]) -> Exponentials:
    """Returns what _joined gives for all logits of each row, in one pass over them."""
    start = (jnp.float32(-jnp.inf), jnp.float32(0))
    return jax.lax.reduce((logits, jnp.ones_like(logits)), start, _joined, (1,))


def _parts(
    table: Array, bias: Array | None, dtype: Any, chunks: _Chunks
) -> tuple[Int[Array, "C"], Float[Array, "C K E"], Float[Array, "C K"]]:
    """Returns the number of the first token of each chunk, its rows of the table, and its biases: -inf for padding."""
    padding = -len(table) % chunks.size
    tokens = jnp.arange(len(table) + padding)
    biases = jnp.zeros(len(tokens)) if bias is None else jnp.pad(bias.astype(jnp.float32), (0, padding))
    biases = jnp.where(tokens < chunks.vocab_size, biases, -jnp.inf)
    padded = jnp.pad(table.astype(dtype), ((0, padding), (0, 0)))
    return tokens[:: chunks.size], padded.reshape(-1, chunks.size, table.shape[1]), biases.reshape(-1, chunks.size)


def _logits(rows: Array, table: Array, biases: Array, precision: jax.lax.Precision) -> Float[Array, "R K"]:
    product = jnp.einsum("re,ve->rv", rows, table, precision=precision, preferred_element_type=jnp.float32)
    return product + biases[None]


def _is_label(labels: Array, first: Array, chunk: int) -> Array:
    """Returns which token of the chunk is the label of each row, bool[R,K]."""
    return (labels - first)[:, None] == jnp.arange(chunk)[None]
