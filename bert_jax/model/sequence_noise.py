"""Random numbers for the positions of sequences, which depend neither on the row nor on what else is in it.

A packed row therefore gets the samples that its sequences get in rows of their own, with any padding. In training the
seed is that of the step, and a sequence is known by its number in the batch; in evaluation, by its tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray, UInt32

from bert_jax.model.dropout import SEED_WORDS, mix_seeds


def sequence_numbers(sequence_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The number from 0 of each position's sequence among all of a batch, in the order of its rows."""
    counts = sequence_ids.max(axis=1)
    before = jnp.cumsum(counts) - counts
    return before[:, None] + jnp.maximum(sequence_ids - 1, 0)


def numbered_seeds(key: PRNGKeyArray, sequence_ids: Int[Array, "B T"]) -> UInt32[Array, "B T 2"]:
    """Seeds of sequences by the key and their numbers in the batch, at each of their positions."""
    numbers = sequence_numbers(sequence_ids)
    words = jax.random.bits(key, (1, 1, SEED_WORDS), jnp.uint32)
    return derived_seeds(jnp.broadcast_to(words, (*numbers.shape, SEED_WORDS)), numbers)


def content_seeds(
    ids: Int[Array, "B T"], sequence_ids: Int[Array, "B T"], positions: Int[Array, "B T"]
) -> UInt32[Array, "B T 2"]:
    """Seeds of sequences by their ids alone, at each of their positions."""
    tokens = jnp.broadcast_to(jnp.arange(1, SEED_WORDS + 1, dtype=jnp.uint32), (*ids.shape, SEED_WORDS))
    hashed = derived_seeds(derived_seeds(tokens, ids), positions)
    same = sequence_ids[:, :, None] == sequence_ids[:, None, :]
    words = [jnp.where(same, hashed[:, None, :, word], 0).sum(axis=2, dtype=jnp.uint32) for word in range(SEED_WORDS)]
    return jnp.stack(words, axis=2)


def derived_seeds(seeds: UInt32[Array, "B T 2"], numbers: Int[Array, "B T"]) -> UInt32[Array, "B T 2"]:
    """Further seeds by a number each, such as the position in the sequence."""
    return jnp.stack(mix_seeds(numbers.astype(jnp.uint32), seeds[..., 0], seeds[..., 1]), axis=2)
