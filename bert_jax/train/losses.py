"""Losses of the heads as weighted sums over labelled items: the caller divides once, by global counts (law 3).

Every function converts logits to float32, and an item with weight 0 contributes nothing. Most functions return (loss,
correct), where `correct` is the weighted number of correct predictions; a tie between the label and another class
counts as correct. The second part compares a student with its teacher; the third computes the cross-entropy over a
large vocabulary in chunks.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bert_jax.model.ops import VocabularyProduct, operations

Scalar = Float[Array, ""]


@dataclass(frozen=True)
class ClassCosts:
    """Class weights and label smoothing of a cross-entropy loss.

    Losses, `correct` and denominators (`weigh`) include the class weights, so that their quotient equals
    torch.nn.functional.cross_entropy(weight=, label_smoothing=), whose mean divides by the weights of the labels.

    Args:
        weights: one weight for each class, in class order; empty means 1 for every class.
        smoothing: the target distribution is (1 - smoothing) * one-hot label + smoothing * uniform distribution
            (Szegedy et al. 2016, section 7).
    """

    weights: tuple[float, ...] = ()
    smoothing: float = 0.0

    def weigh(self, labels: Int[Array, "*shape"], weights: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Multiplies the weights of labelled items by their class weights."""
        return weights * jnp.array(self.weights, jnp.float32)[labels] if self.weights else weights


PLAIN = ClassCosts()


def classification_sums(
    logits: Float[Array, "*shape C"],
    labels: Int[Array, "*shape"],
    weights: Float[Array, "*shape"],
    costs: ClassCosts = PLAIN,
) -> tuple[Scalar, Scalar]:
    """Returns the cross-entropy in nats and `correct` for classes, tags, tokens, span classes or relations.

    Args:
        labels: class ids; any valid one where the weight is 0.
        weights: of the items, without class weights; 0 leaves an item out.
        costs: class weights and label smoothing.
    """
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    # The softmax needs the largest logit anyway; an argmax would be a second, slower pass over the classes.
    top = jax.lax.stop_gradient(logits).max(axis=-1)
    total = jax.nn.logsumexp(logits, axis=-1)
    weighed = costs.weigh(labels, weights)
    loss = ((total - picked) * weighed).sum()
    if costs.smoothing:
        # The cross-entropy with the uniform distribution, whose classes have their weights, as torch has it.
        class_weights = jnp.array(costs.weights or (1.0,) * logits.shape[-1], jnp.float32) / logits.shape[-1]
        surprisals = total[..., None] - logits
        uniform = jnp.einsum("...c,c->...", surprisals, class_weights, precision=jax.lax.Precision.HIGHEST)
        loss = (1 - costs.smoothing) * loss + costs.smoothing * (uniform * weights).sum()
    return loss, ((picked >= top) * weighed).sum()


class VocabularySums(NamedTuple):
    """classification_sums of tokens, and log^2 Z for the z-loss (train/objectives/language_modeling.py)."""

    loss: Scalar
    correct: Scalar
    squares: Scalar


def vocabulary_sums(
    product: VocabularyProduct, labels: Int[Array, "B M"], weights: Float[Array, "B M"]
) -> VocabularySums:
    """Returns the sums for one token per vector."""
    # Logits are computed in chunks (the runtime's choice), or in pieces that are kept for the backward pass (the
    # platform's), unless the vocabulary is sharded, which divides them already.
    runtime = product.runtime
    chunk = runtime.vocabulary_chunk or operations(runtime).vocabulary_piece
    if not chunk or runtime.placement.shards_layers:
        logits = product.logits()
        squares = (jax.nn.logsumexp(logits, axis=-1) ** 2 * weights).sum()
        return VocabularySums(*classification_sums(logits, labels, weights), squares)
    rows = product.vectors.reshape(-1, product.vectors.shape[-1])
    labels, weights = labels.reshape(-1), weights.reshape(-1)
    sums = chunked_sums(
        *(rows, product.table, product.bias, labels, weights),
        vocab_size=product.vocab_size,
        chunk=chunk,
        precision=runtime.precision,
        unrolled=not runtime.vocabulary_chunk,
    )
    return VocabularySums(*sums)


def binary_sums(
    logits: Float[Array, "*shape"], labels: Int[Array, "*shape"], weights: Float[Array, "*shape"]
) -> tuple[Scalar, Scalar]:
    """Returns the binary cross-entropy in nats and `correct` at a threshold of 1/2; P(label 1) = sigmoid(logit)."""
    # -log sigmoid(x) is softplus(-x), which neither overflows nor loses a small loss to rounding.
    signed = jnp.where(labels > 0, logits, -logits).astype(jnp.float32)
    return (jax.nn.softplus(-signed) * weights).sum(), ((signed >= 0) * weights).sum()


# Losses of a student against the outputs and hidden states of its teacher, which gets no gradient.

COSINE_EPSILON = 1e-12


def soft_class_sum(
    logits: Float[Array, "*shape C"],
    teacher: Float[Array, "*shape C"],
    weights: Float[Array, "*shape"],
    temperature: float,
) -> Scalar:
    """Returns the weighted sum of T^2 KL(p || q) in nats, where p = softmax(teacher / T) and q = softmax(logits / T).

    Args:
        logits, teacher: both models' logits, which must be finite, since 0 times infinity is NaN.
        weights: of the items; 0 leaves an item out.
        temperature: T, above 0.
    """
    # The factor T^2 keeps the size of gradients about the same for any T (Hinton et al. 2015, section 2).
    ours = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
    theirs = jax.nn.log_softmax(jax.lax.stop_gradient(teacher).astype(jnp.float32) / temperature)
    divergence = (jnp.exp(theirs) * (theirs - ours)).sum(axis=-1)
    return temperature**2 * (divergence * weights).sum()


def soft_binary_sum(
    logits: Float[Array, "*shape"], teacher: Float[Array, "*shape"], weights: Float[Array, "*shape"], temperature: float
) -> Scalar:
    """Returns soft_class_sum of the two classes whose probabilities are sigmoid(logit / T) and the rest."""
    # softmax([x, 0]) = [sigmoid(x), 1 - sigmoid(x)]
    ours, theirs = (jnp.stack([output, jnp.zeros_like(output)], axis=-1) for output in (logits, teacher))
    return soft_class_sum(ours, theirs, weights, temperature)


def squared_difference_sum(
    outputs: Float[Array, "*shape"], teacher: Float[Array, "*shape"], weights: Float[Array, "*shape"]
) -> Scalar:
    """Returns the weighted sum of squared differences between the numbers that both models predict."""
    difference = outputs.astype(jnp.float32) - jax.lax.stop_gradient(teacher).astype(jnp.float32)
    return (jnp.square(difference) * weights).sum()


def hidden_sum(
    kind: str, states: Float[Array, "B T D"], teacher: Float[Array, "B T D"], weights: Float[Array, "B T"]
) -> Scalar:
    """Returns the weighted sum over positions of the distance between hidden states.

    Args:
        kind: cosine (1 - cos; Sanh et al. 2019, section 3) or mse (the mean over D of squared differences; Jiao et al.
            2020, equation 8).
        weights: of the positions; 0 for padding.
    """
    ours, theirs = states.astype(jnp.float32), jax.lax.stop_gradient(teacher).astype(jnp.float32)
    if kind == "mse":
        return (jnp.square(ours - theirs).mean(axis=-1) * weights).sum()
    # As torch.nn.CosineEmbeddingLoss, which adds the epsilon to the squared lengths.
    lengths = [jnp.square(vectors).sum(axis=-1) + COSINE_EPSILON for vectors in (ours, theirs)]
    cosine = (ours * theirs).sum(axis=-1) * jax.lax.rsqrt(lengths[0] * lengths[1])
    return ((1 - cosine) * weights).sum()


# The cross-entropy of tokens over a large vocabulary, without the logits of all its tokens at once.
#
# The forward pass visits the vocabulary in chunks and keeps, for each vector, the largest logit so far and the sum of
# exponentials relative to it (the online softmax of Milakov and Gimelshein 2018, section 3). The backward pass computes
# the logits of a chunk again, and from them the chunk's rows of the table's gradient. The label's logit is picked by
# comparison, so that there is no scatter, and the gradient of logits has the dtype of the vectors, as every other
# operand of a matmul.
#
# With R vectors and chunks of K tokens, R x K logits exist at a time instead of R x V. The price is one more matmul.

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
    """Returns the VocabularySums of rows, table and bias; logits from vocab_size on are -inf.

    Args:
        chunk: the largest number of tokens in a chunk.
        unrolled: visit the chunks without a scan, which copies the table to pad it and to take chunks from it. The
            last chunk may then be shorter, and XLA may keep the logits for the backward pass.
    """
    # Chunks of one size that leaves as little padding as possible.
    parts = math.ceil(len(table) / chunk)
    unit = math.gcd(chunk, LANES)
    size = math.ceil(len(table) / parts / unit) * unit
    return _sums(rows, table, bias, labels, weights, _Chunks(vocab_size, size, precision, unrolled))


@dataclass(frozen=True)
class _Chunks:
    """How to visit the vocabulary."""

    vocab_size: int
    size: int
    precision: jax.lax.Precision
    unrolled: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _sums(
    rows: Array, table: Array, bias: Array | None, labels: Array, weights: Array, chunks: _Chunks
) -> tuple[Array, Array, Array]:
    return _forward(rows, table, bias, labels, weights, chunks)[0]


def _forward(
    rows: Array, table: Array, bias: Array | None, labels: Array, weights: Array, chunks: _Chunks
) -> tuple[tuple[Array, Array, Array], tuple[Any, ...]]:
    def add(sums: tuple[Array, Array, Array], part: tuple[Array, Array, Array]) -> tuple[Any, None]:
        top, total, picked = sums
        first, tokens, biases = part
        logits = _logits(rows, tokens, biases, chunks.precision)
        if chunks.unrolled:
            # The largest logit and the sum of exponentials of a row, in one pass over the logits.
            start = (jnp.float32(-jnp.inf), jnp.float32(0))
            chunk_sums = jax.lax.reduce((logits, jnp.ones_like(logits)), start, _joined, (1,))
            higher, total = _joined((top, total), chunk_sums)
        else:
            # Earlier exponentials are scaled to the new largest logit, so that none overflows.
            higher = jnp.maximum(top, logits.max(axis=1))
            total = total * jnp.exp(top - higher) + jnp.exp(logits - higher[:, None]).sum(axis=1)
        picked += jnp.where(_is_label(labels, first, len(tokens)), logits, 0).sum(axis=1)
        return (higher, total, picked), None

    zeros = jnp.zeros(len(rows))
    loop, parts = _loop(table, bias, rows.dtype, chunks)
    (top, total, picked), _ = loop(add, (zeros - jnp.inf, zeros, zeros), parts)
    normalizer = top + jnp.log(total)
    entropies = normalizer - picked
    sums = (entropies * weights).sum(), ((picked >= top) * weights).sum(), (normalizer**2 * weights).sum()
    return sums, (rows, table, bias, labels, weights, normalizer, entropies)


def _backward(chunks: _Chunks, residuals: tuple[Any, ...], gradients: tuple[Array, Array, Array]) -> tuple[Any, ...]:
    rows, table, bias, labels, weights, normalizer, entropies = residuals
    # Names as `of_rows` stand for the gradient of the sums by `rows`. Of the logits, both sums have the softmax as
    # gradient, once and 2 log Z times; the loss has the label's one-hot vector, too.
    of_loss, _, of_squares = gradients
    of_labels = of_loss * weights
    of_probabilities = of_labels + 2 * of_squares * normalizer * weights

    def add(of_rows: Array, part: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        first, tokens, biases = part
        probabilities = jnp.exp(_logits(rows, tokens, biases, chunks.precision) - normalizer[:, None])
        of_logits = probabilities * of_probabilities[:, None]
        of_logits -= jnp.where(_is_label(labels, first, len(tokens)), of_labels[:, None], 0)
        narrow = of_logits.astype(rows.dtype)
        # With unrolled chunks the compiler may read either array for this sum; the narrow one has half of the bytes.
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
        np.zeros(labels.shape, jax.dtypes.float0),  # jax's type for the gradient of integers
        of_loss * entropies + of_squares * normalizer**2,
    )


_sums.defvjp(_forward, _backward)


def _loop(table: Array, bias: Array | None, dtype: Any, chunks: _Chunks) -> tuple[Any, Any]:
    """Returns jax.lax.scan and the stacked chunks, or an equivalent function for a list of chunks.

    A chunk is its first token's number, its table rows, and its biases: -inf for padding.
    """
    size = chunks.size
    if not chunks.unrolled:
        # A scan needs chunks of one size. Padding gets a bias of -inf, and so do table rows beyond the vocabulary.
        padding = -len(table) % size
        tokens = jnp.arange(len(table) + padding)
        biases = jnp.zeros(len(tokens)) if bias is None else jnp.pad(bias.astype(jnp.float32), (0, padding))
        biases = jnp.where(tokens < chunks.vocab_size, biases, -jnp.inf)
        padded = jnp.pad(table.astype(dtype), ((0, padding), (0, 0)))
        return jax.lax.scan, (tokens[::size], padded.reshape(-1, size, table.shape[1]), biases.reshape(-1, size))
    # Slices of the table, of which only the last may be shorter: nothing is padded or copied into stacks.
    parts = []
    for first in range(0, len(table), size):
        numbers = np.arange(first, min(first + size, len(table)))
        biases = jnp.zeros(len(numbers)) if bias is None else bias[first : first + size].astype(jnp.float32)
        biases = jnp.where(numbers < chunks.vocab_size, biases, -jnp.inf)
        parts.append((jnp.int32(first), table[first : first + size].astype(dtype), biases))

    def visit(add: Any, carry: Any, parts: list[Any]) -> tuple[Any, Any]:
        # As jax.lax.scan, but the outputs of chunks are joined along their first axis, because the last may be shorter.
        outputs = []
        for part in parts:
            carry, output = add(carry, part)
            outputs.append(output)
        return carry, None if outputs[0] is None else jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)

    return visit, parts


Exponentials = tuple[Array, Array]  # the largest of some logits, and the sum of exponentials relative to it


def _joined(one: Exponentials, other: Exponentials) -> Exponentials:
    # At least the smallest number: -inf, of the padding, minus itself would not be 0.
    top = jnp.maximum(jnp.maximum(one[0], other[0]), jnp.finfo(jnp.float32).min)
    return top, one[1] * jnp.exp(one[0] - top) + other[1] * jnp.exp(other[0] - top)


def _logits(rows: Array, table: Array, biases: Array, precision: jax.lax.Precision) -> Float[Array, "R K"]:
    product = jnp.einsum("re,ve->rv", rows, table, precision=precision, preferred_element_type=jnp.float32)
    return product + biases[None]


def _is_label(labels: Array, first: Array, chunk: int) -> Array:
    """Which token of the chunk is each row's label, bool[R,K]."""
    return (labels - first)[:, None] == jnp.arange(chunk)[None]
