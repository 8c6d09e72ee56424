"""Pairs of segments: next-sentence pairs (BERT) and sentence-order pairs (ALBERT), as spans of a unit's ids.

The ids of a work unit are concatenated, sentence by sentence and document by document. So a segment is a span
[begin, end) of them, and pairing never touches an id. Of the generator only `random()` is used, because its results
are the same in every version of Python.
"""

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

_COINS = 53  # random() is a multiple of 2**-53, which gives that many fair coins


class Pair(NamedTuple):
    """One sequence `[CLS] A [SEP] B [SEP]`: A and B as spans of the unit's ids."""

    a_begin: int
    a_end: int
    b_begin: int
    b_end: int
    label: int  # 0: B follows A in its document; 1: B is from another document (nsp), or precedes A (sop)


def next_sentence_pairs(
    offsets: Sequence[int],
    documents: Sequence[tuple[int, int]],
    seq_len: int,
    short_seq_prob: float,
    generator: random.Random,
) -> list[Pair]:
    """The pairs of a unit's documents, in order (Devlin et al. 2019, appendix A.2).

    The rule is that of google-research/bert, create_pretraining_data.py, `create_instances_from_document`, except that
    the random segment never comes from the same document (there it rarely does).

    offsets     sentence i is ids[offsets[i]:offsets[i + 1]], which is never empty
    documents   the sentences [first, last) of each of two or more documents, which are never empty
    """
    room = seq_len - 3
    draw = generator.random
    pairs: list[Pair] = []
    for document, (first, last) in enumerate(documents):
        target = _target(room, short_seq_prob, draw)
        while first < last:
            begin = offsets[first]
            chunk_end = bisect_left(offsets, begin + target, first + 1, last)
            sentences = chunk_end - first
            split = first + (1 + int(draw() * (sentences - 1)) if sentences > 1 else 1)
            a_end = offsets[split]
            if sentences == 1 or draw() < 0.5:
                b_begin, b_end = _random_segment(offsets, documents, document, target - (a_end - begin), draw)
                label = 1
                first = split  # the sentences that B did not use are available for a later A
            else:
                b_begin, b_end = a_end, offsets[chunk_end]
                label = 0
                first = chunk_end
            pairs.append(truncate(Pair(begin, a_end, b_begin, b_end, label), room, generator))
    return pairs


def sentence_order_pairs(
    offsets: Sequence[int],
    documents: Sequence[tuple[int, int]],
    seq_len: int,
    short_seq_prob: float,
    generator: random.Random,
) -> list[Pair]:
    """Two consecutive segments, swapped half of the time (Lan et al. 2020, section 3.1); arguments as for nsp.

    The chunks are those of google-research/albert, create_pretraining_data.py. There, a chunk of one sentence gets a
    random segment that is labelled as swapped; here it is split at a random token, so every pair comes from one
    document and needs no other. A last token that would be a chunk of its own joins the chunk before it. Each document
    has two tokens or more.
    """
    room = seq_len - 3
    draw = generator.random
    pairs: list[Pair] = []
    for first, last in documents:
        target = _target(room, short_seq_prob, draw)
        end = offsets[last]
        while first < last:
            begin = offsets[first]
            chunk_end = bisect_left(offsets, begin + target, first + 1, last)
            if end - offsets[chunk_end] == 1:
                chunk_end = last
            sentences = chunk_end - first
            if sentences > 1:
                split = offsets[first + 1 + int(draw() * (sentences - 1))]
            else:
                split = begin + 1 + int(draw() * (offsets[chunk_end] - begin - 1))
            pairs.append(truncate(_ordered(begin, split, offsets[chunk_end], draw), room, generator))
            first = chunk_end
    return pairs


def next_sentence_piece(
    offsets: Sequence[int],
    documents: Sequence[tuple[int, int]],
    begin: int,
    tokens: int,
    end: int,
    generator: random.Random,
) -> tuple[Pair, int]:
    """A pair with the given number of tokens (two or more) from `begin`, and how many of the document's it consumed.

    If one token would be left before `end`, which is too few for another pair, the segments are consecutive.
    """
    draw = generator.random
    split = _border(offsets, begin, begin + tokens, draw)
    consecutive = Pair(begin, split, split, begin + tokens, 0), tokens
    if draw() < 0.5:
        return consecutive
    document = bisect_right(documents, begin, key=lambda each: offsets[each[1]])
    b_begin, b_end = _random_segment(offsets, documents, document, begin + tokens - split, draw)
    b_end = min(b_end, b_begin + begin + tokens - split)
    a_end = begin + tokens - (b_end - b_begin)  # longer if the other document ends early
    return (Pair(begin, a_end, b_begin, b_end, 1), a_end - begin) if a_end != end - 1 else consecutive


def sentence_order_piece(offsets: Sequence[int], begin: int, tokens: int, generator: random.Random) -> tuple[Pair, int]:
    """Like next_sentence_piece, but with consecutive segments, so it consumes all of its tokens."""
    split = _border(offsets, begin, begin + tokens, generator.random)
    return _ordered(begin, split, begin + tokens, generator.random), tokens


def _target(room: int, short_seq_prob: float, draw: Callable[[], float]) -> int:
    """The target length: mostly the whole row, and sometimes less, so that pretraining sees short inputs too."""
    return 2 + int(draw() * (room - 1)) if draw() < short_seq_prob else room


def _ordered(begin: int, split: int, end: int, draw: Callable[[], float]) -> Pair:
    return Pair(split, end, begin, split, 1) if draw() < 0.5 else Pair(begin, split, split, end, 0)


def _border(offsets: Sequence[int], begin: int, end: int, draw: Callable[[], float]) -> int:
    """A random sentence border between the two positions, or a random position if there is none."""
    first, last = bisect_right(offsets, begin), bisect_left(offsets, end)
    return (
        offsets[first + int(draw() * (last - first))] if first < last else begin + 1 + int(draw() * (end - begin - 1))
    )


def _random_segment(
    offsets: Sequence[int],
    documents: Sequence[tuple[int, int]],
    document: int,
    wanted: int,
    draw: Callable[[], float],
) -> tuple[int, int]:
    """Sentences of another document from a random one on, as many as hold `wanted` ids, and at least one."""
    other = int(draw() * (len(documents) - 1))
    other += other >= document
    first, last = documents[other]
    start = first + int(draw() * (last - first))
    begin = offsets[start]
    return begin, offsets[bisect_left(offsets, begin + wanted, start + 1, last)]


def truncate(pair: Pair, room: int, generator: random.Random) -> Pair:
    """Shortens a pair to `room` ids, as if one by one from the longer segment (B if equal) and from a random end.

    Instead of removing ids one by one, it samples how many a segment loses in front: a sum of fair coins.
    """
    a_begin, a_end, b_begin, b_end, label = pair
    a_length, b_length = a_end - a_begin, b_end - b_begin
    excess = a_length + b_length - room
    if excess <= 0:
        return pair
    from_longer = min(excess, abs(a_length - b_length))
    from_a, from_b = (from_longer, 0) if a_length > b_length else (0, from_longer)
    excess -= from_longer
    from_a += excess // 2
    from_b += excess - excess // 2
    a_front, b_front = _heads(from_a, generator), _heads(from_b, generator)
    return Pair(a_begin + a_front, a_end - (from_a - a_front), b_begin + b_front, b_end - (from_b - b_front), label)


def _heads(coins: int, generator: random.Random) -> int:
    """How many of the given number of fair coins show heads."""
    heads = 0
    while coins > 0:
        tossed = min(coins, _COINS)
        heads += (int(generator.random() * (1 << _COINS)) & ((1 << tossed) - 1)).bit_count()
        coins -= tossed
    return heads
