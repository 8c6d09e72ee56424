"""Choosing words one by one: units token and word."""

import numpy as np

from bert_jax.array_types import Bool, Int64, UInt
from bert_jax.data.masking.sequences import ShuffledWords, WordBoundaries, mark

# Words looked at together once the easy ones are taken; any number gives the same masks.
_LOOK_AHEAD = 8


def choose_words(
    words: WordBoundaries, order: ShuffledWords, budgets: Int64[np.ndarray, "Q"]
) -> Bool[np.ndarray, "Q W"]:
    """The chosen slots: words in their order, whole while they fit, within each sequence's budget."""
    keys, absent = order.keys, order.absent
    chosen = np.zeros(keys.shape, bool)
    count, width = keys.shape

    # The words before the first that does not fit are taken all at once. As a word has a token at least, no more
    # than a budget's number of them can be.
    head = keys[:, : min(width, int(budgets.max(initial=1)))]
    slots, lengths = _located(head, np.arange(count), words.inside, order)
    totals = np.cumsum(lengths, axis=1)
    taken = totals <= budgets[:, None]
    mark(chosen, slots[taken], lengths[taken])
    remaining = budgets - np.where(taken, totals, 0).max(axis=1, initial=0)
    next_word = taken.sum(axis=1)

    # From there on word by word, over the sequences that still have budget and words: soon a few.
    active = np.flatnonzero(remaining > 0)
    while active.size:
        columns = next_word[active, None] + np.arange(_LOOK_AHEAD)
        ahead = np.where(columns < width, keys[active[:, None], np.minimum(columns, width - 1)], absent)
        slots, lengths = _located(ahead, active, words.inside, order)
        left, taken = remaining[active], np.zeros(lengths.shape, bool)
        for column, length in enumerate(lengths.T):
            taken[:, column] = length <= left
            left -= length * taken[:, column]
        mark(chosen, slots[taken], lengths[taken])
        remaining[active] = left
        next_word[active] += _LOOK_AHEAD
        active = active[(left > 0) & (ahead[:, -1] != absent)]

    take_heads(chosen, order, budgets, np.flatnonzero(remaining == budgets))
    return chosen


def take_heads(
    chosen: Bool[np.ndarray, "Q W"], order: ShuffledWords, budgets: Int64[np.ndarray, "Q"], none: Int64[np.ndarray, "A"]
) -> None:
    """Where no word fitted, in the sequences `none`: marks the head of the first one."""
    none = none[order.keys[none, 0] != order.absent]
    mark(chosen, none * chosen.shape[1] + order.positions(order.keys[none, 0]), budgets[none])


def _located(
    keys: UInt[np.ndarray, "A C"],
    sequences: Int64[np.ndarray, "A"],
    inside: Bool[np.ndarray, "Q W"],
    order: ShuffledWords,
) -> tuple[Int64[np.ndarray, "A C"], Int64[np.ndarray, "A C"]]:
    """The first slot, of the Q*W, and the length of each word; an absent one is longer than any budget."""
    width = inside.shape[1]
    present = keys != order.absent
    slots = order.positions(keys) + sequences[:, None] * width
    lengths = np.full(keys.shape, width + 1)
    lengths[present] = _word_lengths(inside, slots[present])
    return slots, lengths


def _word_lengths(inside: Bool[np.ndarray, "Q W"], slots: Int64[np.ndarray, "K"]) -> Int64[np.ndarray, "K"]:
    """How many tokens the words have that start at these of the Q*W slots."""
    flat = inside.reshape(-1)
    lengths = np.ones(slots.size, np.int64)
    growing = np.arange(slots.size)
    while growing.size:
        following = slots[growing] + lengths[growing]
        # The slot after a sequence's last one is column 0 of the next, never inside a word; clip ends the last.
        goes_on = flat.take(following, mode="clip") & (following < flat.size)
        growing = growing[goes_on]
        lengths[growing] += 1
    return lengths
