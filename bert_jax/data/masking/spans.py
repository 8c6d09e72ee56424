"""Choosing runs of words: units ngram (ALBERT) and span (SpanBERT)."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer, UInt64

from bert_jax.data import hashing
from bert_jax.data.masking.rule import MaskingRule
from bert_jax.data.masking.sequences import Order, Sequences, Words
from bert_jax.data.masking.words import take_heads

# Candidates of a sequence looked at together; any number gives the same masks.
_LOOK_AHEAD = 8


class Lengths:
    """The distribution of a run's words: of an n-gram over those that there is room for; of a span, which is then
    cut to the room."""

    def __init__(self, rule: MaskingRule) -> None:
        grams = rule.unit == "ngram"
        self.most = rule.ngram_max if grams else rule.span_max
        sizes = np.arange(1, self.most + 1)
        weights = 1 / sizes if grams else (1 - rule.span_p) ** (sizes - 1)
        # Row by room: of the 2**32 values those below the first threshold mean one word, below the second two, ...
        self._thresholds = np.full((self.most, self.most), 2**32, np.uint64)
        for room in sizes.tolist():
            some = weights[:room] if grams else weights
            self._thresholds[room - 1, : some.size] = np.rint(np.cumsum(some) / some.sum() * 2**32)

    def draw(
        self, values: UInt64[np.ndarray, "*shape"], room: Int64[np.ndarray, "*shape"]
    ) -> Int64[np.ndarray, "*shape"]:
        """Words of runs from uniform 32-bit values, where the text goes on for `room` of them (1 or more)."""
        room = np.minimum(room, self.most)
        return np.minimum(1 + (values[..., None] >= self._thresholds[room - 1]).sum(axis=-1), room)


class _Text(NamedTuple):
    """The K words of all sequences as they stand, over the Q*W slots."""

    slots: Int64[np.ndarray, "K"]  # the first of each, ascending
    ends: Int64[np.ndarray, "K"]  # the one behind it
    room: Int64[np.ndarray, "K"]  # words from each to the next special token or border of a segment, itself counted
    number: Int32[np.ndarray, "N"]  # of each of the N = Q*W slots: the last word that begins there or before


def choose_runs(
    sequences: Sequences,
    words: Words,
    order: Order,
    budgets: Int64[np.ndarray, "Q"],
    states: UInt64[np.ndarray, "Q"],
    rule: MaskingRule,
) -> Bool[np.ndarray, "Q W"]:
    """The chosen slots: runs of words that begin at the words in their order, within each sequence's budget.

    `states` are those of the runs' lengths. See the package's docstring for what becomes of runs that meet.
    """
    text = _text(sequences, words)
    lengths = Lengths(rule)
    count, width = words.starts.shape
    chosen = np.zeros((count, width), bool)
    remaining = budgets.copy()
    active = np.flatnonzero(order.keys[:, 0] != order.absent)
    step = 0
    while active.size:
        ahead = order.keys[active, step : step + _LOOK_AHEAD]
        present = ahead != order.absent
        positions = np.where(present, order.positions(ahead), 0)
        begins = positions + active[:, None] * width
        numbers = np.where(present, text.number[begins], 0)
        values = hashing.mix(states[active, None] + positions.astype(np.uint64) * hashing.GAMMA) >> np.uint64(32)
        ends = text.ends[numbers + lengths.draw(values, text.room[numbers]) - 1]
        left = remaining[active]
        for column in range(ahead.shape[1]):
            _take(chosen.reshape(-1), left, begins[:, column], ends[:, column], present[:, column], text, rule)
        remaining[active] = left
        step += _LOOK_AHEAD
        active = active[(left > 0) & present[:, -1]] if step < width else active[:0]
    take_heads(chosen, order, budgets, np.flatnonzero(remaining == budgets))
    return chosen


def _take(
    chosen: Bool[np.ndarray, "N"],
    left: Int64[np.ndarray, "A"],
    begins: Int64[np.ndarray, "A"],
    ends: Int64[np.ndarray, "A"],
    present: Bool[np.ndarray, "A"],
    text: _Text,
    rule: MaskingRule,
) -> None:
    """Marks one run of each sequence, or none, and takes it off what is left of the budgets."""
    at = np.flatnonzero(present & (left > 0) & ~chosen[begins])
    if not at.size:
        return
    begins, ends, room = begins[at], ends[at], left[at]
    long = np.flatnonzero(ends - begins > room)
    ends[long] = text.slots[text.number[begins[long] + room[long]]]
    sizes = ends - begins
    columns = np.arange(max(1, int(sizes.max())))
    window = begins[:, None] + columns
    met = chosen.take(window, mode="clip") & (columns < sizes[:, None])
    if rule.unit == "ngram":
        sizes[met.any(axis=1)] = 0
    else:
        sizes = np.where(met.any(axis=1), met.argmax(axis=1), sizes)
    chosen[window[columns < sizes[:, None]]] = True
    left[at] -= sizes


def _text(sequences: Sequences, words: Words) -> _Text:
    width = words.starts.shape[1]
    starts = words.starts.reshape(-1)
    bounds = np.flatnonzero(~words.inside.reshape(-1))  # first slots of words, and special tokens
    behind = np.append(bounds[1:], starts.size)
    is_word = starts[bounds]
    slots, ends = bounds[is_word], behind[is_word]

    borders = np.zeros(starts.size, bool)
    borders[::width] = True
    second = np.flatnonzero(sequences.first_lengths < width)
    borders[second * width + sequences.first_lengths[second]] = True
    last = np.append((slots[1:] != ends[:-1]) | borders[slots[1:]], True)[: slots.size]
    lasts = np.flatnonzero(last)
    room = np.repeat(lasts, np.diff(lasts, prepend=-1)) - np.arange(slots.size) + 1
    return _Text(slots, ends, room, np.cumsum(starts, dtype=np.int32) - 1)


def run_starts(sequences: Integer[np.ndarray, "K"], positions: Integer[np.ndarray, "K"]) -> Integer[np.ndarray, "K"]:
    """The first position of the run that each chosen position is in, both ascending."""
    new = np.ones(positions.size, bool)
    new[1:] = (np.diff(sequences) != 0) | (np.diff(positions) != 1)
    firsts = np.flatnonzero(new)
    return np.repeat(positions[firsts], np.diff(firsts, append=positions.size))
