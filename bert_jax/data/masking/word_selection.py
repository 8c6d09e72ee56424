"""Chooses words one by one: masking units token and word."""

import numpy as np

from bert_jax.array_types import Bool, Int64, UInt
from bert_jax.data.masking.sequences import ShuffledWords, WordBoundaries, mark

# Words examined together after the first phase; any number gives the same masks.
_LOOK_AHEAD = 8


def choose_words(
    words: WordBoundaries, order: ShuffledWords, budgets: Int64[np.ndarray, "Q"]
) -> Bool[np.ndarray, "Q W"]:
    """The chosen positions: whole words in random order, as long as they fit their sequence's budget."""
    keys, absent = order.keys, order.absent
    chosen = np.zeros(keys.shape, bool)
    count, width = keys.shape

    # Phase 1 takes all words before the first that does not fit at once. A word has at least one token, so no more
    # words than the largest budget are needed.
    head = keys[:, : min(width, int(budgets.max(initial=1)))]
    flat_indices, lengths = _located(head, np.arange(count), words.inside, order)
    totals = np.cumsum(lengths, axis=1)
    taken = totals <= budgets[:, None]
    mark(chosen, flat_indices[taken], lengths[taken])
    remaining = budgets - np.where(taken, totals, 0).max(axis=1, initial=0)
    next_word = taken.sum(axis=1)

    # Phase 2 continues word by word over the few sequences that still have budget and words.
    active = np.flatnonzero(remaining > 0)
    while active.size:
        columns = next_word[active, None] + np.arange(_LOOK_AHEAD)
        ahead = np.where(columns < width, keys[active[:, None], np.minimum(columns, width - 1)], absent)
        flat_indices, lengths = _located(ahead, active, words.inside, order)
        left, taken = remaining[active], np.zeros(lengths.shape, bool)
        for column, length in enumerate(lengths.T):
            taken[:, column] = length <= left
            left -= length * taken[:, column]
        mark(chosen, flat_indices[taken], lengths[taken])
        remaining[active] = left
        next_word[active] += _LOOK_AHEAD
        active = active[(left > 0) & (ahead[:, -1] != absent)]

    take_heads(chosen, words, order, budgets, np.flatnonzero(remaining == budgets))
    return chosen


def take_heads(
    chosen: Bool[np.ndarray, "Q W"],
    words: WordBoundaries,
    order: ShuffledWords,
    budgets: Int64[np.ndarray, "Q"],
    none: Int64[np.ndarray, "A"],
) -> None:
    """In the sequences `none`, in which nothing was chosen, marks the first word, or as much of it as fits.

    With unit infill that word may fit: the run that began at it had no word, and no other word fitted.
    """
    none = none[order.keys[none, 0] != order.absent]
    flat_indices, lengths = _located(order.keys[none, :1], none, words.inside, order)
    mark(chosen, flat_indices[:, 0], np.minimum(lengths[:, 0], budgets[none]))


def _located(
    keys: UInt[np.ndarray, "A C"],
    sequences: Int64[np.ndarray, "A"],
    inside: Bool[np.ndarray, "Q W"],
    order: ShuffledWords,
) -> tuple[Int64[np.ndarray, "A C"], Int64[np.ndarray, "A C"]]:
    """The flat index of the first position of each word, and its length; absent words exceed any budget."""
    width = inside.shape[1]
    present = keys != order.absent
    flat_indices = order.positions(keys) + sequences[:, None] * width
    lengths = np.full(keys.shape, width + 1)
    lengths[present] = _word_lengths(inside, flat_indices[present])
    return flat_indices, lengths


def _word_lengths(inside: Bool[np.ndarray, "Q W"], flat_indices: Int64[np.ndarray, "K"]) -> Int64[np.ndarray, "K"]:
    """The number of tokens of the words that start at these flat indices."""
    flat = inside.reshape(-1)
    lengths = np.ones(flat_indices.size, np.int64)
    growing = np.arange(flat_indices.size)
    while growing.size:
        following = flat_indices[growing] + lengths[growing]
        # The position after a sequence's last one is column 0 of the next, which never continues a word; `clip` handles
        # the last sequence.
        continues = flat.take(following, mode="clip") & (following < flat.size)
        growing = growing[continues]
        lengths[growing] += 1
    return lengths
