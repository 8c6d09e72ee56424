"""Dropout and other noise by a counter-based hash: a mask depends only on a seed and on the index in the array.

A mask is neither stored nor communicated: XLA fuses its computation into the elementwise work around it, the backward
pass recomputes it, and a sharded array gets the mask of the whole array. Threefry, jax.random's default, needs
about a hundred integer operations for a number; here it only seeds each row, and a two-round hash does the rest.

The last part has noise for sequences, which depends neither on the row nor on its other sequences, so a packed row gets
the samples of its sequences in separate padded rows. Their seed comes from the step and the sequence's number in the
batch (training) or from its tokens (evaluation).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from bert_jax.model.runtime import ALONE, Placement

Seeds = UInt32[Array, "B 2"] | None  # of the rows; None in evaluation
DropoutKey = PRNGKeyArray | None  # None in evaluation
SEED_WORDS = 2
_FIRST, _SECOND = 0x85EBCA6B, 0xC2B2AE35  # the factors of fmix32
# In the numbering of elements, axes of positions have at least this length. With 256 heads a row then has 2^32.
LEAST_POSITIONS = 4096


def row_seeds(
    key: PRNGKeyArray, shape: tuple[int, ...], rows: int, placement: Placement = ALONE
) -> UInt32[Array, "*shape B 2"]:
    """Returns seeds for `rows` rows at `shape` dropout sites.

    Args:
        shape: the axes of the sites, such as (layers, 3); () for one site.
        placement: says which rows of the batch these are.
    """
    # Bits are made for the whole batch and then sliced, so that a row's mask does not depend on the mesh.
    first, every = placement.row_numbers(rows)
    seeds = jax.random.bits(key, (*shape, every, SEED_WORDS), jnp.uint32)
    return jax.lax.dynamic_slice_in_dim(seeds, first, rows, axis=len(shape)) if every > rows else seeds


def dropout(
    x: Float[Array, "B *shape"],
    rate: float,
    seeds: Seeds,
    *,
    position_axes: int = 0,
    again: bool = False,
) -> Float[Array, "B *shape"]:
    """Zeroes elements with probability `rate`, scales the others by 1 / (1 - rate) (Srivastava et al. 2014).

    Args:
        seeds: of the rows (row_seeds); None, in evaluation, returns x.
        position_axes: as in random_bits.
        again: whether the backward pass always recomputes the mask, because the compiler cannot keep it.
    """
    return x if seeds is None or rate == 0 else _dropout(x, seeds, rate, position_axes, again)


def keep_mask(
    seeds: UInt32[Array, "B 2"], shape: tuple[int, ...], rate: float, position_axes: int = 0
) -> Bool[Array, "B *shape"]:
    """Returns which elements dropout keeps: any with probability 1 - rate (to 2^-32). See random_bits for `shape`."""
    return keeps(random_bits(seeds, shape, position_axes), rate)


def keeps(bits: UInt32[Array, "*shape"], rate: float) -> Bool[Array, "*shape"]:
    """Returns which elements dropout keeps, given their random bits."""
    # Integers are compared, so that no rounding makes a mask depend on the platform.
    return bits >= jnp.uint32(round(rate * 2**32))


def gumbel(seeds: UInt32[Array, "*seeded 2"], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Returns standard Gumbel noise, float32, as random_bits does.

    The argmax of logits plus this noise is a sample of their softmax (Gumbel 1954; Maddison et al. 2014).
    """
    return -jnp.log(-jnp.log(uniform(seeds, shape)))


def uniform(seeds: UInt32[Array, "*seeded 2"], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Returns uniform numbers between 0 and 1, exclusive, float32, as random_bits does."""
    bits = random_bits(seeds, shape) >> 8  # as many as a float32 holds exactly
    # The largest number would round to 1, whose Gumbel noise is infinite.
    return jnp.minimum((bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-24), jnp.float32(1 - 2.0**-24))


def random_bits(
    seeds: UInt32[Array, "*seeded 2"], shape: tuple[int, ...], position_axes: int = 0
) -> UInt32[Array, "..."]:
    """Returns 32 random bits per element for an array of `shape`, whose first axes are the seeds'.

    The last `position_axes` axes are positions of a row: an element's mask does not depend on the padded length, up to
    LEAST_POSITIONS. Rows have up to 2^32 elements.

    Each line of the last axis has two words: two rounds of fmix32 (the 32-bit finalizer of MurmurHash3, A. Appleby,
    public domain) over the line's number, with a word of the seed before each round. An element takes one more round
    over its index in the line, with the line's first word before it and the second between its two products.
    """
    # Without the barrier XLA recomputes the words for each element.
    first, second = jax.lax.optimization_barrier(line_words(seeds, shape, position_axes))
    index = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    return element_bits(index, first[..., None], second[..., None])


def element_bits(
    index: UInt32[Array, "*#shape"], first: UInt32[Array, "*#shape"], second: UInt32[Array, "*#shape"]
) -> UInt32[Array, "*shape"]:
    """Returns random bits by the index in random_bits' last axis and its line's two words, broadcast.

    Kernels that compute their own masks call this (attention/kernels.py).
    """
    return (_first_half(index ^ first) ^ second) * jnp.uint32(_SECOND)


def line_words(
    seeds: UInt32[Array, "*seeded 2"], shape: tuple[int, ...], position_axes: int
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Returns two words for each line along random_bits' last axis."""
    lines, seeded = shape[:-1], tuple(range(seeds.ndim - 1))
    # Lines are numbered within the axes that the seeds lack, as in a C array. Numbers wrap around at 2^32.
    number, stride = jnp.zeros(lines, jnp.uint32), 1
    for axis in range(len(lines) - 1, len(seeded) - 1, -1):
        number += jax.lax.broadcasted_iota(jnp.uint32, lines, axis) * jnp.uint32(stride % 2**32)
        stride *= max(lines[axis], LEAST_POSITIONS) if axis >= len(shape) - position_axes else lines[axis]
    one, other = (jax.lax.broadcast_in_dim(seeds[..., word], lines, seeded) for word in range(SEED_WORDS))
    return mix_seeds(number, one, other)


def mix_seeds(
    number: UInt32[Array, "*shape"], one: UInt32[Array, "*shape"], other: UInt32[Array, "*shape"]
) -> tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]:
    """Hashes a number and the two words of a seed to two words."""
    return _mix(_mix(number ^ one) ^ other), _mix(_mix(number ^ other) ^ one)


def _first_half(bits: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    bits = (bits ^ (bits >> 16)) * jnp.uint32(_FIRST)
    return bits ^ (bits >> 13)


def _mix(bits: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Computes fmix32 (random_bits)."""
    bits = _first_half(bits) * jnp.uint32(_SECOND)
    return bits ^ (bits >> 16)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _dropout(x: Array, seeds: Array, rate: float, position_axes: int, again: bool) -> Array:
    scaled = x.astype(jnp.float32) * (1.0 / (1.0 - rate))  # in bfloat16 the factor would be 1.109, not 1.111
    return jnp.where(keep_mask(seeds, x.shape, rate, position_axes), scaled, 0).astype(x.dtype)


def _forward(x: Array, seeds: Array, rate: float, position_axes: int, again: bool) -> tuple[Array, Array]:
    return _dropout(x, seeds, rate, position_axes, again), seeds


def _backward(rate: float, position_axes: int, again: bool, seeds: Array, gradient: Array) -> tuple[Array, None]:
    # The gradient of dropout is dropout of the gradient by the same mask. The barrier hides that it is the same.
    seeds = jax.lax.optimization_barrier(seeds) if again else seeds
    return _dropout(gradient, seeds, rate, position_axes, again), None


_dropout.defvjp(_forward, _backward)


def sequence_numbers(sequence_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Numbers a batch's sequences from 0, at each position, in row order."""
    # Sequences of a row are numbered from 1 and padding is 0, so the maximum is the row's count.
    counts = sequence_ids.max(axis=1)
    before = jnp.cumsum(counts) - counts
    return before[:, None] + jnp.maximum(sequence_ids - 1, 0)


def numbered_seeds(key: PRNGKeyArray, sequence_ids: Int[Array, "B T"]) -> UInt32[Array, "B T 2"]:
    """Seeds sequences by the key and their numbers in the batch, at each of their positions."""
    numbers = sequence_numbers(sequence_ids)
    # One seed for the whole batch; a sequence's number makes it the sequence's own, wherever the sequence lies.
    words = jax.random.bits(key, (1, 1, SEED_WORDS), jnp.uint32)
    return derived_seeds(jnp.broadcast_to(words, (*numbers.shape, SEED_WORDS)), numbers)


def content_seeds(
    ids: Int[Array, "B T"], sequence_ids: Int[Array, "B T"], positions: Int[Array, "B T"]
) -> UInt32[Array, "B T 2"]:
    """Seeds sequences by their ids alone, at each of their positions."""
    tokens = jnp.broadcast_to(jnp.arange(1, SEED_WORDS + 1, dtype=jnp.uint32), (*ids.shape, SEED_WORDS))
    hashed = derived_seeds(derived_seeds(tokens, ids), positions)
    # A sum over the positions of the sequence, so that their order in the row does not matter. It wraps around, which
    # keeps it exact.
    same = sequence_ids[:, :, None] == sequence_ids[:, None, :]
    words = [jnp.where(same, hashed[:, None, :, word], 0).sum(axis=2, dtype=jnp.uint32) for word in range(SEED_WORDS)]
    return jnp.stack(words, axis=2)


def derived_seeds(seeds: UInt32[Array, "B T 2"], numbers: Int[Array, "B T"]) -> UInt32[Array, "B T 2"]:
    """Derives seeds from others by a number, such as the position in the sequence."""
    return jnp.stack(mix_seeds(numbers.astype(jnp.uint32), seeds[..., 0], seeds[..., 1]), axis=2)
