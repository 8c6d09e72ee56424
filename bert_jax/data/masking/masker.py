"""Masks rows: chooses tokens and replaces them, for all sequences at once."""

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from bert_jax.array_types import Bool, Float64, Int32, Int64, Integer, UInt8
from bert_jax.data import hashing
from bert_jax.data.example import Rows
from bert_jax.data.masking import reorder
from bert_jax.data.masking import sequences as cutting
from bert_jax.data.masking.infilling import shorten
from bert_jax.data.masking.replacements import Replacer
from bert_jax.data.masking.rule import MaskingRule
from bert_jax.data.masking.run_selection import Runs, choose_runs, run_starts
from bert_jax.data.masking.sequences import ATTACHED, INSIDE, SPECIAL, UNSPACED, WHOLE, Sequences
from bert_jax.data.masking.word_selection import choose_words

# Tags of independent hash streams; data_prep/corruption.py uses another one.
_ORDER, _REPLACEMENT, _LENGTH, _REORDER, _SHUFFLE = 1, 2, 4, 5, 6


@runtime_checkable
class MaskingTokenizer(Protocol):
    """The attributes of a vocabulary (bert_jax.vocabulary.Vocabulary) that masking uses."""

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
    """The kind of each id (bert_jax.data.masking.sequences) by a rule for words; None: each token is a word."""
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
            replaced[at] = reorder.shuffled(original[at], states, position[at])
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
        free = reorder.candidates(sequences, words, chosen)
        order = cutting.shuffle(free, hashing.combine(_REORDER, self.seed, epochs, sequences.keys))
        trigrams = np.rint(self.rule.reorder_rate * sequences.lengths / reorder.LENGTH).astype(np.int64)
        moved = reorder.choose(order, trigrams)
        return _Choice(chosen | moved, moved, None)
