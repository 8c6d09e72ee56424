"""Noise in addition to masking, applied when sequences are built.

`corrupt` deletes and inserts tokens; `rearrange` permutes sentences and rotates documents. Like masks (law 2), the
result is a function of (seed, sequence key) and the position in the sequence, by counter-based hashing.
"""

import functools
from collections.abc import Callable
from typing import Concatenate, NamedTuple, ParamSpec

import numpy as np

from bert_jax.array_types import Bool, Int64, UInt64
from bert_jax.data import order as hashing
from data_prep.sequences import Borders, Spans

Keys = UInt64[np.ndarray, "Q"]  # of sequences
Rest = ParamSpec("Rest")

# Tags of independent hash streams, distinct from the tags of masking.
_CORRUPTION, _PERMUTATION, _ROTATION = 101, 102, 103
_TOGETHER = 4096  # sequences at a time, which bounds the memory for working arrays. It does not change results.


def room_for(seq_len: int, delete_rate: float, insert_rate: float, segments: int) -> int:
    """Computes the length to which sequences are built, so that on average they fit seq_len after corruption."""
    special = segments + 1
    return special + max(segments, int((seq_len - special) / max(1.0, 1.0 + insert_rate - delete_rate)))


def in_parts(noise: Callable[Concatenate[Spans, Keys, Rest], Spans]) -> Callable[Concatenate[Spans, Keys, Rest], Spans]:
    """Applies noise to some sequences at a time, and joins the results."""

    @functools.wraps(noise)
    def in_turn(spans: Spans, keys: Keys, *rest: Rest.args, **named: Rest.kwargs) -> Spans:
        parts = []
        for start in range(0, len(keys), _TOGETHER):
            chosen = slice(start, start + _TOGETHER)
            part = spans._replace(sequences=spans.sequences[chosen], late=spans.late[chosen])
            parts.append(noise(part, keys[chosen], *rest, **named))
        # Each part has ids of its own, so its spans move by the ids before it; the label in column 4 stays.
        shift = np.cumsum([0, *(len(part.ids) for part in parts)])[:-1]
        sequences = [part.sequences + [by, by, by, by, 0] for part, by in zip(parts, shift.tolist(), strict=True)]
        return spans._replace(ids=np.concatenate([part.ids for part in parts]), sequences=np.concatenate(sequences))

    return in_turn


# Token deletions and insertions. The training text of a masked language model may also be corrupted by deletions and
# extraneous insertions (Jurafsky and Martin, Speech and Language Processing, 3rd edition, "Masked Language Models";
# BART deletes tokens, Lewis et al. 2020, section 2.2). The model predicts nothing at those positions: it predicts
# masked tokens in a text with missing and extraneous ones. Masking is independent of this noise, so an inserted token
# may be masked, and is then predicted.


@in_parts
def corrupt(
    spans: Spans,
    keys: Keys,
    seed: int,
    delete_rate: float,
    insert_rate: float,
    seq_len: int,
    ordinary: Bool[np.ndarray, "V"],
) -> Spans:
    """Deletes tokens with probability delete_rate, or inserts a random one after them with probability insert_rate.

    Special tokens stay, and so does the first token of a segment that would lose all its tokens. If a sequence would
    become longer than seq_len, the insertions with the highest hashes are left out.

    Args:
        ordinary: The ids that may be deleted or inserted; insertions are uniform over them.
    """
    # All arrays below are over the tokens of all sequences, one after the other, or over all segments.
    segments = spans.segments
    bounds = spans.sequences[:, : 2 * segments].reshape(-1, 2)
    lengths = bounds[:, 1] - bounds[:, 0]
    ends = np.cumsum(lengths)
    begins = ends - lengths  # of each segment, among the tokens of all
    running = np.arange(lengths.sum())
    ids = spans.ids[running + np.repeat(bounds[:, 0] - begins, lengths)]
    first_of_sequence = np.repeat(begins.reshape(-1, segments)[:, 0], segments)
    sequence = np.repeat(np.arange(len(keys)), lengths.reshape(-1, segments).sum(axis=1))

    # One 64-bit hash per token: its high half decides between deletion, insertion and neither, and its low half
    # chooses the inserted token.
    states = hashing.combine(_CORRUPTION, seed, keys)
    places = (running - np.repeat(first_of_sequence, lengths)).astype(np.uint64)
    words = hashing.mix(states[sequence] + places * hashing.GAMMA)
    case = words >> np.uint64(32)
    delete_below, insert_below = round(delete_rate * 2**32), round((delete_rate + insert_rate) * 2**32)
    deleted = (case < delete_below) & ordinary[ids]
    remaining = np.add.reduceat(~deleted, begins)
    deleted[begins[remaining == 0]] = False
    inserted = _fitting((case >= delete_below) & (case < insert_below), case, sequence, deleted, seq_len - segments - 1)

    # A token is written 0, 1 or 2 times, and a second copy is then replaced by the inserted token.
    copies = 1 - deleted.astype(np.int64) + inserted
    noisy = np.repeat(ids, copies)
    last = np.cumsum(copies)
    ordinary_ids = np.flatnonzero(ordinary)
    chosen = hashing.bounded(words[inserted].astype(np.uint32), ordinary_ids.size)
    noisy[last[inserted] - 1] = ordinary_ids[chosen]
    new_ends = last[ends - 1]
    new_bounds = np.stack([np.concatenate([[0], new_ends[:-1]]), new_ends], axis=1).reshape(len(keys), -1)
    if segments == 1:
        new_bounds = np.concatenate([new_bounds, new_bounds[:, 1:], new_bounds[:, 1:]], axis=1)
    return spans._replace(ids=noisy, sequences=np.concatenate([new_bounds, spans.sequences[:, 4:]], axis=1))


def _fitting(
    inserted: np.ndarray,
    case: UInt64[np.ndarray, "n"],
    sequence: Int64[np.ndarray, "n"],
    deleted: np.ndarray,
    room: int,
) -> np.ndarray:
    """Selects the insertions for which their sequence has room, lowest hashes first."""
    left = room - np.bincount(sequence[~deleted], minlength=int(sequence[-1]) + 1)
    places = np.flatnonzero(inserted)
    places = places[np.lexsort((case[places], sequence[places]))]
    owners = sequence[places]
    # The index of an insertion minus the index of its sequence's first one.
    rank = np.arange(len(owners)) - np.searchsorted(owners, owners)
    fitting = np.zeros(len(inserted), bool)
    fitting[places[rank < left[owners]]] = True
    return fitting


# Sentence permutation and document rotation (BART, Lewis et al. 2020, section 2.2), applied when sequences are built.
#
# Permutation shuffles a document's sentences; rotation begins the document with one of its tokens, chosen uniformly,
# and moves the tokens before it to the end. As in facebookresearch/fairseq, fairseq/data/denoising_dataset.py, a
# document is here the part that a sequence contains, at most T tokens. Shuffling a whole article instead would put
# sentences from all over it into one row.
#
# BART's decoder generates the original order. An encoder has no output for it, and predicts masked tokens in reordered
# text. So this noise removes information, as deletion does, and adds no prediction.


class _Sentences(NamedTuple):
    """All sentences in order, also those that a sequence cuts. A separator counts as one."""

    begins: Int64[np.ndarray, "N"]  # indices into the unit's ids
    lengths: Int64[np.ndarray, "N"]  # in tokens
    sequences: Int64[np.ndarray, "N"]
    documents: Int64[np.ndarray, "N"]  # numbered from 0 over all sequences; a separator is a document of its own


@in_parts
def rearrange(
    spans: Spans, keys: Keys, borders: Borders, seed: int, permute_sentences: float, rotate_documents: float
) -> Spans:
    """Permutes the sentences of each document in a sequence, and then rotates the document.

    Sequences have one segment. Separators between documents stay in place, and no length changes.

    Args:
        permute_sentences: The fraction of a document's sentences to shuffle, rounded up.
        rotate_documents: The probability that a document is rotated.
    """
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
    border = low[sequences] + number - 1  # undefined for a sequence's first sentence, which begins with the sequence
    begins = np.where(first, begin[sequences], borders.positions[border])
    separator = borders.separators[border] & ~first
    ends = np.where(last, end[sequences], np.roll(begins, -1))
    documents = np.cumsum(first | separator | np.roll(separator, 1)) - 1
    return _Sentences(begins, ends - begins, sequences, documents)


def _permuted(sentences: _Sentences, spans: Spans, keys: Keys, seed: int, share: float) -> Int64[np.ndarray, "N"]:
    """Returns, by place, the index of the sentence to put there."""
    order = np.arange(len(sentences.begins))
    if not share:
        return order
    documents = sentences.documents
    position = (sentences.begins - spans.sequences[sentences.sequences, 0]).astype(np.uint64)
    words = hashing.mix(hashing.combine(_PERMUTATION, seed, keys)[sentences.sequences] + position * hashing.GAMMA)
    choice, rank = words >> np.uint64(32), words & np.uint64(2**32 - 1)
    counts = np.bincount(documents)
    shuffled = np.ceil(share * counts - 1e-9).astype(np.int64)  # 0.07 * 100 is above 7 in floating point
    # In a document, the sentences with the lowest `choice` are shuffled: they trade places in the order of `rank`.
    before = np.cumsum(counts) - counts
    chosen = np.zeros(len(order), bool)
    chosen[np.lexsort((choice, documents))] = order - before[documents] < shuffled[documents]
    places = np.flatnonzero(chosen)
    order[places] = places[np.lexsort((rank[places], documents[places]))]
    return order


def _rotated(
    tokens: Int64[np.ndarray, "n"], sentences: _Sentences, keys: Keys, seed: int, probability: float
) -> Int64[np.ndarray, "n"]:
    """Lets some documents begin at one of their tokens, chosen at random."""
    if not probability:
        return tokens
    firsts = np.flatnonzero(np.diff(sentences.documents, prepend=-1))
    counts = np.add.reduceat(sentences.lengths, firsts)
    before = np.cumsum(counts) - counts
    sequences = sentences.sequences[firsts]
    starts = before[np.searchsorted(sequences, sequences)]  # the first token of the document's sequence
    states = hashing.combine(_ROTATION, seed, keys)[sequences]
    words = hashing.mix(states + (before - starts).astype(np.uint64) * hashing.GAMMA)
    offsets = hashing.bounded(words.astype(np.uint32), counts)
    offsets[words >> np.uint64(32) >= round(probability * 2**32)] = 0  # not rotated
    place = np.arange(len(tokens)) - np.repeat(before, counts)
    return tokens[np.repeat(before, counts) + (place + np.repeat(offsets, counts)) % np.repeat(counts, counts)]
