"""Sequences of one segment, as spans of a unit's ids: full sentences, doc sentences (RoBERTa), single (SpanBERT)."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from bert_jax.array_types import Int64


def sentence_passages(
    begins: Sequence[int], ends: Sequence[int], documents: Sequence[tuple[int, int]], room: int
) -> list[tuple[int, int]]:
    """Groups whole sentences into passages of at most `room` ids; each document starts a new passage.

    With the documents of a unit this is DOC-SENTENCES (Liu et al. 2019, section 4.1). It is FULL-SENTENCES if all
    sentences count as one document, in a stream of ids with a separator at the borders of documents.

    begins, ends   the span of ids of each sentence
    documents      the sentences [first, last) of each document

    Returns spans that begin and end at sentence borders. A sentence longer than the room is split into full passages
    and a remainder, which the next sentences join: no id is lost.
    """
    spans = []
    for first, last in documents:
        while first < last:
            begin = begins[first]
            while ends[first] - begin > room:
                spans.append((begin, begin + room))
                begin += room
            first = bisect_right(ends, begin + room, first + 1, last)
            spans.append((begin, ends[first - 1]))
    return spans


def blocks(begins: Int64[np.ndarray, "n"], ends: Int64[np.ndarray, "n"], room: int) -> Int64[np.ndarray, "Q 2"]:
    """Splits the ids [begin, end) of each document into spans of `room` and a remainder.

    SpanBERT takes its sequences so: up to 512 tokens, until the end of a document (Joshi et al. 2020, section 4.2).
    """
    counts = -((begins - ends) // room)
    begin = np.repeat(begins - room * (np.cumsum(counts) - counts), counts) + room * np.arange(counts.sum())
    return np.stack([begin, np.minimum(begin + room, np.repeat(ends, counts))], axis=1)
