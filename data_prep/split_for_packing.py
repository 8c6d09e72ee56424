"""Splits a few sequences of a unit into pieces that exactly fill the gaps that packing leaves in rows.

Sequences that nearly fill a row leave gaps of a few tokens, into which only short sequences fit, and a corpus has few
of those. So a few random sequences are split into pieces of just these lengths, as many as the gaps can take; no text
is lost. Every other sequence keeps the form and the length that its objective gave it. (Krell et al. 2021 fill rows
with the short sequences that a corpus happens to have.)
"""

import random
from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from bert_jax.array_types import Bool, Int64
from data_prep.packing import gaps
from data_prep.pairing import Pair

# Length of the shortest piece: one or two tokens between the special ones, and one more.
SHORTEST = 6
# How much more text is selected than the gaps hold, because the remainder of a split sequence fills no gap.
_MARGIN = 1.05

# (begin, tokens, end of the span) -> a sequence of that many tokens from `begin`, and how many tokens it consumed, at
# least one.
Piece = Callable[[int, int, int], tuple[Pair, int]]
# The spans of a sequence that may be split: its own text, without a random segment of another document.
Own = Callable[[Pair], list[tuple[int, int]]]


def fill_gaps(
    sequences: Int64[np.ndarray, "Q 5"],
    segments: int,
    seq_len: int,
    most: int,
    own: Own,
    piece: Piece,
    generator: random.Random,
) -> tuple[Int64[np.ndarray, "m 5"], Bool[np.ndarray, "m"]]:
    """Splits some of the sequences (Pairs) for rows of at most `most` sequences.

    segments   of a sequence: 2, or 1 if all of its text is in A; a piece has at least as many tokens

    Returns the sequences in the order of the text, and which ones are to be packed last: the pieces.
    """
    lengths = sequence_lengths(sequences, segments)
    gap_tokens = sum(room for room in gaps(lengths, seq_len, most) if room >= SHORTEST)
    # A selected sequence leaves its row, which opens a gap too; hence the division.
    wanted = _MARGIN * gap_tokens / (1 + gap_tokens / lengths.sum())
    # Splitting a long sequence leaves a small remainder.
    long = np.flatnonzero(lengths > seq_len // 2).tolist()
    chosen: dict[int, None] = {}
    while wanted > 0 and len(chosen) < len(long) // 2:
        number = long[int(generator.random() * len(long))]
        if number not in chosen:
            chosen[number] = None
            wanted -= lengths[number]
    kept = np.ones(len(sequences), bool)
    kept[list(chosen)] = False
    left = sorted(room for room in gaps(lengths[kept], seq_len, most) if room >= SHORTEST)

    found: list[Pair] = []
    numbers: list[int] = []
    for number in chosen:
        whole = Pair(*sequences[number].tolist())
        spans = own(whole)
        if not left or min(end - begin for begin, end in spans) < segments:
            pieces = [whole]
        else:
            pieces = []
            for begin, end in spans:
                pieces += _cut(begin, end, left, segments, piece)
        found += pieces
        numbers += [number] * len(pieces)
    joined = np.concatenate([sequences[kept], np.array(found, np.int64).reshape(-1, 5)])
    order = np.argsort(np.concatenate([np.flatnonzero(kept), numbers]), kind="stable")
    return joined[order], order >= np.count_nonzero(kept)


def sequence_lengths(sequences: Int64[np.ndarray, "Q 5"], segments: int) -> Int64[np.ndarray, "Q"]:
    """The length of each sequence in tokens, with [CLS] and a [SEP] for each segment."""
    return sequences[:, 1] - sequences[:, 0] + sequences[:, 3] - sequences[:, 2] + segments + 1


def _cut(begin: int, end: int, left: list[int], segments: int, piece: Piece) -> list[Pair]:
    """Splits a span into pieces, each as long as the widest gap that it can fill; the last may be a remainder.

    left   the gaps, ascending; those that are filled are removed
    """
    pieces = []
    while end - begin >= segments:
        tokens = end - begin
        place = bisect_right(left, tokens + segments + 1) - 1
        if place >= 0:
            fitting = left.pop(place) - segments - 1
            tokens = fitting if tokens - fitting >= segments else tokens
        made, taken = piece(begin, tokens, end)
        pieces.append(made)
        begin += taken
    return pieces
