"""Chooses runs of words: masking units ngram (ALBERT), span (SpanBERT) and infill (BART)."""

import math
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Bool, Float64, Int32, Int64, Integer, UInt64
from bert_jax.data import hashing
from bert_jax.data.masking.rule import INFILL_MAX, INFILL_MEAN, MaskingRule
from bert_jax.data.masking.sequences import Sequences, ShuffledWords, WordBoundaries
from bert_jax.data.masking.word_selection import take_heads

# Candidates of a sequence examined together; any number gives the same masks.
_LOOK_AHEAD = 8


class Runs(NamedTuple):
    """The chosen positions. Only with unit infill, their division into runs, and the runs of no word."""

    chosen: Bool[np.ndarray, "Q W"]
    firsts: Bool[np.ndarray, "Q W"]  # the first position of each run
    empty: Bool[np.ndarray, "Q W"]  # the positions before which an empty run is


class RunLengths:
    """The distribution of the number of words of a run.

    The probabilities of an n-gram are normalized over the lengths for which there is room; other runs are cut to the
    room. Only an infilled run may have no word.
    """

    def __init__(self, rule: MaskingRule) -> None:
        self._grams = rule.unit == "ngram"
        self._fewest = 0 if rule.unit == "infill" else 1
        self.most = {"ngram": rule.ngram_max, "span": rule.span_max, "infill": INFILL_MAX}[rule.unit]
        weights = _weights(rule, np.arange(self._fewest, self.most + 1))
        # By room, thresholds for a uniform 32-bit value: the fewest words below the first, one more below the second,
        # and so on.
        self._thresholds = np.full((weights.size, self.most), 2**32, np.uint64)
        for room in range(1, self.most + 1):
            some = weights[:room] if self._grams else weights
            self._thresholds[: some.size, room - 1] = np.rint(np.cumsum(some) / some.sum() * 2**32)

    def draw(
        self, values: UInt64[np.ndarray, "*shape"], room: Integer[np.ndarray, "*shape"]
    ) -> Integer[np.ndarray, "*shape"]:
        """The number of words of each run, from uniform 32-bit values and the words that fit (`room`, 1 or more)."""
        room = np.minimum(room, self.most)
        sizes = np.full_like(room, self._fewest)
        for thresholds in self._thresholds[:-1]:
            sizes += values >= (thresholds[room - 1] if self._grams else thresholds[0])
        return np.minimum(sizes, room)


def _weights(rule: MaskingRule, sizes: Int64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """The probabilities of the numbers of words, up to a factor."""
    if rule.unit == "infill":
        return np.array([INFILL_MEAN**size / math.factorial(size) for size in sizes.tolist()])
    return 1 / sizes if rule.unit == "ngram" else (1 - rule.span_p) ** (sizes - 1)


class _Text(NamedTuple):
    """The K words of all sequences in text order, over N = Q*W positions.

    They form R stretches: maximal series of words that no special token and no segment border interrupts.
    """

    starts: Int64[np.ndarray, "K+1"]  # flat index at which each word starts, ascending; then N
    number: Int32[np.ndarray, "N"]  # for each position, the last word that starts there or before
    stretch: Int32[np.ndarray, "K"]  # the stretch of each word
    words: Int32[np.ndarray, "R"]  # the first word after each stretch
    ends: Int64[np.ndarray, "R"]  # the first position after each stretch


def choose_runs(
    sequences: Sequences,
    words: WordBoundaries,
    order: ShuffledWords,
    budgets: Int64[np.ndarray, "Q"],
    states: UInt64[np.ndarray, "Q"],
    rule: MaskingRule,
) -> Runs:
    """The runs that begin at words in random order, within each sequence's budget.

    `states` seed the lengths of runs. The package's docstring says what happens to runs that meet.
    """
    text = _text(sequences, words)
    lengths = RunLengths(rule)
    count, width = words.starts.shape
    runs = Runs(*(np.zeros((count, width), bool) for _ in Runs._fields))
    remaining = budgets.copy()
    active = np.flatnonzero(order.keys[:, 0] != order.absent)
    for step in range(0, width, _LOOK_AHEAD):
        if not active.size:
            break
        ahead = order.keys[active, step : step + _LOOK_AHEAD].T
        present = ahead != order.absent
        positions = np.where(present, order.positions(ahead), 0)
        begins = positions + active * width
        values = hashing.mix(states[active] + positions.astype(np.uint64) * hashing.GAMMA) >> np.uint64(32)
        ends = np.where(present, _ends(text, lengths, begins, values), begins)
        left = remaining[active]
        for some_begins, some_ends, some_present in zip(begins, ends, present, strict=True):
            if rule.unit == "infill":
                empty = some_begins[some_present & (some_begins == some_ends) & (left > 0)]
                runs.empty.reshape(-1)[empty[~runs.chosen.reshape(-1)[empty]]] = True
            _take(runs, left, some_begins, some_ends, text, rule)
        remaining[active] = left
        active = active[(left > 0) & present[-1]]
    none = np.flatnonzero(remaining == budgets)
    take_heads(runs.chosen, words, order, budgets, none)
    if rule.unit == "infill":
        runs.firsts[none, runs.chosen[none].argmax(axis=1)] = runs.chosen[none].any(axis=1)
    return runs


def _ends(
    text: _Text, lengths: RunLengths, begins: Int64[np.ndarray, "C A"], values: UInt64[np.ndarray, "C A"]
) -> Int64[np.ndarray, "C A"]:
    """The first position after the run that each candidate begins."""
    numbers = text.number[begins]
    stretches = text.stretch[numbers]
    sizes = lengths.draw(values, text.words[stretches] - numbers)
    return np.minimum(text.starts[numbers + sizes], text.ends[stretches])


def _take(
    runs: Runs,
    left: Int64[np.ndarray, "A"],
    begins: Int64[np.ndarray, "A"],
    ends: Int64[np.ndarray, "A"],
    text: _Text,
    rule: MaskingRule,
) -> None:
    """Marks at most one run of each sequence, and subtracts it from what is `left` of the budgets."""
    sizes = ends - begins
    long = np.flatnonzero(sizes > left)
    if long.size:
        sizes[long] = text.starts[text.number[begins[long] + left[long]]] - begins[long]
    columns = np.arange(int(sizes.max()) + 1)
    window = begins[:, None] + columns
    stops = runs.chosen.take(window, mode="clip")
    if rule.unit == "infill":
        stops |= runs.empty.take(window, mode="clip")
    stops |= columns >= sizes[:, None]
    first = stops.argmax(axis=1)  # positions before one that stops the run, or before its end
    if rule.unit == "ngram":
        first[first < sizes] = 0
    runs.chosen.reshape(-1)[window[columns < first[:, None]]] = True
    if rule.unit == "infill":
        runs.firsts.reshape(-1)[begins[first > 0]] = True
    left -= first


def _text(sequences: Sequences, words: WordBoundaries) -> _Text:
    width = words.starts.shape[1]
    special = ~(words.starts | words.inside).reshape(-1)
    border = np.zeros(special.size + 1, bool)  # positions that a run cannot continue into, apart from special tokens
    border[::width] = True
    second = np.flatnonzero(sequences.first_lengths < width)
    border[second * width + sequences.first_lengths[second]] = True

    firsts = border[:-1].copy()
    firsts[1:] |= special[:-1]
    lasts = border[1:]
    lasts[:-1] |= special[1:]
    number = np.cumsum(words.starts.reshape(-1), dtype=np.int32) - np.int32(1)
    starts = np.append(np.flatnonzero(words.starts), special.size)
    behind = np.append(number[np.flatnonzero(firsts & ~special)][1:], starts.size - 1).astype(np.int32)
    stretch = np.repeat(np.arange(behind.size, dtype=np.int32), np.diff(behind, prepend=0))
    return _Text(starts, number, stretch, behind, np.flatnonzero(lasts & ~special) + 1)


def run_starts(sequences: Integer[np.ndarray, "K"], positions: Integer[np.ndarray, "K"]) -> Integer[np.ndarray, "K"]:
    """The first position of the run that contains each chosen position; both are ascending."""
    new = np.ones(positions.size, bool)
    new[1:] = (np.diff(sequences) != 0) | (np.diff(positions) != 1)
    firsts = np.flatnonzero(new)
    return np.repeat(positions[firsts], np.diff(firsts, append=positions.size))
