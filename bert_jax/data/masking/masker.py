"""Chooses tokens and replaces them, for all sequences of some rows at once. The package's docstring has the rules.

Read `Masker.apply` first. Rarer parts come later: shortening infilled spans, and shuffling trigrams.
"""

import itertools
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Bool, Float64, Int32, Int64, Integer, UInt8, UInt64
from bert_jax.data import order as hashing
from bert_jax.data.example import Rows
from bert_jax.data.masking import choices
from bert_jax.data.masking.choices import Choose
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
    cut,
    find_words,
    shuffle,
)
from bert_jax.data.masking.selection import Runs, choose_runs, choose_words, run_starts
from bert_jax.errors import UserError
from bert_jax.tokenization.vocabulary import Vocabulary

# Tags that make hash streams independent. data_prep/noise.py has another one.
_ORDER, _REPLACEMENT, _LENGTH, _REORDER, _SHUFFLE, _EXTENSION = 1, 2, 4, 5, 6, 7


def token_kinds(tokenizer: Vocabulary, words: str | None = "spaces") -> UInt8[np.ndarray, "V"]:
    """Returns the kind of every id (rule.py), given a rule for words; None: every token is a word."""
    # Later lines override earlier ones, and special tokens come last: they are never masked, whatever else they are.
    kinds = np.full(tokenizer.vocab_size, WHOLE, np.uint8)
    if words is not None:
        kinds[tokenizer.continuation] = INSIDE
    if words == "scripts":
        kinds[tokenizer.unspaced] = UNSPACED
        kinds[tokenizer.attached] = ATTACHED
    kinds[list(tokenizer.special_ids)] = SPECIAL
    return kinds


class Masked(NamedTuple):
    """Masked rows."""

    input_ids: Int32[np.ndarray, "R T"]  # after masking
    positions: Int32[np.ndarray, "R M"]  # of predictions, ascending; 0 in fillers
    ids: Int32[np.ndarray, "R M"]  # the original ids; 0 in fillers
    counts: Int32[np.ndarray, "R"]  # predictions per row; the rest of M are fillers
    sequence_lengths: Integer[np.ndarray, "R S"]  # as stored, unless infilling shortened sequences
    first_segment_lengths: Integer[np.ndarray, "R S"]


class _Choice(NamedTuple):
    """The positions to predict."""

    predicted: Bool[np.ndarray, "Q W"]
    moved: Bool[np.ndarray, "Q W"]  # predicted positions whose tokens are shuffled
    runs: Runs | None  # the spans to shorten, with unit infill


class Masker:
    """Masks rows for one tokenizer, rule and seed.

    Args:
        unigram_counts: How often every id occurs. Only `apply` needs it, if the rule samples tokens by frequency.
        choose: The rule of an extension that chooses the tokens instead, and its name (choices.py).

    Raises:
        UserError: unigram_counts has no ordinary token.
    """

    def __init__(
        self,
        tokenizer: Vocabulary,
        rule: MaskingRule,
        seed: int,
        unigram_counts: Int64[np.ndarray, "V"] | None = None,
        choose: tuple[Choose, str] | None = None,
    ) -> None:
        if rule.unit != "token" and tokenizer.kind == "word_bpe":
            raise UserError(
                f"masking unit {rule.unit} needs pieces that show where words begin, but those of this vocabulary show "
                "where words end. Use the masking unit token"
            )
        self.rule, self.seed, self._choose = rule, seed, choose
        self._kinds = token_kinds(tokenizer, None if rule.unit == "token" else rule.words)
        self._pad_id, self._mask_id = tokenizer.pad_id, tokenizer.mask_id
        self._ordinary_ids = np.flatnonzero(self._kinds != SPECIAL)
        # Thresholds for a uniform 32-bit value: [MASK] below the first, a random token below the second.
        self._mask_below = round(rule.split.mask * 2**32)
        self._random_below = round((rule.split.mask + rule.split.random) * 2**32)
        self._thresholds: UInt64[np.ndarray, K] | None = None
        if unigram_counts is not None:
            # Each id owns a range of the 2**32 values, exact up to one value. A threshold is the end of a range.
            totals = np.cumsum(unigram_counts[self._ordinary_ids]).tolist()
            if not totals or totals[-1] <= 0:
                raise UserError("the unigram counts contain no ordinary token to sample from; build the examples again")
            self._thresholds = np.array([total * 2**32 // totals[-1] for total in totals], np.uint64)

    def apply(
        self,
        rows: Rows,
        epochs: Int64[np.ndarray, "R"],
        max_predictions: int,
        rates: Float64[np.ndarray, "R"] | None = None,
    ) -> Masked:
        """Masks rows. Every sequence gets a prediction, unless all its tokens are special.

        Args:
            epochs: The epoch of every row.
            max_predictions: M (data.example.max_predictions).
            rates: The mask rate of every row; None: the rule's rate.

        Raises:
            ValueError: A row has more than max_predictions predictions.
        """
        row_count, width = rows.input_ids.shape
        sequences = cut(rows, self._kinds.take(rows.input_ids))
        epochs = epochs[sequences.rows]
        chosen = self._choose_positions(rows, sequences, epochs, rates)
        # From here on, arrays have one element per prediction, ordered by row and position. A prediction has a sequence
        # and a position in it, a row, a flat index among the R*T positions of all rows, and a column among the M.
        sequence, position = np.divmod(np.flatnonzero(chosen.predicted), chosen.predicted.shape[1])
        flat_indices = sequences.offsets[sequence] + position
        row = sequences.rows[sequence]
        counts = np.bincount(row, minlength=row_count)
        # Dropping the excess would make a sequence's masks depend on the other sequences of its row, against law 2.
        if counts.size and counts.max() > max_predictions:
            raise ValueError(f"a row has {counts.max()} predictions, and max_predictions is {max_predictions}")
        column = np.arange(flat_indices.size) - np.repeat(np.cumsum(counts) - counts, counts)

        # One hash per prediction: its high half decides between mask, random and keep, its low half picks the random
        # token.
        states = hashing.combine(_REPLACEMENT, self.seed, epochs, sequences.keys)[sequence]
        picks = cases = hashing.mix(states + position.astype(np.uint64) * hashing.GAMMA)
        if self.rule.unit == "span":
            # The hash of a span's first position decides for the whole span.
            firsts = run_starts(sequence, position)
            cases = hashing.mix(states + firsts.astype(np.uint64) * hashing.GAMMA)
        input_ids = rows.input_ids.astype(np.int32)
        original = input_ids.reshape(-1)[flat_indices]
        replaced = self._replace(original, cases, picks)
        if self.rule.reorder_rate:
            moved = np.flatnonzero(chosen.moved[sequence, position])
            states = hashing.combine(_SHUFFLE, self.seed, epochs, sequences.keys)[sequence[moved]]
            replaced[moved] = _shuffle_trigrams(original[moved], states, position[moved])
        input_ids.reshape(-1)[flat_indices] = replaced
        lengths, first_lengths = rows.sequence_lengths, rows.first_segment_lengths
        if chosen.runs is not None:
            shorter = _shorten(rows, input_ids, sequences, chosen.runs, self._pad_id, self._mask_id)
            input_ids, lengths, first_lengths, places = shorter
            flat_indices = places[sequence, position]
        # Fillers keep position 0 and id 0. Their weight is 0.
        positions, ids = np.zeros((2, row_count, max_predictions), np.int32)
        positions[row, column] = flat_indices - row * width
        ids[row, column] = original
        return Masked(input_ids, positions, ids, counts.astype(np.int32), lengths, first_lengths)

    def count(self, rows: Rows, epochs: Int64[np.ndarray, "R"]) -> Int64[np.ndarray, "R"]:
        """Counts the predictions in every row, as in its epoch."""
        sequences = cut(rows, self._kinds.take(rows.input_ids))
        counts = self._budgets(sequences, None)
        met = np.zeros(len(counts), bool)
        # A word of one token always fits. If a sequence has at least as many of these as its budget, any order of words
        # uses up the budget. So most sequences need no random order.
        if self._choose is None and self.rule.unit in ("token", "word") and not self.rule.reorder_rate:
            starts, inside = find_words(sequences)
            starts[:, :-1] &= ~inside[:, 1:]
            met = np.count_nonzero(starts, axis=1) >= counts
        undecided = np.flatnonzero(~met)
        if undecided.size:
            others = Sequences(*(column[undecided] for column in sequences))
            predicted = self._choose_positions(rows, others, epochs[others.rows], None).predicted
            counts[undecided] = np.count_nonzero(predicted, axis=1)
        return np.bincount(sequences.rows, counts, minlength=len(rows.input_ids)).astype(np.int64)

    def count_words(self, rows: Rows) -> tuple[int, int]:
        """Counts all words, and those longer than their sequence's budget.

        The latter are predicted only if nothing else fits, and then only in part.
        """
        sequences = cut(rows, self._kinds.take(rows.input_ids))
        words = find_words(sequences)
        lasts = words.starts | words.inside
        lasts[:, :-1] &= ~words.inside[:, 1:]
        starts = np.flatnonzero(words.starts)
        lengths = np.flatnonzero(lasts) - starts + 1
        budgets = self._budgets(sequences, None)[starts // words.starts.shape[1]]
        return starts.size, int(np.count_nonzero(lengths > budgets))

    def _budgets(self, sequences: Sequences, rates: Float64[np.ndarray, "R"] | None) -> Int64[np.ndarray, "Q"]:
        rate = self.rule.rate if rates is None else rates[sequences.rows]
        # np.rint rounds halves to even. max_predictions adds 0.5 to cover either direction.
        return np.maximum(1, np.rint(rate * sequences.lengths)).astype(np.int64)

    def _choose_positions(
        self,
        rows: Rows,
        sequences: Sequences,
        epochs: Int64[np.ndarray, "Q"],
        rates: Float64[np.ndarray, "R"] | None,
    ) -> _Choice:
        budgets = self._budgets(sequences, rates)
        words = find_words(sequences)
        # A read-only view of one element takes no memory.
        none_moved = np.broadcast_to(np.zeros(1, bool), words.starts.shape)
        if self._choose is not None:
            states = hashing.combine(_EXTENSION, self.seed, epochs, sequences.keys)
            return _Choice(choices.choose(*self._choose, rows, sequences, words, budgets, states), none_moved, None)
        order = shuffle(words.starts, hashing.combine(_ORDER, self.seed, epochs, sequences.keys))
        if self.rule.unit in ("token", "word"):
            chosen = choose_words(words, order, budgets)
        else:
            states = hashing.combine(_LENGTH, self.seed, epochs, sequences.keys)
            runs = choose_runs(sequences, words, order, budgets, states, self.rule)
            if self.rule.unit == "infill":
                return _Choice(runs.firsts, none_moved, runs)
            chosen = runs.chosen
        if not self.rule.reorder_rate:
            return _Choice(chosen, none_moved, None)
        # Trigrams are chosen after the masks and avoid them, so a reorder rate changes no mask.
        free = _trigram_starts(sequences, words, chosen)
        order = shuffle(free, hashing.combine(_REORDER, self.seed, epochs, sequences.keys))
        trigrams = np.rint(self.rule.reorder_rate * sequences.lengths / LENGTH).astype(np.int64)
        moved = _choose_trigrams(order, trigrams)
        return _Choice(chosen | moved, moved, None)

    def _replace(
        self, original: Int32[np.ndarray, "K"], cases: UInt64[np.ndarray, "K"], picks: UInt64[np.ndarray, "K"]
    ) -> Integer[np.ndarray, "K"]:
        """Replaces tokens in the rule's shares: by [MASK], by a random ordinary token, or not at all.

        Args:
            cases: Hashes whose high halves choose between the three.
            picks: Hashes whose low halves pick random tokens.
        """
        case = cases >> np.uint64(32)
        random = np.flatnonzero((case >= self._mask_below) & (case < self._random_below))
        replaced = np.where(case < self._mask_below, self._mask_id, original)
        values = picks[random].astype(np.uint32)
        if self.rule.random != "unigram":
            indices = hashing.bounded(values, self._ordinary_ids.size)
        elif self._thresholds is not None:
            indices = np.searchsorted(self._thresholds, values.astype(np.uint64), side="right")
        else:
            raise ValueError("random tokens by unigram frequency need unigram_counts")
        replaced[random] = self._ordinary_ids[indices]
        return replaced


def _shorten(
    rows: Rows, input_ids: Int32[np.ndarray, "R T"], sequences: Sequences, runs: Runs, pad_id: int, mask_id: int
) -> tuple[Int32[np.ndarray, "R T"], Integer[np.ndarray, "R S"], Integer[np.ndarray, "R S"], Int64[np.ndarray, "Q W"]]:
    """Infilling (Lewis et al. 2020, BART, section 2.2): removes all positions of a run but the first.

    Args:
        input_ids: The ids after the first position of every run was replaced.

    Returns:
        The new ids, sequence lengths and first segment lengths, and the new flat index, among the R*T positions, of
        every position that stays.
    """
    # An empty run inserts a mask, but a sequence never gets more masks than it loses positions. So no sequence becomes
    # longer, and packing does not matter. Free positions at the end of a row become padding.
    columns = np.arange(runs.chosen.shape[1])
    stays = (columns < sequences.lengths[:, None]) & (~runs.chosen | runs.firsts)
    removed = sequences.lengths - np.count_nonzero(stays, axis=1)
    inserts = runs.empty & (np.cumsum(runs.empty, axis=1) <= removed[:, None])
    widths = stays.astype(np.int64) + inserts  # new positions per old position; an inserted mask comes first
    ends = np.cumsum(widths, axis=1)
    new_first_lengths = (widths * (columns < sequences.first_lengths[:, None])).sum(axis=1)

    present = np.flatnonzero(rows.sequence_lengths)
    filled = np.flatnonzero(sequences.lengths)  # the same sequences, as indices of Q
    lengths, first_lengths = np.zeros((2, *rows.sequence_lengths.shape), rows.sequence_lengths.dtype)
    lengths.reshape(-1)[present] = ends[filled, -1]
    first_lengths.reshape(-1)[present] = new_first_lengths[filled]
    in_row = np.cumsum(lengths, axis=1, dtype=np.int64) - lengths
    starts = sequences.rows * input_ids.shape[1]
    starts[filled] += in_row.reshape(-1)[present]

    places = starts[:, None] + ends - 1
    ids = np.full_like(input_ids, pad_id)
    sequence, position = np.nonzero(stays)
    ids.reshape(-1)[places[stays]] = input_ids.reshape(-1)[sequences.offsets[sequence] + position]
    ids.reshape(-1)[places[inserts] - 1] = mask_id
    return ids, lengths, first_lengths, places


# Shuffled trigrams, whose original order the model predicts (Wang et al. 2019, StructBERT, section 2.2.1).

LENGTH = 3  # tokens in a trigram (the paper's K)

_ORDERS = np.array(list(itertools.permutations(range(LENGTH))))


def _trigram_starts(
    sequences: Sequences, words: WordBoundaries, chosen: Bool[np.ndarray, "Q W"]
) -> Bool[np.ndarray, "Q W"]:
    """Returns where a trigram can begin: before three ordinary, unchosen tokens in one segment."""
    free = (words.starts | words.inside) & ~chosen
    firsts = free.copy()
    for step in range(1, LENGTH):
        firsts[:, :-step] &= free[:, step:]
        firsts[:, max(0, free.shape[1] - step) :] = False
        # A trigram that begins `step` tokens before segment B would span both segments.
        over = np.flatnonzero((sequences.first_lengths >= step) & (sequences.first_lengths - step < free.shape[1]))
        firsts[over, sequences.first_lengths[over] - step] = False
    return firsts


def _choose_trigrams(order: ShuffledWords, budgets: Int64[np.ndarray, "Q"]) -> Bool[np.ndarray, "Q W"]:
    """Chooses trigrams in random order that do not overlap, up to `budgets` per sequence; returns their positions."""
    count, width = order.keys.shape
    chosen = np.zeros((count, width), bool)
    flat = chosen.reshape(-1)
    left = budgets.copy()
    for column in range(width):  # one candidate per sequence at a time, because it depends on those before
        active = np.flatnonzero((left > 0) & (order.keys[:, column] != order.absent))
        if not active.size:
            break
        flat_indices = (active * width + order.positions(order.keys[active, column]))[:, None] + np.arange(LENGTH)
        disjoint = ~flat[flat_indices].any(axis=1)
        flat[flat_indices[disjoint]] = True
        left[active[disjoint]] -= 1
    return chosen


def _shuffle_trigrams(
    original: Int32[np.ndarray, "K"], states: UInt64[np.ndarray, "K"], positions: Int64[np.ndarray, "K"]
) -> Int32[np.ndarray, "K"]:
    """Puts every trigram in one of its six orders, chosen by the sequence's state and the position."""
    # Positions ascend and trigrams do not overlap, so every three consecutive elements are one trigram.
    values = hashing.mix(states[::LENGTH] + positions[::LENGTH].astype(np.uint64) * hashing.GAMMA)
    picks = hashing.bounded((values >> np.uint64(32)).astype(np.uint32), len(_ORDERS))
    return np.take_along_axis(original.reshape(-1, LENGTH), _ORDERS[picks], axis=1).reshape(-1)
