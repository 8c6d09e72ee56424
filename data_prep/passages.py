"""Sequences of one segment, as spans of a unit's ids: full sentences, doc sentences (RoBERTa), single (SpanBERT)."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from bert_jax.array_types import Int64


def sentence_passages(
    begins: Sequence[int], ends: Sequence[int], documents: Sequence[tuple[int, int]], room: int
) -> list[tuple[int, int]]:
    """Whole sentences one after another, as many as fit in `room` ids, anew in each document.

    With the documents of a unit this is DOC-SENTENCES (Liu et al. 2019, section 4.1), and FULL-SENTENCES when all of
    its sentences count as one document, in a stream of ids with a separator at the borders of documents.

    begins, ends  each sentence's span of the ids
    documents     the sentences [first, last) of each
    Returns spans that begin and end with a sentence's ids. A sentence longer than the room is cut into full passages
    and a rest, on which the next sentences go: no id is lost.
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
    """Each document's ids [begin, end) in stretches of `room`, and what is left of it.

    As SpanBERT takes them: up to 512 tokens, until a document's border is reached (Joshi et al. 2020, section 4.2).
    """
    counts = -((begins - ends) // room)
    begin = np.repeat(begins - room * (np.cumsum(counts) - counts), counts) + room * np.arange(counts.sum())
    return np.stack([begin, np.minimum(begin + room, np.repeat(ends, counts))], axis=1)
