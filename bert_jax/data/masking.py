"""Masking for the masked language model: which tokens are predicted, and what stands in their place.

Everything is a function of (seed, epoch, sequence key, rate, unit) and the position within the sequence (law 2), by
counter-based hashing: no batch, order of rows, packing or process changes a mask. Vectorised over all sequences.

The rules follow google-research/bert, create_pretraining_data.py (Devlin et al. 2019, section 3.1, and the
whole-word variant of 2019-05-31): a sequence of n slots has a budget of max(1, round(rate * n)) predictions; words
come in random order, each is taken whole if it still fits and skipped if not; a chosen token becomes [MASK] in 80% of
cases, a random token in 10%, and stays itself in 10%. What differs from there:
  - no special token is ever predicted, [UNK] and [MASK] included (there: all but [CLS] and [SEP] may be);
  - a random token is never a special one (there: any line of the vocabulary);
  - a "##" piece at the start of a segment or after a special token begins a word (there: it goes on with the last word
    before the special token);
  - where no word fits the budget, the first tokens of the first word are taken, so that a sequence has at least one
    prediction unless it holds special tokens alone (there: none);
  - no cap on predictions besides the rate: a row has room for all (there: max_predictions_per_seq).
"""

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64, Integer, UInt, UInt8, UInt64

from bert_jax.command import UserError
from bert_jax.data import hashing
from bert_jax.data.example import Rows

UNITS = ("token", "word")

# What a token is to the masker.
_SPECIAL, _WHOLE, _INSIDE = 0, 1, 2

# Of the 2**32 values of a hash: below the first a chosen token becomes [MASK], below the second a random one.
_MASK_BELOW = round(0.8 * 2**32)
_RANDOM_BELOW = round(0.9 * 2**32)

# A sort key is the high 20 bits of a word's hash above its position. In 32 bits (sorted by vector instructions) the
# position has 12; wider rows take 64 bits and the same 20, so the width of a row changes no mask. Two words of equal
# hash, one pair in a million, keep their order in the sequence.
_HASH_BITS = 20
_NARROW_WIDTH = 2 ** (32 - _HASH_BITS) - 1

# Words looked at together once the easy ones are taken; any number gives the same masks.
_LOOK_AHEAD = 8

# Streams of hashes that must not know of each other.
_STREAMS = np.array([[1], [2]])  # of the order of words, and of what replaces a token


@runtime_checkable
class TokenFacts(Protocol):
    """What masking asks of a tokenizer (bert_jax.tokenizer.Tokenizer)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def mask_id(self) -> int: ...
    @property
    def special_ids(self) -> tuple[int, ...]: ...
    @property
    def continuation(self) -> Bool[np.ndarray, "V"]: ...  # True where the id is the inside of a word


class Masked(NamedTuple):
    """Masked rows: `counts` predictions a row, at ascending row-local positions; fillers are 0 in both."""

    input_ids: Int32[np.ndarray, "R T"]  # after masking
    positions: Int32[np.ndarray, "R M"]
    ids: Int32[np.ndarray, "R M"]  # the truth
    counts: Int32[np.ndarray, "R"]


class _Sequences(NamedTuple):
    """The Q sequences present in some rows, each from column 0 of a row of its own, W the widest."""

    kinds: UInt8[np.ndarray, "Q W"]  # special beyond the sequence's end
    keys: UInt64[np.ndarray, "Q"]
    epochs: Int64[np.ndarray, "Q"]
    lengths: Int64[np.ndarray, "Q"]
    first_lengths: Int64[np.ndarray, "Q"]
    offsets: Int64[np.ndarray, "Q"]  # of its slot 0 among the R*T slots of the rows


class Masker:
    """Masks rows for one tokenizer, unit ("token" or "word"), rate and seed.

    The rate is the share of a sequence's slots, [CLS] and [SEP] counted, that its budget of predictions is. Raises
    UserError for another unit or a rate outside (0, 1].
    """

    def __init__(self, tokenizer: TokenFacts, unit: str, rate: float, seed: int) -> None:
        if unit not in UNITS:
            raise UserError(f"unit of masking {unit!r}; it is one of: {', '.join(UNITS)}")
        if not 0 < rate <= 1:
            raise UserError(f"mask rate {rate}; it must be above 0 and at most 1, as 0.15")
        self.unit, self.rate, self.seed = unit, rate, seed
        self._mask_id = tokenizer.mask_id
        self._kinds = np.full(tokenizer.vocab_size, _WHOLE, np.uint8)
        if unit == "word":
            self._kinds[tokenizer.continuation] = _INSIDE
        self._kinds[list(tokenizer.special_ids)] = _SPECIAL
        self._ordinary_ids = np.flatnonzero(self._kinds != _SPECIAL)

    def apply(self, rows: Rows, epochs: Int64[np.ndarray, "R"], max_predictions: int) -> Masked:
        """The rows as masked in the given epoch of each.

        A sequence without a maskable token (none but special ones) is the only kind with no prediction. Raises
        ValueError when a row has more than max_predictions (see data.example.max_predictions).
        """
        row_count, width = rows.input_ids.shape
        sequences = _sequences(rows, self._kinds.take(rows.input_ids), epochs)
        budgets = np.maximum(1, np.rint(self.rate * sequences.lengths)).astype(np.int64)
        order_states, replacement_states = hashing.combine(_STREAMS, self.seed, sequences.epochs, sequences.keys)
        chosen = _choose(sequences, budgets, order_states)

        sequence, position = np.divmod(np.flatnonzero(chosen), chosen.shape[1])
        slots = sequences.offsets[sequence] + position
        row = slots // width
        counts = np.bincount(row, minlength=row_count)
        if counts.size and counts.max() > max_predictions:
            raise ValueError(f"a row has {counts.max()} predictions, and max_predictions is {max_predictions}")
        column = np.arange(slots.size) - np.repeat(np.cumsum(counts) - counts, counts)

        input_ids = rows.input_ids.astype(np.int32)
        truth = input_ids.reshape(-1)[slots]
        input_ids.reshape(-1)[slots] = self._replacements(truth, replacement_states[sequence], position)
        positions, ids = np.zeros((2, row_count, max_predictions), np.int32)
        positions[row, column] = slots - row * width
        ids[row, column] = truth
        return Masked(input_ids, positions, ids, counts.astype(np.int32))

    def _replacements(
        self, truth: Int32[np.ndarray, "K"], states: UInt64[np.ndarray, "K"], positions: Int64[np.ndarray, "K"]
    ) -> Integer[np.ndarray, "K"]:
        """[MASK], a token uniform over the ordinary ones, or the truth, by the two halves of one 64-bit hash."""
        words = hashing.mix(states + positions.astype(np.uint64) * hashing.GAMMA)
        case = words >> np.uint64(32)
        random_ids = self._ordinary_ids[hashing.below(words.astype(np.uint32), self._ordinary_ids.size)]
        return np.where(case < _MASK_BELOW, self._mask_id, np.where(case < _RANDOM_BELOW, random_ids, truth))


def _sequences(rows: Rows, kinds: UInt8[np.ndarray, "R T"], epochs: Int64[np.ndarray, "R"]) -> _Sequences:
    """Cuts packed rows into their sequences; rows of one sequence are taken as they stand."""
    row_count, width = kinds.shape
    lengths = rows.sequence_lengths.astype(np.int64)
    starts = np.cumsum(lengths, axis=1) - lengths + np.arange(row_count)[:, None] * width
    pack = lengths.shape[1]
    epochs = np.repeat(epochs, pack)
    flat = (rows.sequence_keys.reshape(-1), epochs, lengths.reshape(-1), rows.first_segment_lengths.astype(np.int64))
    keys, epochs, lengths, first_lengths = (column.reshape(-1) for column in flat)
    starts = starts.reshape(-1)
    if pack > 1:
        present = np.flatnonzero(lengths)
        keys, epochs, starts = keys[present], epochs[present], starts[present]
        lengths, first_lengths = lengths[present], first_lengths[present]
        columns = np.arange(lengths.max(initial=1))
        kinds = kinds.reshape(-1).take(starts[:, None] + columns, mode="clip")
    kinds = kinds * (np.arange(kinds.shape[1]) < lengths[:, None])
    return _Sequences(kinds, keys, epochs, lengths, first_lengths, starts)


def _choose(
    sequences: _Sequences, budgets: Int64[np.ndarray, "Q"], states: UInt64[np.ndarray, "Q"]
) -> Bool[np.ndarray, "Q W"]:
    """The chosen slots: words in the order of their hashes, whole while they fit, within each budget."""
    starts, inside = _words(sequences)
    keys, position_mask, absent = _sorted_keys(starts, states)
    chosen = np.zeros(starts.shape, bool)
    count, width = starts.shape

    # The words before the first that does not fit are taken all at once. As a word has a token at least, no more
    # than a budget's number of them can be.
    head = keys[:, : min(width, int(budgets.max(initial=1)))]
    slots, lengths = _located(head, np.arange(count), inside, position_mask, absent)
    totals = np.cumsum(lengths, axis=1)
    taken = totals <= budgets[:, None]
    _mark(chosen, slots[taken], lengths[taken])
    remaining = budgets - np.where(taken, totals, 0).max(axis=1, initial=0)
    next_word = taken.sum(axis=1)

    # From there on word by word, over the sequences that still have budget and words: soon a few.
    active = np.flatnonzero(remaining > 0)
    while active.size:
        columns = next_word[active, None] + np.arange(_LOOK_AHEAD)
        ahead = np.where(columns < width, keys[active[:, None], np.minimum(columns, width - 1)], absent)
        slots, lengths = _located(ahead, active, inside, position_mask, absent)
        left, taken = remaining[active], np.zeros(lengths.shape, bool)
        for column, length in enumerate(lengths.T):
            taken[:, column] = length <= left
            left -= length * taken[:, column]
        _mark(chosen, slots[taken], lengths[taken])
        remaining[active] = left
        next_word[active] += _LOOK_AHEAD
        active = active[(left > 0) & (ahead[:, -1] != absent)]

    # No word fitted: the head of the first one.
    none = np.flatnonzero((remaining == budgets) & (keys[:, 0] != absent))
    _mark(chosen, none * width + (keys[none, 0] & position_mask).astype(np.int64), budgets[none])
    return chosen


def _located(
    keys: UInt[np.ndarray, "A C"],
    sequences: Int64[np.ndarray, "A"],
    inside: Bool[np.ndarray, "Q W"],
    position_mask: int,
    absent: int,
) -> tuple[Int64[np.ndarray, "A C"], Int64[np.ndarray, "A C"]]:
    """The first slot, of the Q*W, and the length of each word; an absent one is longer than any budget."""
    width = inside.shape[1]
    present = keys != absent
    slots = (keys & position_mask).astype(np.int64) + sequences[:, None] * width
    lengths = np.full(keys.shape, width + 1)
    lengths[present] = _word_lengths(inside, slots[present])
    return slots, lengths


def _words(sequences: _Sequences) -> tuple[Bool[np.ndarray, "Q W"], Bool[np.ndarray, "Q W"]]:
    """Which slots start a word, and which go on with one.

    A word is a token with the continuations after it. A continuation after a special token or at the start of a
    segment starts a word too: what truncation left of one.
    """
    kinds = sequences.kinds
    inside = kinds == _INSIDE
    inside[:, 0] = False
    inside[:, 1:] &= kinds[:, :-1] != _SPECIAL
    second = np.flatnonzero(sequences.first_lengths < kinds.shape[1])
    inside[second, sequences.first_lengths[second]] = False
    return (kinds != _SPECIAL) & ~inside, inside


def _sorted_keys(
    starts: Bool[np.ndarray, "Q W"], states: UInt64[np.ndarray, "Q"]
) -> tuple[UInt[np.ndarray, "Q W"], int, int]:
    """The words of each sequence in the order of their hashes, as keys with the position in the low bits.

    Also the mask of those bits, and the key that stands for no word, which sorts last.
    """
    width = starts.shape[1]
    positions = np.arange(width, dtype=np.uint32)
    # MurmurHash3's 32-bit finaliser (Appleby, public domain) with half of the sequence's state before each product:
    # 32-bit lanes are several times as fast as 64-bit ones, and these are most of the work.
    words = positions * np.uint32(0x9E3779B1) + states.astype(np.uint32)[:, None]
    words ^= words >> np.uint32(16)
    words *= np.uint32(0x85EBCA6B)
    words ^= words >> np.uint32(13)
    words += (states >> np.uint64(32)).astype(np.uint32)[:, None]
    words *= np.uint32(0xC2B2AE35)
    words ^= words >> np.uint32(16)

    words >>= np.uint32(32 - _HASH_BITS)
    keys: UInt[np.ndarray, "Q W"] = words if width <= _NARROW_WIDTH else words.astype(np.uint64)
    bits = keys.dtype.itemsize * 8
    keys <<= bits - _HASH_BITS
    keys |= positions.astype(keys.dtype)
    keys |= starts.astype(keys.dtype) - 1  # all ones where no word starts: the key for none
    keys.sort(axis=1)
    return keys, 2 ** (bits - _HASH_BITS) - 1, 2**bits - 1


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


def _mark(chosen: Bool[np.ndarray, "Q W"], slots: Int64[np.ndarray, "K"], lengths: Int[np.ndarray, "K"]) -> None:
    """Marks `lengths` slots from each of `slots` on."""
    flat = chosen.reshape(-1)
    step = 0
    while slots.size:
        flat[slots + step] = True
        step += 1
        longer = lengths > step
        slots, lengths = slots[longer], lengths[longer]
