"""The masking rule, and the sequences and words that it applies to."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from bert_jax.array_types import Bool, Int64, UInt, UInt8, UInt64
from bert_jax.data.example import Rows
from bert_jax.errors import UserError

UNITS = ("token", "word", "ngram", "span", "infill")
RANDOM_TOKENS = ("uniform", "unigram")
WORDS = ("spaces", "scripts")
# The lengths of infilled spans in words are Poisson, 0 included (Lewis et al. 2020, section 2.2). Lengths above the
# maximum have a probability of 1e-11.
INFILL_MEAN = 3.0
INFILL_MAX = 20


class ReplacementShares(NamedTuple):
    """The shares of chosen tokens that become [MASK], become random tokens or stay. They sum to 1."""

    mask: float
    random: float
    keep: float


BERT_SHARES = ReplacementShares(0.8, 0.1, 0.1)  # Devlin et al. 2019, section 3.1


@dataclass(frozen=True)
class MaskingRule:
    """The masking unit, its rate, and how chosen tokens are replaced.

    Raises:
        UserError: A value is invalid.
    """

    unit: str = "token"
    # The share of a sequence's positions, [CLS] and [SEP] included, that is predicted. With unit infill: that is
    # replaced, since only the first position of a span is predicted.
    rate: float = 0.15
    split: ReplacementShares = BERT_SHARES
    random: str = "uniform"  # or unigram: by frequency in the training rows
    reorder_rate: float = 0.0  # share of positions in shuffled trigrams (StructBERT), added to masks
    ngram_max: int = 3  # words (Lan et al. 2020, section 4.1)
    span_p: float = 0.2  # of the geometric distribution of span lengths (Joshi et al. 2020, section 3.1)
    span_max: int = 10  # words (same source)
    # spaces: the vocabulary marks the beginnings of words; scripts: in scripts without spaces, every token is a word.
    words: str = "spaces"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("masking unit", self.unit, UNITS),
            ("choice of random tokens", self.random, RANDOM_TOKENS),
            ("rule for words", self.words, WORDS),
        ):
            if value not in known:
                raise UserError(f"unknown {name} {value!r}; choose from {', '.join(known)}")
        check_rate(self.rate)
        if not (all(share >= 0 for share in self.split) and math.isclose(sum(self.split), 1.0, abs_tol=1e-9)):
            raise UserError(
                f"mask split {','.join(map(str, self.split))} is invalid. Give three shares that sum to 1, for [MASK], "
                "random tokens and unchanged tokens, such as 0.8,0.1,0.1"
            )
        if not 0 <= self.reorder_rate <= 1 or (self.reorder_rate and self.unit in ("span", "infill")):
            raise UserError(
                f"reorder rate {self.reorder_rate} is invalid with unit {self.unit}. Use a share from 0 to 1, and 0 "
                "with unit span or infill, because shuffled tokens would hide the ends of spans"
            )
        if self.ngram_max < 1 or self.span_max < 1 or not 0 < self.span_p < 1:
            raise UserError(
                f"ngram_max {self.ngram_max}, span_max {self.span_max} or span_p {self.span_p} is invalid. Use at "
                "least 1 word, and a span_p above 0 and below 1"
            )

    @classmethod
    def from_manifest(cls, masking: Mapping[str, Any]) -> "MaskingRule":
        """Reads the rule from `masking` in a manifest, whose layout data/manifest.py has checked."""
        if len(masking["split"]) != len(BERT_SHARES):
            raise UserError(f"damaged manifest: masking.split is {masking['split']!r}; copy the folder again")
        values = {name: masking[name] for name in cls.__dataclass_fields__ if name in masking}
        values |= {name: float(masking[name]) for name in ("rate", "reorder_rate", "span_p")}
        return cls(**values | {"split": ReplacementShares(*map(float, masking["split"]))})

    def to_manifest(self) -> dict[str, Any]:
        """Returns the JSON values that `from_manifest` reads."""
        values = asdict(self) | {"split": list(self.split)}
        if self.words == "spaces":  # a manifest states a rule only if the text has scripts without spaces
            del values["words"]
        return values


def check_rate(rate: float) -> None:
    """Raises UserError for a rate outside (0, 1]."""
    if not 0 < rate <= 1:
        raise UserError(f"mask rate {rate} is out of range. Use a rate above 0 and at most 1, such as 0.15")


# Rows are cut into sequences, whose words are found and put in random order.

# Kinds of tokens: special; begins a word; continues a word, unless the word is UNSPACED; a word in a script without
# spaces between words; continues any word.
SPECIAL, WHOLE, INSIDE, UNSPACED, ATTACHED = range(5)

# A sort key consists of 20 bits of a word's hash, and the word's position below them. With 12 bits for the position,
# keys have 32 bits, which vector instructions can sort. Wider rows have 64-bit keys, but the same 20 bits of hash, so
# the width of a row changes no mask. Words of equal hash (one pair in a million) stay in text order.
_HASH_BITS = 20
_NARROW_WIDTH = 2 ** (32 - _HASH_BITS) - 1


class Sequences(NamedTuple):
    """The Q sequences of some rows. W is the greatest length, or T if every row holds one sequence."""

    kinds: UInt8[np.ndarray, "Q W"]  # SPECIAL beyond the sequence's end
    keys: UInt64[np.ndarray, "Q"]
    rows: Int64[np.ndarray, "Q"]  # index of the row among R
    lengths: Int64[np.ndarray, "Q"]
    first_lengths: Int64[np.ndarray, "Q"]
    offsets: Int64[np.ndarray, "Q"]  # flat index of the sequence's first position among the R*T positions


class WordBoundaries(NamedTuple):
    """The positions that start words, and the positions that continue words. All others are special."""

    starts: Bool[np.ndarray, "Q W"]
    inside: Bool[np.ndarray, "Q W"]


class ShuffledWords(NamedTuple):
    """Every sequence's words in random order."""

    keys: UInt[np.ndarray, "Q W"]  # sorted; the low bits are the position at which the word starts
    position_mask: int
    absent: int  # the key of no word, which sorts after all words

    def positions(self, keys: UInt[np.ndarray, "*shape"]) -> Int64[np.ndarray, "*shape"]:
        """Returns the positions at which words start, given their keys."""
        return (keys & self.position_mask).astype(np.int64)


def cut(rows: Rows, kinds: UInt8[np.ndarray, "R T"]) -> Sequences:
    """Splits rows into sequences, given the kinds of their tokens."""
    row_count, width = kinds.shape
    lengths = rows.sequence_lengths.astype(np.int64)
    # Flat indices: a sequence starts after the earlier rows and the earlier sequences of its own row.
    starts = np.cumsum(lengths, axis=1) - lengths + np.arange(row_count)[:, None] * width
    pack = lengths.shape[1]
    numbers = np.repeat(np.arange(row_count), pack)
    first_lengths = rows.first_segment_lengths.astype(np.int64)
    columns = [part.reshape(-1) for part in (rows.sequence_keys, numbers, lengths, first_lengths, starts)]
    if pack > 1:  # a row with one sequence needs no copy, because it begins with its sequence
        present = np.flatnonzero(lengths)
        columns = [column[present] for column in columns]
        lengths, starts = columns[2], columns[4]
        width = lengths.max(initial=1)
        kinds = kinds.reshape(-1).take(starts[:, None] + np.arange(width), mode="clip")
    kinds = kinds * (np.arange(kinds.shape[1]) < columns[2][:, None])
    return Sequences(kinds, *columns)


def find_words(sequences: Sequences) -> WordBoundaries:
    """Returns the word boundaries. A word is a token with the continuation tokens after it.

    Two kinds of tokens start a word although the vocabulary does not mark them: a continuation token after a special
    token or at the start of a segment, whose word truncation cut; and, after a word of a script without spaces, a token
    of a script with spaces ("Python" in a Chinese sentence).
    """
    kinds = sequences.kinds
    inside = kinds == INSIDE
    if (kinds > INSIDE).any():
        # For every position, the latest position up to it whose token is not attached to the token before.
        columns = np.arange(kinds.shape[1], dtype=np.int32)
        base = np.maximum.accumulate(np.where(kinds == ATTACHED, np.int32(0), columns), axis=1)
        inside[:, 1:] &= np.take_along_axis(kinds, base[:, :-1], axis=1) != UNSPACED
        inside |= kinds == ATTACHED
    inside[:, 0] = False
    inside[:, 1:] &= kinds[:, :-1] != SPECIAL
    # Segment B begins a word. A sequence without B may fill its row, and has no such column.
    second = np.flatnonzero(sequences.first_lengths < kinds.shape[1])
    inside[second, sequences.first_lengths[second]] = False
    return WordBoundaries((kinds != SPECIAL) & ~inside, inside)


def shuffle(starts: Bool[np.ndarray, "Q W"], states: UInt64[np.ndarray, "Q"]) -> ShuffledWords:
    """Orders the words that start at `starts` by their hashes."""
    width = starts.shape[1]
    positions = np.arange(width, dtype=np.uint32)
    # MurmurHash3's 32-bit finalizer (Appleby, public domain), with half of the sequence's state added before each
    # product. This takes most of masking's time, and 32-bit vector lanes are several times as fast as 64-bit lanes.
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
    keys |= starts.astype(keys.dtype) - 1  # 0 - 1 is all ones, the key of no word
    keys.sort(axis=1)
    return ShuffledWords(keys, 2 ** (bits - _HASH_BITS) - 1, 2**bits - 1)


def mark(
    chosen: Bool[np.ndarray, "Q W"], flat_indices: Int64[np.ndarray, "K"], lengths: Int64[np.ndarray, "K"]
) -> None:
    """Marks runs of positions, given their first flat indices and their lengths."""
    # Step k marks the k-th positions of all runs that are long enough.
    flat = chosen.reshape(-1)
    step = 0
    while flat_indices.size:
        flat[flat_indices + step] = True
        step += 1
        longer = lengths > step
        flat_indices, lengths = flat_indices[longer], lengths[longer]
