"""Words out of order beside masked ones (Wang et al. 2019, StructBERT, section 2.2.1): trigrams of tokens that are not
masked are shuffled, and predicted in their true order."""

import itertools

import numpy as np

from bert_jax.array_types import Bool, Int32, Int64, UInt64
from bert_jax.data import hashing
from bert_jax.data.masking.sequences import Sequences, ShuffledWords, WordBoundaries

LENGTH = 3  # tokens shuffled together (the paper's K)

_ORDERS = np.array(list(itertools.permutations(range(LENGTH))))


def candidates(sequences: Sequences, words: WordBoundaries, chosen: Bool[np.ndarray, "Q W"]) -> Bool[np.ndarray, "Q W"]:
    """Where a trigram can begin: at three ordinary tokens of one segment, none of them chosen."""
    free = (words.starts | words.inside) & ~chosen
    firsts = free.copy()
    for step in range(1, LENGTH):
        firsts[:, :-step] &= free[:, step:]
        firsts[:, max(0, free.shape[1] - step) :] = False
        over = np.flatnonzero((sequences.first_lengths >= step) & (sequences.first_lengths - step < free.shape[1]))
        firsts[over, sequences.first_lengths[over] - step] = False
    return firsts


def choose(order: ShuffledWords, budgets: Int64[np.ndarray, "Q"]) -> Bool[np.ndarray, "Q W"]:
    """The slots of the first trigrams, in their order, that share none; `budgets` counts trigrams."""
    count, width = order.keys.shape
    chosen = np.zeros((count, width), bool)
    flat = chosen.reshape(-1)
    left = budgets.copy()
    for column in range(width):
        active = np.flatnonzero((left > 0) & (order.keys[:, column] != order.absent))
        if not active.size:
            break
        slots = (active * width + order.positions(order.keys[active, column]))[:, None] + np.arange(LENGTH)
        alone = ~flat[slots].any(axis=1)
        flat[slots[alone]] = True
        left[active[alone]] -= 1
    return chosen


def shuffled(
    truth: Int32[np.ndarray, "K"], states: UInt64[np.ndarray, "K"], positions: Int64[np.ndarray, "K"]
) -> Int32[np.ndarray, "K"]:
    """The tokens of trigrams, which follow one another, each in one of its six orders by its sequence and place."""
    values = hashing.mix(states[::LENGTH] + positions[::LENGTH].astype(np.uint64) * hashing.GAMMA)
    picks = hashing.bounded((values >> np.uint64(32)).astype(np.uint32), len(_ORDERS))
    return np.take_along_axis(truth.reshape(-1, LENGTH), _ORDERS[picks], axis=1).reshape(-1)
