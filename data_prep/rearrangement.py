"""Sentence permutation and document rotation (BART, Lewis et al. 2020, section 2.2), applied when sequences are built.

Permutation shuffles the sentences of a document; rotation begins the document with one of its tokens, chosen uniformly,
and moves the tokens before it to the end. As in facebookresearch/fairseq, fairseq/data/denoising_dataset.py, a document
is here what a sequence contains of one: its passage of at most T tokens. Shuffling a whole article instead would put
sentences from all over it into one row.

BART's decoder generates the original order. An encoder has no output for it: it predicts the masked tokens of a text in
another order. This noise therefore takes away information, as deletion does, and adds no prediction.

Counter-based hashing decides what moves (law 2): the result is a function of (seed, sequence key) and the positions of
the sentences in their sequence.
"""

from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Int64, UInt64
from bert_jax.data import hashing
from data_prep.corruption import in_parts
from data_prep.objectives import Borders, Spans

# Tags of independent hash streams, distinct from those of masking and of data_prep/corruption.py.
_PERMUTATION, _ROTATION = 102, 103


class _Sentences(NamedTuple):
    """The sentences of all sequences in order, also those that a sequence cuts. A separator counts as one."""

    begins: Int64[np.ndarray, "N"]  # among the ids of the unit
    lengths: Int64[np.ndarray, "N"]  # in tokens
    sequences: Int64[np.ndarray, "N"]
    documents: Int64[np.ndarray, "N"]  # numbers the documents of all sequences from 0; a separator is one of its own


def rearrange(
    spans: Spans,
    borders: Borders,
    keys: UInt64[np.ndarray, "Q"],
    seed: int,
    permute_sentences: float,
    rotate_documents: float,
) -> Spans:
    """Permutes the sentences of each document of a sequence, and then rotates the document.

    permute_sentences   the share of a document's sentences, rounded up, that is shuffled among their places
    rotate_documents    the probability that a document is rotated

    Sequences have one segment. Separators between documents stay where they are, and so do all lengths.
    """

    def noise(some: Spans, keys: UInt64[np.ndarray, "Q"]) -> Spans:
        return _rearrange(some, borders, keys, seed, permute_sentences, rotate_documents)

    return in_parts(noise, spans, keys)


def _rearrange(
    spans: Spans,
    borders: Borders,
    keys: UInt64[np.ndarray, "Q"],
    seed: int,
    permute_sentences: float,
    rotate_documents: float,
) -> Spans:
    sentences = _sentences(spans, borders)
    order = _permuted(sentences, spans, keys, seed, permute_sentences)
    lengths = sentences.lengths[order]
    ends = np.cumsum(lengths)
    tokens = np.arange(ends[-1]) + np.repeat(sentences.begins[order] - (ends - lengths), lengths)
    tokens = _rotated(tokens, sentences, keys, seed, rotate_documents)
    last = np.cumsum(spans.sequences[:, 1] - spans.sequences[:, 0])
    first = np.concatenate([[0], last[:-1]])
    return spans._replace(
        ids=spans.ids[tokens], sequences=np.stack([first, last, last, last, spans.sequences[:, 4]], axis=1)
    )


def _sentences(spans: Spans, borders: Borders) -> _Sentences:
    begin, end = spans.sequences[:, 0], spans.sequences[:, 1]
    low = np.searchsorted(borders.positions, begin, side="right")
    counts = np.searchsorted(borders.positions, end, side="left") - low + 1
    sequences = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)  # within the sequence
    first, last = number == 0, number == counts[sequences] - 1
    border = low[sequences] + number - 1  # meaningless for the first sentence of a sequence
    begins = np.where(first, begin[sequences], borders.positions[border])
    separator = borders.separators[border] & ~first
    ends = np.where(last, end[sequences], np.roll(begins, -1))
    documents = np.cumsum(first | separator | np.roll(separator, 1)) - 1
    return _Sentences(begins, ends - begins, sequences, documents)


def _permuted(
    sentences: _Sentences, spans: Spans, keys: UInt64[np.ndarray, "Q"], seed: int, share: float
) -> Int64[np.ndarray, "N"]:
    """The sentence that each place gets."""
    order = np.arange(len(sentences.begins))
    if not share:
        return order
    documents = sentences.documents
    position = (sentences.begins - spans.sequences[sentences.sequences, 0]).astype(np.uint64)
    words = hashing.mix(hashing.combine(_PERMUTATION, seed, keys)[sentences.sequences] + position * hashing.GAMMA)
    choice, rank = words >> np.uint64(32), words & np.uint64(2**32 - 1)
    counts = np.bincount(documents)
    shuffled = np.ceil(share * counts - 1e-9).astype(np.int64)  # 0.07 * 100 is above 7 in floating point
    before = np.cumsum(counts) - counts
    chosen = np.zeros(len(order), bool)
    chosen[np.lexsort((choice, documents))] = order - before[documents] < shuffled[documents]
    places = np.flatnonzero(chosen)
    order[places] = places[np.lexsort((rank[places], documents[places]))]
    return order


def _rotated(
    tokens: Int64[np.ndarray, "n"], sentences: _Sentences, keys: UInt64[np.ndarray, "Q"], seed: int, probability: float
) -> Int64[np.ndarray, "n"]:
    """The tokens in which some documents begin at a random one of their tokens."""
    if not probability:
        return tokens
    firsts = np.flatnonzero(np.diff(sentences.documents, prepend=-1))
    counts = np.add.reduceat(sentences.lengths, firsts)
    before = np.cumsum(counts) - counts
    sequences = sentences.sequences[firsts]
    starts = before[np.searchsorted(sequences, sequences)]  # where the sequence of each document starts
    states = hashing.combine(_ROTATION, seed, keys)[sequences]
    words = hashing.mix(states + (before - starts).astype(np.uint64) * hashing.GAMMA)
    offsets = hashing.bounded(words.astype(np.uint32), counts)
    offsets[words >> np.uint64(32) >= round(probability * 2**32)] = 0
    place = np.arange(len(tokens)) - np.repeat(before, counts)
    return tokens[np.repeat(before, counts) + (place + np.repeat(offsets, counts)) % np.repeat(counts, counts)]
