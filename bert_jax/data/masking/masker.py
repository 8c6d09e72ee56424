"""Masks rows for all sequences at once: chooses tokens and replaces them. The package's docstring has the rules.

Read `Masker.apply` first. Before it come what it applies to the chosen tokens: replacement, the removal of infilled
spans, and shuffled trigrams.
"""

import itertools
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from bert_jax.array_types import Bool, Float64, Int32, Int64, Integer, UInt8, UInt32, UInt64
from bert_jax.data import order as hashing
from bert_jax.data.example import Rows
from bert_jax.data.masking import rule as cutting
from bert_jax.data.masking.rule import (
    ATTACHED,
    INSIDE,
    SPECIAL,
    UNSPACED,
    WHOLE,
    MaskingRule,
    Sequences,
    ShuffledWords,
    WordBoundaries,
)
from bert_jax.data.masking.selection import Runs, choose_runs, choose_words, run_starts
from bert_jax.errors import UserError


class Replacer:
    """Replaces tokens in the shares of the rule: [MASK], a random ordinary token, or the token itself.

    `counts` is the number of occurrences of each id, which random tokens by unigram frequency need. Raises UserError if
    it counts no ordinary token.
    """

    def __init__(
        self,
        rule: MaskingRule,
        mask_id: int,
        ordinary_ids: Int64[np.ndarray, "K"],
        counts: Int64[np.ndarray, "V"] | None,
    ) -> None:
        self._mask_id, self._ordinary_ids = mask_id, ordinary_ids
        # Thresholds for a uniform 32-bit value: [MASK] below the first, a random token below the second.
        self._mask_below = round(rule.split.mask * 2**32)
        self._random_below = round((rule.split.mask + rule.split.random) * 2**32)
        self._by_count = rule.random == "unigram"
        self._thresholds = None if counts is None else _thresholds(counts[ordinary_ids])

    def replace(
        self, original: Int32[np.ndarray, "K"], cases: UInt64[np.ndarray, "K"], picks: UInt64[np.ndarray, "K"]
    ) -> Integer[np.ndarray, "K"]:
        """The replacement of each token.

        cases   64-bit hashes whose high half decides between [MASK], a random token and the token itself
        picks   64-bit hashes whose low half picks the random token
        Raises ValueError if the rule needs unigram counts and none were given.
        """
        case = cases >> np.uint64(32)
        random = np.flatnonzero((case >= self._mask_below) & (case < self._random_below))
        replaced = np.where(case < self._mask_below, self._mask_id, original)
        replaced[random] = self._random(picks[random].astype(np.uint32))
        return replaced

    def _random(self, values: UInt32[np.ndarray, "K"]) -> Int64[np.ndarray, "K"]:
        if not self._by_count:
            return self._ordinary_ids[hashing.bounded(values, self._ordinary_ids.size)]
        if self._thresholds is None:
            raise ValueError("random tokens by unigram frequency need unigram_counts")
        return self._ordinary_ids[np.searchsorted(self._thresholds, values.astype(np.uint64), side="right")]


def _thresholds(counts: Int64[np.ndarray, "K"]) -> UInt64[np.ndarray, "K"]:
    """The end of each id's share of the 2**32 values; each share is exact up to one value."""
    totals = np.cumsum(counts).tolist()
    if not totals or totals[-1] <= 0:
        raise UserError("the unigram counts contain no ordinary token to sample from; build the examples again")
    return np.array([total * 2**32 // totals[-1] for total in totals], np.uint64)


class Shortened(NamedTuple):
    """Rows after infilling (Lewis et al. 2020, BART, section 2.2). The positions that become free are padding."""

    input_ids: Int32[np.ndarray, "R T"]
    sequence_lengths: Integer[np.ndarray, "R S"]
    first_segment_lengths: Integer[np.ndarray, "R S"]
    places: Int64[np.ndarray, "Q W"]  # for each position that stays, its new flat index among the R*T positions


def shorten(
    rows: Rows,
    input_ids: Int32[np.ndarray, "R T"],
    sequences: Sequences,
    runs: Runs,
    pad_id: int,
    mask_id: int,
) -> Shortened:
    """Removes all positions of each run but the first, and inserts a mask where a run is empty.

    input_ids   those of the rows, with the first position of each run already replaced

    At most as many masks are inserted in a sequence as positions are removed from it, so no sequence becomes longer and
    packing changes nothing.
    """
    columns = np.arange(runs.chosen.shape[1])
    stays = (columns < sequences.lengths[:, None]) & (~runs.chosen | runs.firsts)
    removed = sequences.lengths - np.count_nonzero(stays, axis=1)
    inserts = runs.empty & (np.cumsum(runs.empty, axis=1) <= removed[:, None])
    widths = stays.astype(np.int64) + inserts
    ends = np.cumsum(widths, axis=1)
    first_lengths = (widths * (columns < sequences.first_lengths[:, None])).sum(axis=1)

    present = np.flatnonzero(rows.sequence_lengths)
    filled = np.flatnonzero(sequences.lengths)  # the same sequences among Q
    lengths, firsts = np.zeros((2, *rows.sequence_lengths.shape), rows.sequence_lengths.dtype)
    lengths.reshape(-1)[present] = ends[filled, -1]
    firsts.reshape(-1)[present] = first_lengths[filled]
    in_row = np.cumsum(lengths, axis=1, dtype=np.int64) - lengths
    starts = sequences.rows * input_ids.shape[1]
    starts[filled] += in_row.reshape(-1)[present]

    places = starts[:, None] + ends - 1
    ids = np.full_like(input_ids, pad_id)
    sequence, position = np.nonzero(stays)
    ids.reshape(-1)[places[stays]] = input_ids.reshape(-1)[sequences.offsets[sequence] + position]
    ids.reshape(-1)[places[inserts] - 1] = mask_id
    return Shortened(ids, lengths, firsts, places)


# Shuffled trigrams of tokens that are not masked, whose original order the model predicts (Wang et al. 2019,
# StructBERT, section 2.2.1).

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


# Tags of independent hash streams; data_prep/noise.py uses another one.
_ORDER, _REPLACEMENT, _LENGTH, _REORDER, _SHUFFLE = 1, 2, 4, 5, 6


@runtime_checkable
class MaskingTokenizer(Protocol):
    """The attributes of a vocabulary (bert_jax.tokenization.vocabulary.Vocabulary) that masking uses."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def mask_id(self) -> int: ...
    @property
    def special_ids(self) -> tuple[int, ...]: ...
    @property
    def continuation(self) -> Bool[np.ndarray, "V"]: ...  # True for ids that continue a word
    @property
    def unspaced(self) -> Bool[np.ndarray, "V"]: ...  # True for ids of scripts without spaces between words
    @property
    def attached(self) -> Bool[np.ndarray, "V"]: ...  # True for ids that begin within a character or with its mark


def token_kinds(tokenizer: MaskingTokenizer, words: str | None = "spaces") -> UInt8[np.ndarray, "V"]:
    """The kind of each id (bert_jax.data.masking.rule) by a rule for words; None: each token is a word."""
    kinds = np.full(tokenizer.vocab_size, WHOLE, np.uint8)
    if words is not None:
        kinds[tokenizer.continuation] = INSIDE
    if words == "scripts":
        kinds[tokenizer.unspaced] = UNSPACED
        kinds[tokenizer.attached] = ATTACHED
    kinds[list(tokenizer.special_ids)] = SPECIAL
    return kinds


class Masked(NamedTuple):
    """Masked rows: `counts` predictions per row, at ascending positions in the row; fillers are 0 in both arrays.

    The lengths are those of the rows, unless infilling made sequences shorter.
    """

    input_ids: Int32[np.ndarray, "R T"]  # after masking
    positions: Int32[np.ndarray, "R M"]
    ids: Int32[np.ndarray, "R M"]  # the original ids
    counts: Int32[np.ndarray, "R"]
    sequence_lengths: Integer[np.ndarray, "R S"]
    first_segment_lengths: Integer[np.ndarray, "R S"]


class _Choice(NamedTuple):
    """The positions to be predicted, and what happens to them."""

    predicted: Bool[np.ndarray, "Q W"]
    moved: Bool[np.ndarray, "Q W"]  # those of them whose tokens are shuffled
    runs: Runs | None  # the spans to be shortened, with unit infill


class Masker:
    """Masks rows for one tokenizer, rule and seed.

    `unigram_counts` are required by `apply` if the rule samples random tokens by frequency; `count` does not use them.
    """

    def __init__(
        self,
        tokenizer: MaskingTokenizer,
        rule: MaskingRule,
        seed: int,
        unigram_counts: Int64[np.ndarray, "V"] | None = None,
    ) -> None:
        self.rule, self.seed = rule, seed
        self._kinds = token_kinds(tokenizer, None if rule.unit == "token" else rule.words)
        ordinary_ids = np.flatnonzero(self._kinds != SPECIAL)
        self._pad_id, self._mask_id = tokenizer.pad_id, tokenizer.mask_id
        self._replacer = Replacer(rule, tokenizer.mask_id, ordinary_ids, unigram_counts)

    def apply(
        self,
        rows: Rows,
        epochs: Int64[np.ndarray, "R"],
        max_predictions: int,
        rates: Float64[np.ndarray, "R"] | None = None,
    ) -> Masked:
        """Masks each row as in its given epoch, at its own rate if `rates` are given, otherwise at the rule's rate.

        Every sequence gets a prediction unless all its tokens are special. Raises ValueError if a row has more than
        max_predictions (see data.example.max_predictions).
        """
        row_count, width = rows.input_ids.shape
        sequences = cutting.cut(rows, self._kinds.take(rows.input_ids))
        epochs = epochs[sequences.rows]
        chosen = self._choose_positions(sequences, epochs, rates)
        # Of each prediction, ascending.
        sequence, position = np.divmod(np.flatnonzero(chosen.predicted), chosen.predicted.shape[1])
        flat_indices = sequences.offsets[sequence] + position
        row = sequences.rows[sequence]
        counts = np.bincount(row, minlength=row_count)
        if counts.size and counts.max() > max_predictions:
            raise ValueError(f"a row has {counts.max()} predictions, and max_predictions is {max_predictions}")
        column = np.arange(flat_indices.size) - np.repeat(np.cumsum(counts) - counts, counts)

        states = hashing.combine(_REPLACEMENT, self.seed, epochs, sequences.keys)[sequence]
        picks = cases = hashing.mix(states + position.astype(np.uint64) * hashing.GAMMA)
        if self.rule.unit == "span":
            # One random choice for the whole span: the hash of its first position.
            firsts = run_starts(sequence, position)
            cases = hashing.mix(states + firsts.astype(np.uint64) * hashing.GAMMA)
        input_ids = rows.input_ids.astype(np.int32)
        original = input_ids.reshape(-1)[flat_indices]
        replaced = self._replacer.replace(original, cases, picks)
        if self.rule.reorder_rate:
            at = np.flatnonzero(chosen.moved[sequence, position])
            states = hashing.combine(_SHUFFLE, self.seed, epochs, sequences.keys)[sequence[at]]
            replaced[at] = shuffled(original[at], states, position[at])
        input_ids.reshape(-1)[flat_indices] = replaced
        lengths, first_lengths = rows.sequence_lengths, rows.first_segment_lengths
        if chosen.runs is not None:
            shorter = shorten(rows, input_ids, sequences, chosen.runs, self._pad_id, self._mask_id)
            input_ids, lengths, first_lengths, places = shorter
            flat_indices = places[sequence, position]
        positions, ids = np.zeros((2, row_count, max_predictions), np.int32)
        positions[row, column] = flat_indices - row * width
        ids[row, column] = original
        return Masked(input_ids, positions, ids, counts.astype(np.int32), lengths, first_lengths)

    def count(self, rows: Rows, epochs: Int64[np.ndarray, "R"]) -> Int64[np.ndarray, "R"]:
        """The number of predictions of each row in its epoch.

        If a sequence has at least as many one-token words as its budget, every order of words uses up the budget,
        because such a word always fits. Most sequences therefore need no random order.
        """
        sequences = cutting.cut(rows, self._kinds.take(rows.input_ids))
        counts = self._budgets(sequences, None)
        met = np.zeros(len(counts), bool)
        if self.rule.unit in ("token", "word") and not self.rule.reorder_rate:
            starts, inside = cutting.find_words(sequences)
            starts[:, :-1] &= ~inside[:, 1:]
            met = np.count_nonzero(starts, axis=1) >= counts
        undecided = np.flatnonzero(~met)
        if undecided.size:
            some = Sequences(*(column[undecided] for column in sequences))
            predicted = self._choose_positions(some, epochs[some.rows], None).predicted
            counts[undecided] = np.count_nonzero(predicted, axis=1)
        return np.bincount(sequences.rows, counts, minlength=len(rows.input_ids)).astype(np.int64)

    def count_words(self, rows: Rows) -> tuple[int, int]:
        """The number of words of the rows, and of those that are longer than the budget of their sequence.

        The latter are predicted only where nothing else fits, and then in part.
        """
        sequences = cutting.cut(rows, self._kinds.take(rows.input_ids))
        words = cutting.find_words(sequences)
        lasts = words.starts | words.inside
        lasts[:, :-1] &= ~words.inside[:, 1:]
        starts = np.flatnonzero(words.starts)
        lengths = np.flatnonzero(lasts) - starts + 1
        budgets = self._budgets(sequences, None)[starts // words.starts.shape[1]]
        return starts.size, int(np.count_nonzero(lengths > budgets))

    def _budgets(self, sequences: Sequences, rates: Float64[np.ndarray, "R"] | None) -> Int64[np.ndarray, "Q"]:
        rate = self.rule.rate if rates is None else rates[sequences.rows]
        return np.maximum(1, np.rint(rate * sequences.lengths)).astype(np.int64)

    def _choose_positions(
        self, sequences: Sequences, epochs: Int64[np.ndarray, "Q"], rates: Float64[np.ndarray, "R"] | None
    ) -> _Choice:
        budgets = self._budgets(sequences, rates)
        words = cutting.find_words(sequences)
        order = cutting.shuffle(words.starts, hashing.combine(_ORDER, self.seed, epochs, sequences.keys))
        if self.rule.unit in ("token", "word"):
            chosen = choose_words(words, order, budgets)
        else:
            states = hashing.combine(_LENGTH, self.seed, epochs, sequences.keys)
            runs = choose_runs(sequences, words, order, budgets, states, self.rule)
            if self.rule.unit == "infill":
                return _Choice(runs.firsts, np.broadcast_to(np.zeros(1, bool), runs.firsts.shape), runs)
            chosen = runs.chosen
        if not self.rule.reorder_rate:
            return _Choice(chosen, np.broadcast_to(np.zeros(1, bool), chosen.shape), None)
        free = candidates(sequences, words, chosen)
        order = cutting.shuffle(free, hashing.combine(_REORDER, self.seed, epochs, sequences.keys))
        trigrams = np.rint(self.rule.reorder_rate * sequences.lengths / LENGTH).astype(np.int64)
        moved = choose(order, trigrams)
        return _Choice(chosen | moved, moved, None)
