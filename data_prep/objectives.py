"""The sequences that each objective makes from the ids of a unit: one or two segments each, as spans.

nsp             [CLS] A [SEP] B [SEP], B is random half of the time (BERT)
sop             [CLS] A [SEP] B [SEP], consecutive, and swapped half of the time (ALBERT)
full_sentences  [CLS] A [SEP], whole sentences, a separator between documents (RoBERTa)
doc_sentences   [CLS] A [SEP], whole sentences of one document (RoBERTa)
single          [CLS] A [SEP], T - 2 ids of one document, or the rest of it (SpanBERT)
"""

import itertools
import random
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Bool, Int64, UInt
from bert_jax.command import UserError
from bert_jax.data.manifest import OBJECTIVES, PAIRS
from data_prep.pairing import (
    Pair,
    next_sentence_pairs,
    next_sentence_piece,
    sentence_order_pairs,
    sentence_order_piece,
)
from data_prep.passages import blocks, sentence_passages
from data_prep.split_for_packing import fill_gaps

RANDOM_SEGMENT = 1  # the label of nsp for a B from another document
# What config.objective of pretraining names (bert_jax.train.objectives, which imports jax).
OF_TRAINING = ("mlm", "causal", "bidirectional_lm", "replaced_tokens", "diffusion")


class Encoded(NamedTuple):
    """The text of a unit as ids, without the documents and sentences that have none."""

    ids: UInt[np.ndarray, "n"]
    offsets: Int64[np.ndarray, "sentences+1"]  # sentence i is ids[offsets[i]:offsets[i + 1]]
    documents: Int64[np.ndarray, "documents 2"]  # the sentences [first, last) of each
    empty: int  # documents without a token


class Spans(NamedTuple):
    """The sequences of a unit, in the order of the text."""

    ids: UInt[np.ndarray, "n"]
    sequences: Int64[np.ndarray, "Q 5"]  # Pairs of spans of ids; B is empty and the label -1 where there is one segment
    segments: int  # of each: 1 or 2
    late: Bool[np.ndarray, "Q"]  # those that were split to fill gaps, and are packed last


class Borders(NamedTuple):
    """Where sentences, and separators between documents, begin in the ids of `Spans`."""

    positions: Int64[np.ndarray, "K"]  # ascending
    separators: Bool[np.ndarray, "K"]  # which of them are separators


def check(objective: str) -> None:
    """Raises UserError, with the name of the flag, for an objective that makes no sequences."""
    if objective in OBJECTIVES:
        return
    hint = ""
    if objective in OF_TRAINING:
        hint = f". {objective} is an objective of training: bert-jax pretrain --config.objective={objective}"
    raise UserError(f"unknown --objective {objective}; choose from {', '.join(OBJECTIVES)}{hint}")


def segments_of(objective: str) -> int:
    return 2 if objective in PAIRS else 1


def fewest_documents(objective: str) -> int:
    """How many documents a part must hold, because a random segment comes from another document."""
    return 2 if objective == "nsp" else 1


def usable(objective: str, encoded: Encoded) -> tuple[Encoded, dict[str, int]]:
    """Removes the documents that the objective cannot use; returns the rest and the number removed, by reason."""
    skipped = {"no_tokens": encoded.empty} if encoded.empty else {}
    documents = encoded.documents
    if objective == "nsp" and len(documents) == 1:
        skipped["no_other_document"] = 1
        documents = documents[:0]
    if objective == "sop":
        long_enough = np.diff(encoded.offsets[documents], axis=1)[:, 0] > 1
        if not long_enough.all():
            skipped["too_short"] = int((~long_enough).sum())
            documents = documents[long_enough]
    return encoded._replace(documents=documents), skipped


def spans(
    objective: str,
    encoded: Encoded,
    seq_len: int,
    most: int,
    short_seq_prob: float,
    separator: int,
    generator: random.Random,
) -> Spans:
    """One pairing of the documents of a unit, as returned by `usable`, for rows of at most `most` sequences."""
    if objective in PAIRS:
        return _pairs(objective, encoded, seq_len, most, short_seq_prob, generator)
    return _passages(objective, encoded, seq_len, most, separator, generator)


def borders(objective: str, encoded: Encoded) -> Borders:
    """The borders of sentences in the ids that `spans` returns for the same documents."""
    begins, separators = _with_separators(objective, encoded)
    positions = np.concatenate([begins, separators])
    order = np.argsort(positions)
    return Borders(positions[order], order >= len(begins))


def _pairs(
    objective: str, encoded: Encoded, seq_len: int, most: int, short_seq_prob: float, generator: random.Random
) -> Spans:
    offsets, documents = encoded.offsets.tolist(), [(first, last) for first, last in encoded.documents.tolist()]
    pair = next_sentence_pairs if objective == "nsp" else sentence_order_pairs
    sequences = _table(pair(offsets, documents, seq_len, short_seq_prob, generator), 5)

    def own(whole: Pair) -> list[tuple[int, int]]:
        first, second = sorted([whole[:2], whole[2:4]])
        if objective == "nsp" and whole.label == 1:
            return [whole[:2]]
        return [(first[0], second[1])] if first[1] == second[0] else [first, second]

    def piece(begin: int, tokens: int, end: int) -> tuple[Pair, int]:
        if objective == "nsp":
            return next_sentence_piece(offsets, documents, begin, tokens, end, generator)
        return sentence_order_piece(offsets, begin, tokens, generator)

    late = np.zeros(len(sequences), bool)
    if most > 1:
        sequences, late = fill_gaps(sequences, 2, seq_len, most, own, piece, generator)
    return Spans(encoded.ids, sequences, 2, late)


def _passages(
    objective: str, encoded: Encoded, seq_len: int, most: int, separator: int, generator: random.Random
) -> Spans:
    ids, documents = encoded.ids, encoded.documents
    begins, places = _with_separators(objective, encoded)
    ends, separators = begins + np.diff(encoded.offsets), places.tolist()
    if separators:
        ids = np.insert(ids, encoded.offsets[documents[:, 0]], separator)
        documents = np.array([[0, len(begins)]])
    if objective == "single":
        found = blocks(begins[documents[:, 0]], ends[documents[:, 1] - 1], seq_len - 2)
    else:
        ranges = [(first, last) for first, last in documents.tolist()]
        found = _table(sentence_passages(begins.tolist(), ends.tolist(), ranges, seq_len - 2), 2)
    last = found[:, 1:]
    sequences = np.concatenate([found, last, last, np.full_like(last, -1)], axis=1)

    def own(whole: Pair) -> list[tuple[int, int]]:
        begin, end = whole[:2]
        inner = separators[bisect_left(separators, begin) : bisect_left(separators, end)]
        return list(zip([begin, *(place + 1 for place in inner)], [*inner, end], strict=True))

    late = np.zeros(len(sequences), bool)
    if most > 1:
        sequences, late = fill_gaps(sequences, 1, seq_len, most, own, _passage, generator)
    return Spans(ids, sequences, 1, late)


def _with_separators(objective: str, encoded: Encoded) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "k"]]:
    """The first position of each sentence and those of the separators; full_sentences has one before each document."""
    begins = encoded.offsets[:-1]
    if objective != "full_sentences":
        return begins, np.zeros(0, np.int64)
    firsts = encoded.documents[:, 0]
    shift = np.zeros(len(begins), np.int64)
    shift[firsts] = 1
    begins = begins + np.cumsum(shift)
    return begins, begins[firsts] - 1


def _table(rows: Sequence[tuple[int, ...]], width: int) -> Int64[np.ndarray, "Q K"]:
    """Same as np.array, but seven times as fast."""
    return np.fromiter(itertools.chain.from_iterable(rows), np.int64, width * len(rows)).reshape(-1, width)


def _passage(begin: int, tokens: int, end: int) -> tuple[Pair, int]:
    last = begin + tokens
    return Pair(begin, last, last, last, -1), tokens
