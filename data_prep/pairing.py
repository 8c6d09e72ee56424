"""Which sentences make a row: next-sentence pairs (BERT) and full sentences (RoBERTa), as spans of a unit's ids.

The ids of a work unit lie one after the other, sentence by sentence, document by document, so a segment is a span
[begin, end) of them and pairing never touches an id. Only `random()` of the generator is used: what it draws is the
same in every version of Python.
"""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

_COINS = 53  # random() is a whole number of 2**-53: that many fair coins


class Pair(NamedTuple):
    """One sequence `[CLS] A [SEP] B [SEP]`: A and B as spans of the unit's ids."""

    a_begin: int
    a_end: int
    b_begin: int
    b_end: int
    label: int  # 0: B follows A in its document; 1: B is from another document


def next_sentence_pairs(
    offsets: Sequence[int],
    documents: Sequence[tuple[int, int]],
    seq_len: int,
    short_seq_prob: float,
    generator: random.Random,
) -> list[Pair]:
    """The pairs of a unit's documents, in order (Devlin et al. 2019, appendix A.2).

    The rule is that of google-research/bert, create_pretraining_data.py, `create_instances_from_document`, but that
    the random segment never comes from the same document (there: hardly ever).

    offsets    sentence i is ids[offsets[i]:offsets[i + 1]], never empty
    documents  the sentences [first, last) of each document, never none

    Raises ValueError with fewer than two documents.
    """
    if len(documents) < 2:
        raise ValueError(f"next-sentence pairs need two documents, got {len(documents)}")
    pairs: list[Pair] = []
    for document in range(len(documents)):
        pairs += _document_pairs(offsets, documents, document, seq_len - 3, short_seq_prob, generator)
    return pairs


def _document_pairs(
    offsets: Sequence[int],
    documents: Sequence[tuple[int, int]],
    document: int,
    room: int,
    short_seq_prob: float,
    generator: random.Random,
) -> list[Pair]:
    """The pairs whose A is from one document; room is for the tokens of A and B together."""
    draw = generator.random
    # Mostly rows are filled; some are short, so that short inputs are no surprise in fine-tuning.
    target = 2 + int(draw() * (room - 1)) if draw() < short_seq_prob else room
    first, last = documents[document]
    pairs = []
    while first < last:
        # A chunk: sentences up to the target, at least one.
        chunk_end = first + 1
        begin = offsets[first]
        while chunk_end < last and offsets[chunk_end] - begin < target:
            chunk_end += 1
        sentences = chunk_end - first
        a_sentences = 1 + int(draw() * (sentences - 1)) if sentences > 1 else 1
        split = first + a_sentences
        a_end = offsets[split]
        if sentences == 1 or draw() < 0.5:
            b_begin, b_end = _random_segment(offsets, documents, document, target - (a_end - begin), draw)
            label = 1
            first = split  # the sentences that were to be B are put back, for a later A
        else:
            b_begin, b_end = a_end, offsets[chunk_end]
            label = 0
            first = chunk_end
        pairs.append(truncate(Pair(begin, a_end, b_begin, b_end, label), room, generator))
    return pairs


def _random_segment(
    offsets: Sequence[int],
    documents: Sequence[tuple[int, int]],
    document: int,
    wanted: int,
    draw: Callable[[], float],
) -> tuple[int, int]:
    """From a random sentence of another document: as many sentences as it takes to hold `wanted` ids, at least one."""
    other = int(draw() * (len(documents) - 1))
    other += other >= document
    first, last = documents[other]
    start = first + int(draw() * (last - first))
    end = start + 1
    while end < last and offsets[end] - offsets[start] < wanted:
        end += 1
    return offsets[start], offsets[end]


def truncate(pair: Pair, room: int, generator: random.Random) -> Pair:
    """Shortens a pair to `room` ids: one at a time from the longer segment (B when equal), from a random end.

    What is drawn is how many of a segment's lost ids are lost in front: a sum of fair coins.
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
    """How many of so many fair coins fall heads."""
    heads = 0
    while coins > 0:
        tossed = min(coins, _COINS)
        heads += (int(generator.random() * (1 << _COINS)) & ((1 << tossed) - 1)).bit_count()
        coins -= tossed
    return heads


def full_sentence_spans(
    begins: Int64[np.ndarray, "sentences"], ends: Int64[np.ndarray, "sentences"], seq_len: int
) -> list[tuple[int, int]]:
    """Rows of whole sentences one after another, across documents (FULL-SENTENCES; Liu et al. 2019, section 4.1).

    begins, ends   each sentence's span in a stream of ids with one separator between documents
    Returns spans of that stream, each at most seq_len - 2 long, beginning and ending with a sentence's ids. A
    sentence longer than that is cut into full rows and a rest, on which the next sentences go: no id is lost.
    """
    room = seq_len - 2
    spans: list[tuple[int, int]] = []
    row_begin = row_end = 0
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        if row_end == row_begin:
            row_begin = begin
        elif end - row_begin > room:
            spans.append((row_begin, row_end))
            row_begin = begin
        while end - row_begin > room:
            spans.append((row_begin, row_begin + room))
            row_begin += room
        row_end = end
    if row_end > row_begin:
        spans.append((row_begin, row_end))
    return spans
