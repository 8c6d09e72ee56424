"""Shuffled trigrams in addition to masks (Wang et al. 2019, StructBERT, section 2.2.1).

Trigrams of tokens that are not masked are shuffled, and the model predicts their original order.
"""

import itertools

import numpy as np

from bert_jax.array_types import Bool, Int32, Int64, UInt64
from bert_jax.data import hashing
from bert_jax.data.masking.sequences import Sequences, ShuffledWords, WordBoundaries

LENGTH = 3  # tokens that are shuffled together (the paper's K)

_ORDERS = np.array(list(itertools.permutations(range(LENGTH))))


def candidates(sequences: Sequences, words: WordBoundaries, chosen: Bool[np.ndarray, "Q W"]) -> Bool[np.ndarray, "Q W"]:
    """The positions at which a trigram can begin: three ordinary tokens of one segment, none of them chosen."""
    free = (words.starts | words.inside) & ~chosen
    firsts = free.copy()
    for step in range(1, LENGTH):
        firsts[:, :-step] &= free[:, step:]
        firsts[:, max(0, free.shape[1] - step) :] = False
        over = np.flatnonzero((sequences.first_lengths >= step) & (sequences.first_lengths - step < free.shape[1]))
        firsts[over, sequences.first_lengths[over] - step] = False
    return firsts


def choose(order: ShuffledWords, budgets: Int64[np.ndarray, "Q"]) -> Bool[np.ndarray, "Q W"]:
    """The positions of the first trigrams in random order that do not overlap; `budgets` counts trigrams."""
    count, width = order.keys.shape
    chosen = np.zeros((count, width), bool)
    flat = chosen.reshape(-1)
    left = budgets.copy()
    for column in range(width):
        active = np.flatnonzero((left > 0) & (order.keys[:, column] != order.absent))
        if not active.size:
            break
        flat_indices = (active * width + order.positions(order.keys[active, column]))[:, None] + np.arange(LENGTH)
        disjoint = ~flat[flat_indices].any(axis=1)
        flat[flat_indices[disjoint]] = True
        left[active[disjoint]] -= 1
    return chosen


def shuffled(
    original: Int32[np.ndarray, "K"], states: UInt64[np.ndarray, "K"], positions: Int64[np.ndarray, "K"]
) -> Int32[np.ndarray, "K"]:
    """The tokens of consecutive trigrams, each in one of its six orders, by its sequence's state and its position."""
    values = hashing.mix(states[::LENGTH] + positions[::LENGTH].astype(np.uint64) * hashing.GAMMA)
    picks = hashing.bounded((values >> np.uint64(32)).astype(np.uint32), len(_ORDERS))
    return np.take_along_axis(original.reshape(-1, LENGTH), _ORDERS[picks], axis=1).reshape(-1)
