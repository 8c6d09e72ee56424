"""Encodes sentences with spans and relations as rows, and makes batches of them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Int64

from bert_jax.tasks.example import SpannedSentence, Split, Taken
from bert_jax.tasks.kinds.labels import check_label
from bert_jax.tasks.word_rows import WordRows, encode_words
from bert_jax.tokenizer import Tokenizer

# The most spans of a row between which relations are predicted: there are quadratically many pairs, with wide vectors.
PAIRED = 32

Triples = list[list[tuple[int, int, int]]]  # of each row


class SpanLabels(NamedTuple):
    """The value of TaskBatch.labels: W words in each row, K lengths, P paired spans, C types.

    W is T less the number of special tokens that the vocabulary puts around a text.

    | field | dtype, shape | |
    |---|---|---|
    | word_slots | i32[B,W] | the position of each word's first piece |
    | words | i32[B,W] | 1: a word; 0: none |
    | types | i32[B,W,K], or with task.span_scores=binary i32[B,W,K,C] | for the span of each length at each
      word: 0 for none, else its type's id + 1; or 1 for each of its types |
    | pair_firsts, pair_lengths | i32[B,P] | the spans that may have relations; length 0: none |
    | relations | i32[B,P,P] | from the first span to the second: 0 none, else the relation's id + 1 |
    | relation_weights | f32[B,P,P] | 0: not a pair of two spans, or unlabelled |
    """

    word_slots: Any
    words: Any
    types: Any
    pair_firsts: Any
    pair_lengths: Any
    relations: Any
    relation_weights: Any


@dataclass(frozen=True, eq=False, kw_only=True)
class SpanRows(WordRows[SpannedSentence]):
    """Rows of words with S spans and Q relations, each entirely in its row."""

    row_words: Int64[np.ndarray, "R+1"]  # the first word of each row
    span_offsets: Int64[np.ndarray, "R+1"]  # in the spans
    firsts: Int32[np.ndarray, "S"]  # index among the words of the row
    lengths_in_words: Int32[np.ndarray, "S"]
    types: Int32[np.ndarray, "S"]
    relation_offsets: Int64[np.ndarray, "R+1"]  # in the relations
    heads: Int32[np.ndarray, "Q"]  # index among the spans of the row
    tails: Int32[np.ndarray, "Q"]
    relations: Int32[np.ndarray, "Q"]
    longest: int  # K
    special: int  # special tokens in each row
    binary_types: int  # C with task.span_scores=binary, else 0
    labelled: bool
    lost: dict[str, int]  # counts of the spans and relations that the rows cannot hold, by reason

    @property
    def paired(self) -> int:
        """P, the number of spans in each row of a batch between which relations are predicted."""
        return max(1, min(PAIRED, int(np.diff(self.span_offsets).max(initial=0))))

    def targets(self, taken: Taken) -> tuple[SpanLabels, Float32[np.ndarray, "B W K"]]:
        batch, longest, paired = len(taken.rows), self.longest, self.paired
        width = taken.real.shape[1] - self.special
        counts = np.where(taken.filler, 0, np.diff(self.row_words)[taken.rows])
        words = np.arange(width) < counts[:, None]
        places = np.where(words, self.row_words[taken.rows][:, None] + np.arange(width), 0)
        by_type = (self.binary_types,) if self.binary_types else ()
        types = np.zeros((batch, width, longest, *by_type), np.int32)
        firsts, lengths = np.zeros((2, batch, paired), np.int32)
        relations, weights = np.zeros((batch, paired, paired), np.int32), np.zeros((batch, paired, paired), np.float32)
        for place, row in enumerate(taken.rows):
            if taken.filler[place]:
                continue
            of_row = slice(*self.span_offsets[row : row + 2])
            at = (place, self.firsts[of_row], self.lengths_in_words[of_row] - 1)
            if self.binary_types:
                types[(*at, self.types[of_row])] = 1
            else:
                types[at] = self.types[of_row] + 1
            count = min(paired, of_row.stop - of_row.start)
            firsts[place, :count] = self.firsts[of_row][:count]
            lengths[place, :count] = self.lengths_in_words[of_row][:count]
            of_row = slice(*self.relation_offsets[row : row + 2])
            relations[place, self.heads[of_row], self.tails[of_row]] = self.relations[of_row] + 1
            weights[place, :count, :count] = self.labelled * (1 - np.eye(count))
        word_positions = np.where(words, self.word_slots[places], 0).astype(np.int32)
        possible = np.arange(width)[:, None] + np.arange(1, longest + 1) <= counts[:, None, None]
        labels = SpanLabels(word_positions, words.astype(np.int32), types, firsts, lengths, relations, weights)
        return labels, (possible & self.labelled).astype(np.float32)


def encode_spans(
    split: Split[SpannedSentence],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    max_span: int,
    labels: tuple[str, ...] | None,
    binary_types: int,
    relation_labels: tuple[str, ...],
) -> SpanRows:
    """The rows of a split (word_rows.encode_words), with the spans and relations that they can hold.

    labels are the types of spans; None where spans are part of the input, whose types are ignored. A span may be
    longer than max_span words, or cross two rows of a long sentence; a relation may be between spans of two rows, with
    a lost span, or after the row's first PAIRED spans. These are in no row. They are counted, and remain among the
    true ones that predictions are measured by. Raises UserError, with the line, for an unknown label.
    """
    words = encode_words(split, tokenizer, max_length)
    row_words = np.searchsorted(words.word_rows, np.arange(words.count + 1)).astype(np.int64)
    held, between, lost = _held(words, row_words, max_span, labels, relation_labels)
    firsts, lengths, types = _columns(held)
    heads, tails, relations = _columns(between)
    return SpanRows(
        **vars(words),
        row_words=row_words,
        span_offsets=np.cumsum([0, *map(len, held)], dtype=np.int64),
        firsts=firsts,
        lengths_in_words=lengths,
        types=types,
        relation_offsets=np.cumsum([0, *map(len, between)], dtype=np.int64),
        heads=heads,
        tails=tails,
        relations=relations,
        longest=max_span,
        special=tokenizer.begin + tokenizer.end,
        binary_types=binary_types,
        labelled=split.labelled,
        lost=lost,
    )


def _held(
    words: WordRows[SpannedSentence],
    row_words: Int64[np.ndarray, "K"],
    max_span: int,
    labels: tuple[str, ...] | None,
    relation_labels: tuple[str, ...],
) -> tuple[Triples, Triples, dict[str, int]]:
    """The spans (first word, length, type) and relations (head, tail, label) of each row, and the lost ones' counts."""
    split = words.split
    spans: Triples = [[] for _ in range(words.count)]
    relations: Triples = [[] for _ in range(words.count)]
    lost = dict.fromkeys(("spans_too_long", "spans_cut", "relations_lost"), 0)
    for item, base in zip(split.items, words.sentence_offsets, strict=False):
        where: dict[int, tuple[int, int]] = {}  # of each span kept, its row and its index there
        for number, span in enumerate(item.spans if split.labelled or labels is None else ()):
            row = int(words.word_rows[base + span.first])
            kind = 0 if labels is None else check_label(split, item.line, span.label, labels)
            if span.end - span.first > max_span:
                lost["spans_too_long"] += 1
            elif words.word_rows[base + span.end - 1] != row:
                lost["spans_cut"] += 1
            else:
                where[number] = row, len(spans[row])
                spans[row].append((int(base) + span.first - int(row_words[row]), span.end - span.first, kind))
        for relation in item.relations if split.labelled and relation_labels else ():
            kind = check_label(split, item.line, relation.label, relation_labels)
            head, tail = where.get(relation.head), where.get(relation.tail)
            if head and tail and head[0] == tail[0] and max(head[1], tail[1]) < PAIRED:
                relations[head[0]].append((head[1], tail[1], kind))
            else:
                lost["relations_lost"] += 1
    return spans, relations, lost


def _columns(by_row: Triples) -> tuple[Int32[np.ndarray, "S"], ...]:
    flat = [values for row in by_row for values in row]
    return tuple(np.array(flat, np.int32).reshape(-1, 3).T.copy())
