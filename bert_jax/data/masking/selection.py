"""Chooses the positions to mask: tokens and words one by one, or runs of words (n-grams, spans, infilling)."""

import math
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Bool, Int32, Int64, Integer, UInt, UInt64
from bert_jax.data import order as hashing
from bert_jax.data.masking.rule import (
    INFILL_MAX,
    INFILL_MEAN,
    MaskingRule,
    Sequences,
    ShuffledWords,
    WordBoundaries,
    mark,
)

# Words one by one: masking units token and word.

# Words examined together after the first phase; any number gives the same masks.
_WORDS_LOOK_AHEAD = 8


def choose_words(
    words: WordBoundaries, order: ShuffledWords, budgets: Int64[np.ndarray, "Q"]
) -> Bool[np.ndarray, "Q W"]:
    """Chooses whole words in random order, skipping words that exceed the rest of their sequence's budget."""
    keys, absent = order.keys, order.absent
    chosen = np.zeros(keys.shape, bool)
    count, width = keys.shape

    # Phase 1 takes words until the first one that does not fit. A word has at least one token, so no sequence needs to
    # look at more words than the largest budget.
    head = keys[:, : min(width, int(budgets.max(initial=1)))]
    flat_indices, lengths = _located(head, np.arange(count), words.inside, order)
    totals = np.cumsum(lengths, axis=1)
    taken = totals <= budgets[:, None]
    mark(chosen, flat_indices[taken], lengths[taken])
    remaining = budgets - np.where(taken, totals, 0).max(axis=1, initial=0)
    next_word = taken.sum(axis=1)

    # Phase 2 continues word by word for the few sequences that have budget and words left.
    active = np.flatnonzero(remaining > 0)
    while active.size:
        columns = next_word[active, None] + np.arange(_WORDS_LOOK_AHEAD)
        ahead = np.where(columns < width, keys[active[:, None], np.minimum(columns, width - 1)], absent)
        flat_indices, lengths = _located(ahead, active, words.inside, order)
        left, taken = remaining[active], np.zeros(lengths.shape, bool)
        for column, length in enumerate(lengths.T):
            taken[:, column] = length <= left
            left -= length * taken[:, column]
        mark(chosen, flat_indices[taken], lengths[taken])
        remaining[active] = left
        next_word[active] += _WORDS_LOOK_AHEAD
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
    """Marks the first word, or as much of it as fits, in the sequences `none`, in which nothing was chosen."""
    # With unit infill the word may fit as a whole, if the run at it was empty and no other word fitted.
    none = none[order.keys[none, 0] != order.absent]
    flat_indices, lengths = _located(order.keys[none, :1], none, words.inside, order)
    mark(chosen, flat_indices[:, 0], np.minimum(lengths[:, 0], budgets[none]))


def _located(
    keys: UInt[np.ndarray, "A C"],
    sequences: Int64[np.ndarray, "A"],
    inside: Bool[np.ndarray, "Q W"],
    order: ShuffledWords,
) -> tuple[Int64[np.ndarray, "A C"], Int64[np.ndarray, "A C"]]:
    """Returns every word's first flat index and its length in tokens. The length of absent words exceeds any budget."""
    width = inside.shape[1]
    flat = inside.reshape(-1)
    present = keys != order.absent
    flat_indices = order.positions(keys) + sequences[:, None] * width
    first = flat_indices[present]
    sizes = np.ones(first.size, np.int64)
    growing = np.arange(first.size)
    while growing.size:
        following = first[growing] + sizes[growing]
        # After a sequence's last position comes column 0 of the next sequence, which never continues a word. `clip` is
        # for the last sequence.
        continues = flat.take(following, mode="clip") & (following < flat.size)
        growing = growing[continues]
        sizes[growing] += 1
    lengths = np.full(keys.shape, width + 1)
    lengths[present] = sizes
    return flat_indices, lengths


# Runs of words: masking units ngram (ALBERT), span (SpanBERT) and infill (BART).

# Candidates of a sequence examined together; any number gives the same masks.
_RUNS_LOOK_AHEAD = 8


class Runs(NamedTuple):
    """The chosen positions. `firsts` and `empty` are set only with unit infill."""

    chosen: Bool[np.ndarray, "Q W"]
    firsts: Bool[np.ndarray, "Q W"]  # first positions of runs
    empty: Bool[np.ndarray, "Q W"]  # positions before which there is an empty run


class RunLengths:
    """The distribution of run lengths in words.

    N-gram probabilities are normalized over the lengths for which there is room. Other runs are cut to the room. Only
    infilled runs may be empty.
    """

    def __init__(self, rule: MaskingRule) -> None:
        self._grams = rule.unit == "ngram"
        self._fewest = 0 if rule.unit == "infill" else 1
        self._most = {"ngram": rule.ngram_max, "span": rule.span_max, "infill": INFILL_MAX}[rule.unit]
        sizes = np.arange(self._fewest, self._most + 1)
        if rule.unit == "infill":
            weights = np.array([INFILL_MEAN**size / math.factorial(size) for size in sizes.tolist()])
        else:
            weights = 1 / sizes if self._grams else (1 - rule.span_p) ** (sizes - 1)
        # Thresholds for a uniform 32-bit value, one column per room: below the first, a run has the fewest words, below
        # the second one word more, and so on.
        self._thresholds = np.full((weights.size, self._most), 2**32, np.uint64)
        for room in range(1, self._most + 1):
            possible = weights[:room] if self._grams else weights
            self._thresholds[: possible.size, room - 1] = np.rint(np.cumsum(possible) / possible.sum() * 2**32)

    def draw(
        self, values: UInt64[np.ndarray, "*shape"], room: Integer[np.ndarray, "*shape"]
    ) -> Integer[np.ndarray, "*shape"]:
        """Maps uniform 32-bit values to run lengths, given the number of words that fit (`room`, at least 1)."""
        room = np.minimum(room, self._most)
        sizes = np.full_like(room, self._fewest)
        for thresholds in self._thresholds[:-1]:
            sizes += values >= (thresholds[room - 1] if self._grams else thresholds[0])
        return np.minimum(sizes, room)


class _Text(NamedTuple):
    """The K words of all sequences in text order, over N = Q*W positions.

    They form R stretches: series of words without a special token or segment border in between.
    """

    starts: Int64[np.ndarray, "K+1"]  # flat index at which a word starts, ascending; then N
    number: Int32[np.ndarray, "N"]  # the last word that starts at or before a position
    stretch: Int32[np.ndarray, "K"]  # a word's stretch
    words: Int32[np.ndarray, "R"]  # the first word after a stretch
    ends: Int64[np.ndarray, "R"]  # the first position after a stretch


def choose_runs(
    sequences: Sequences,
    words: WordBoundaries,
    order: ShuffledWords,
    budgets: Int64[np.ndarray, "Q"],
    states: UInt64[np.ndarray, "Q"],
    rule: MaskingRule,
) -> Runs:
    """Chooses runs that begin at words in random order, within the sequences' budgets.

    Args:
        states: Seed the lengths of runs.
    """
    text, lengths = _text(sequences, words), RunLengths(rule)
    count, width = words.starts.shape
    runs = Runs(*(np.zeros((count, width), bool) for _ in Runs._fields))
    remaining = budgets.copy()
    active = np.flatnonzero(order.keys[:, 0] != order.absent)
    for step in range(0, width, _RUNS_LOOK_AHEAD):
        if not active.size:
            break
        ahead = order.keys[active, step : step + _RUNS_LOOK_AHEAD].T
        present = ahead != order.absent
        positions = np.where(present, order.positions(ahead), 0)
        begins = positions + active * width
        values = hashing.mix(states[active] + positions.astype(np.uint64) * hashing.GAMMA) >> np.uint64(32)
        # A run ends after its words, but at the latest where its stretch ends.
        numbers = text.number[begins]
        stretches = text.stretch[numbers]
        sizes = lengths.draw(values, text.words[stretches] - numbers)
        ends = np.where(present, np.minimum(text.starts[numbers + sizes], text.ends[stretches]), begins)
        left = remaining[active]
        # The candidates of a sequence depend on one another, so they take positions in turn. Sequences do not.
        for begin, end, exists in zip(begins, ends, present, strict=True):
            if rule.unit == "infill":
                empty = begin[exists & (begin == end) & (left > 0)]
                runs.empty.reshape(-1)[empty[~runs.chosen.reshape(-1)[empty]]] = True
            _take(runs, left, begin, end, text, rule)
        remaining[active] = left
        active = active[(left > 0) & present[-1]]
    none = np.flatnonzero(remaining == budgets)
    take_heads(runs.chosen, words, order, budgets, none)
    if rule.unit == "infill":
        runs.firsts[none, runs.chosen[none].argmax(axis=1)] = runs.chosen[none].any(axis=1)
    return runs


def _take(
    runs: Runs,
    left: Int64[np.ndarray, "A"],
    begins: Int64[np.ndarray, "A"],
    ends: Int64[np.ndarray, "A"],
    text: _Text,
    rule: MaskingRule,
) -> None:
    """Marks up to one run per sequence, and subtracts its size from `left`, the rest of the budget."""
    sizes = ends - begins
    # A run that exceeds the budget ends before the first word that does not fit.
    long = np.flatnonzero(sizes > left)
    if long.size:
        sizes[long] = text.starts[text.number[begins[long] + left[long]]] - begins[long]
    # A run ends where it meets an earlier run. An n-gram that meets one is not taken at all.
    columns = np.arange(int(sizes.max()) + 1)
    window = begins[:, None] + columns
    stops = runs.chosen.take(window, mode="clip")
    if rule.unit == "infill":
        stops |= runs.empty.take(window, mode="clip")
    stops |= columns >= sizes[:, None]
    taken = stops.argmax(axis=1)  # the positions before the first one that stops the run
    if rule.unit == "ngram":
        taken[taken < sizes] = 0
    runs.chosen.reshape(-1)[window[columns < taken[:, None]]] = True
    if rule.unit == "infill":
        runs.firsts.reshape(-1)[begins[taken > 0]] = True
    left -= taken


def _text(sequences: Sequences, words: WordBoundaries) -> _Text:
    width = words.starts.shape[1]
    special = ~(words.starts | words.inside).reshape(-1)
    # Apart from special tokens, a run cannot continue into a new sequence (column 0) or segment.
    border = np.zeros(special.size + 1, bool)
    border[::width] = True
    second = np.flatnonzero(sequences.first_lengths < width)
    border[second * width + sequences.first_lengths[second]] = True

    # A stretch begins at a border or after a special token, and ends before the next one of either.
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
    """Returns the first position in every position's consecutive run; both arguments ascend."""
    new = np.ones(positions.size, bool)
    new[1:] = (np.diff(sequences) != 0) | (np.diff(positions) != 1)
    firsts = np.flatnonzero(new)
    return np.repeat(positions[firsts], np.diff(firsts, append=positions.size))


class SpanTargets(NamedTuple):
    """Batch fields for the span boundary objective (Joshi et al. 2020, section 3.2); 0 in fillers."""

    span_left: Int32[np.ndarray, "R M"]  # the position before the span
    span_right: Int32[np.ndarray, "R M"]  # the position after the span
    span_offsets: Int32[np.ndarray, "R M"]  # 1, 2, ...: the position within the span


def span_targets(
    masked_positions: Int32[np.ndarray, "R M"],
    counts: Int32[np.ndarray, "R"],
    sequence_ids: Int32[np.ndarray, "R T"],
) -> SpanTargets:
    """Finds the span around every prediction: a run of predicted positions in one sequence.

    So shards with static masks do not have to store spans.
    """
    (count, width), most = sequence_ids.shape, masked_positions.shape[1]
    real = np.flatnonzero(np.arange(most) < counts[:, None])
    row = np.repeat(np.arange(count), counts)
    flat_indices = row * width + masked_positions.reshape(-1)[real]
    flat = sequence_ids.reshape(-1)
    ids = flat[flat_indices]

    new = np.ones(flat_indices.size, bool)
    new[1:] = (np.diff(flat_indices) != 1) | (ids[1:] != ids[:-1]) | (row[1:] != row[:-1])
    firsts = np.flatnonzero(new)
    sizes = np.diff(firsts, append=flat_indices.size)
    begins, origins, span_ids = flat_indices[firsts], row[firsts] * width, ids[firsts]
    # Both boundaries lie in the span's sequence, which begins and ends with special tokens. If a sequence lacks these,
    # the first or last position of the span stands for the missing boundary.
    left = np.maximum(begins - 1, origins)
    left = np.where(flat[left] == span_ids, left, begins)
    right = np.minimum(begins + sizes, origins + width - 1)
    right = np.where(flat[right] == span_ids, right, begins + sizes - 1)

    targets = SpanTargets(*np.zeros((3, count, most), np.int32))
    targets.span_left.reshape(-1)[real] = np.repeat(left - origins, sizes)
    targets.span_right.reshape(-1)[real] = np.repeat(right - origins, sizes)
    targets.span_offsets.reshape(-1)[real] = flat_indices - np.repeat(begins - 1, sizes)
    return targets
