"""Sentences with spans and relations as rows, and what a batch of them holds."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Int64

from bert_jax.tasks.example import SpannedSentence, Split, Taken
from bert_jax.tasks.kinds.labels import check_label
from bert_jax.tasks.task import Task
from bert_jax.tasks.word_rows import WordRows, encode_words
from bert_jax.tokenizer import Tokenizer

# Spans of a row that relations are asked of, at most: a pair's vector is wide, and there are as many as the square.
PAIRED = 32


class SpanLabels(NamedTuple):
    """What TaskBatch.labels holds. W = T - 2 words a row, K lengths, P paired spans, C types.

    | field | dtype, shape | |
    |---|---|---|
    | word_slots | i32[B,W] | the first piece of each word |
    | words | i32[B,W] | 1: a word; 0: none |
    | types | i32[B,W,K], or with task.span_scores=binary i32[B,W,K,C] | of the span of each length at each word: 0 for
      none, else its type's id + 1; or 1 for each of its types |
    | pair_firsts, pair_lengths | i32[B,P] | the spans between which relations hold; length 0: none |
    | relations | i32[B,P,P] | from a row's span to a column's: 0 none, else the relation's id + 1 |
    | relation_weights | f32[B,P,P] | 0: no pair of two spans, or not labelled |
    """

    word_slots: Any
    words: Any
    types: Any
    pair_firsts: Any
    pair_lengths: Any
    relations: Any
    relation_weights: Any


@dataclass(frozen=True, eq=False, kw_only=True)
class SpanRows(WordRows):
    """Rows of words with S spans and Q relations, each wholly in its row."""

    row_words: Int64[np.ndarray, "R+1"]  # the first word of each row
    span_offsets: Int64[np.ndarray, "R+1"]  # in the spans
    firsts: Int32[np.ndarray, "S"]  # by the words of the row
    lengths_in_words: Int32[np.ndarray, "S"]
    types: Int32[np.ndarray, "S"]
    relation_offsets: Int64[np.ndarray, "R+1"]  # in the relations
    heads: Int32[np.ndarray, "Q"]  # by the spans of the row
    tails: Int32[np.ndarray, "Q"]
    relations: Int32[np.ndarray, "Q"]
    longest: int  # K
    binary_types: int  # C with task.span_scores=binary, else 0
    labelled: bool
    lost: dict[str, int]  # what the rows cannot hold, by why

    @property
    def paired(self) -> int:
        """P."""
        return max(1, min(PAIRED, int(np.diff(self.span_offsets).max(initial=0))))

    def truth(self, taken: Taken) -> tuple[SpanLabels, Float32[np.ndarray, "B W K"]]:
        batch, longest, paired = len(taken.rows), self.longest, self.paired
        width = taken.real.shape[1] - 2
        counts = np.where(taken.filler, 0, np.diff(self.row_words)[taken.rows])
        words = np.arange(width) < counts[:, None]
        places = np.where(words, self.row_words[taken.rows][:, None] + np.arange(width), 0)
        types = np.zeros((batch, width, longest), np.int32)
        if self.binary_types:
            types = np.zeros((batch, width, longest, self.binary_types), np.int32)
        firsts, lengths = np.zeros((2, batch, paired), np.int32)
        relations, weights = np.zeros((batch, paired, paired), np.int32), np.zeros((batch, paired, paired), np.float32)
        for place, row in enumerate(taken.rows):
            if taken.filler[place]:
                continue
            mine = slice(*self.span_offsets[row : row + 2])
            at = (place, self.firsts[mine], self.lengths_in_words[mine] - 1)
            if self.binary_types:
                types[(*at, self.types[mine])] = 1
            else:
                types[at] = self.types[mine] + 1
            count = min(paired, mine.stop - mine.start)
            firsts[place, :count] = self.firsts[mine][:count]
            lengths[place, :count] = self.lengths_in_words[mine][:count]
            mine = slice(*self.relation_offsets[row : row + 2])
            relations[place, self.heads[mine], self.tails[mine]] = self.relations[mine] + 1
            weights[place, :count, :count] = self.labelled * (1 - np.eye(count))
        slots = np.where(words, self.word_slots[places], 0).astype(np.int32)
        possible = np.arange(width)[:, None] + np.arange(1, longest + 1) <= counts[:, None, None]
        labels = SpanLabels(slots, words.astype(np.int32), types, firsts, lengths, relations, weights)
        return labels, (possible & self.labelled).astype(np.float32)


def encode_spans(task: Task, split: Split[SpannedSentence], tokenizer: Tokenizer) -> SpanRows:
    """The rows of a split (words.encode_words), with those of its spans and relations that they can hold.

    A span may be longer than task.max_span words, or lie in two rows of a long sentence; a relation may be between
    spans of two rows, or one of them lost, or beyond the row's first PAIRED. These are in no row, are counted, and
    stay in what guesses are measured by. Raises UserError for an unknown label, with its line.
    """
    encoded = encode_words([item.words for item in split.items], tokenizer, task.max_length)
    rows = len(encoded.offsets) - 1
    row_words = np.searchsorted(encoded.word_rows, np.arange(rows + 1)).astype(np.int64)
    lost = dict.fromkeys(("spans_too_long", "spans_cut", "relations_lost"), 0)
    spans: list[list[tuple[int, int, int]]] = [[] for _ in range(rows)]
    relations: list[list[tuple[int, int, int]]] = [[] for _ in range(rows)]
    given = split.labelled or task.pairs_are_given
    for item, base in zip(split.items, encoded.sentence_offsets, strict=False):
        where: dict[int, tuple[int, int]] = {}  # of each span kept, its row and its place there
        for number, span in enumerate(item.spans if given else ()):
            row = int(encoded.word_rows[base + span.first])
            kind = 0 if task.pairs_are_given else check_label(task, split, item.line, span.label)
            if span.end - span.first > task.max_span:
                lost["spans_too_long"] += 1
            elif encoded.word_rows[base + span.end - 1] != row:
                lost["spans_cut"] += 1
            else:
                where[number] = row, len(spans[row])
                spans[row].append((int(base) + span.first - int(row_words[row]), span.end - span.first, kind))
        for relation in item.relations if split.labelled and task.kind == "span_pairs" else ():
            kind = check_label(task, split, item.line, relation.label, task.relation_labels)
            head, tail = where.get(relation.head), where.get(relation.tail)
            if head and tail and head[0] == tail[0] and max(head[1], tail[1]) < PAIRED:
                relations[head[0]].append((head[1], tail[1], kind))
            else:
                lost["relations_lost"] += 1
    firsts, lengths, types = _columns(spans)
    heads, tails, kinds = _columns(relations)
    return SpanRows(
        **encoded._asdict(),
        pad_id=tokenizer.pad_id,
        split=split,
        row_words=row_words,
        span_offsets=np.cumsum([0, *map(len, spans)], dtype=np.int64),
        firsts=firsts,
        lengths_in_words=lengths,
        types=types,
        relation_offsets=np.cumsum([0, *map(len, relations)], dtype=np.int64),
        heads=heads,
        tails=tails,
        relations=kinds,
        longest=task.max_span,
        binary_types=len(task.labels) if task.span_scores == "binary" else 0,
        labelled=split.labelled,
        lost=lost if task.kind == "span_pairs" else {name: lost[name] for name in ("spans_too_long", "spans_cut")},
    )


def _columns(by_row: list[list[tuple[int, int, int]]]) -> tuple[Int32[np.ndarray, "S"], ...]:
    flat = [values for row in by_row for values in row]
    return tuple(np.array(flat, np.int32).reshape(-1, 3).T.copy())
