"""Short sequences for the room that packing leaves: a few of a unit's sequences are cut again, each piece as long as
the room of one row.

Sequences that nearly fill a row leave rooms of some slots, which only short ones fit, and a corpus has few of those.
So a random few are cut into pieces of just these lengths: as many as the rooms take, and no text is lost by it. Every
other sequence stays as its objective made it, and long. (Krell et al. 2021 fill rows with the short sequences that a
corpus happens to have.)
"""

import random
from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from bert_jax.array_types import Bool, Int64
from data_prep.packing import rooms
from data_prep.pairing import Pair

# Slots of the shortest sequence that is made to fill a room: one token or two between the special ones, and a third.
SHORTEST = 6
# How much more is drawn than the rooms hold, as rests fill none.
_MARGIN = 1.05

# So many tokens from a place on, as a sequence, of a span that ends at a place; and how many it took, one at least.
Piece = Callable[[int, int, int], tuple[Pair, int]]
# The text that is a sequence's own, as spans to cut.
Own = Callable[[Pair], list[tuple[int, int]]]


def fill_rooms(
    sequences: Int64[np.ndarray, "Q 5"],
    segments: int,
    seq_len: int,
    most: int,
    own: Own,
    piece: Piece,
    generator: random.Random,
) -> tuple[Int64[np.ndarray, "m 5"], Bool[np.ndarray, "m"]]:
    """The sequences (Pairs) with some cut again, in the order of the text, for rows of at most `most` of them.

    And which are to be packed late: those that were drawn.

    segments  of a sequence: 2, or 1 where all is in A; a piece has that many tokens at least
    """
    lengths = sequence_lengths(sequences, segments)
    room_in_all = sum(room for room in rooms(lengths, seq_len, most) if room >= SHORTEST)
    # What is drawn leaves its own rooms too.
    wanted = _MARGIN * room_in_all / (1 + room_in_all / lengths.sum())
    # Of a long one little is left over when it is cut.
    long = np.flatnonzero(lengths > seq_len // 2).tolist()
    chosen: dict[int, None] = {}
    while wanted > 0 and len(chosen) < len(long) // 2:
        number = long[int(generator.random() * len(long))]
        if number not in chosen:
            chosen[number] = None
            wanted -= lengths[number]
    kept = np.ones(len(sequences), bool)
    kept[list(chosen)] = False
    left = sorted(room for room in rooms(lengths[kept], seq_len, most) if room >= SHORTEST)

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
    """Slots of each, with [CLS] and a [SEP] for each segment."""
    return sequences[:, 1] - sequences[:, 0] + sequences[:, 3] - sequences[:, 2] + segments + 1


def _cut(begin: int, end: int, left: list[int], segments: int, piece: Piece) -> list[Pair]:
    """A span in pieces, each as long as the widest room that it can fill; the last one may be what is over.

    left  the rooms, ascending: those that are filled are taken out
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
