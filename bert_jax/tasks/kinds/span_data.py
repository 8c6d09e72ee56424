"""Spans and relations: their files, their rows, and the objective."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32, Int64

from bert_jax.errors import UserError
from bert_jax.model.bert import Bert
from bert_jax.model.heads.config import Heads, SpanHeads
from bert_jax.model.heads.structured import choose_spans, possible_spans, take_spans
from bert_jax.model.outputs import relation_logits, span_logits, span_vectors
from bert_jax.model.transformer import gather_positions
from bert_jax.tasks.labels import check_label
from bert_jax.tasks.reading.entities import entity_remarks, mark_entities
from bert_jax.tasks.reading.inputs import checked_text
from bert_jax.tasks.reading.tables import Column, Columns, is_stored, read_records
from bert_jax.tasks.rows import Relation, Span, SpannedSentence, Split, Taken, TaskBatch
from bert_jax.tasks.task import TaskObjective, span_sums
from bert_jax.tasks.word_rows import WordRows, encode_words
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train.losses import binary_sums, classification_sums
from bert_jax.train.objectives import Counts, Term, Terms

# The fields of spans and relations in files, and an example.
EXPECTED = {
    "spans": (
        *("start", "end"),
        'an object like {"start": 0, "end": 2, "label": "PER"}: word indices from 0, the end exclusive',
    ),
    "relations": (
        *("head", "tail"),
        'an object like {"head": 0, "tail": 1, "label": "works_for"}: indices of spans, from 0',
    ),
}


def read_spans(
    path: Path, columns: Columns, label_required: bool, relations: bool, spans_required: bool = False
) -> Split[SpannedSentence]:
    """Reads sentences of `tokens` with `spans` and, if asked, `relations`, unless columns name the first two.

    Spans count words; in a text instead of a list of words, they count characters (mark_entities). A file is labelled
    if its spans or, if relations are read, its relations are not all null.

    Args:
        spans_required: Spans are part of the input, so a file must have them even without labels.

    Raises:
        UserError: The file is of another kind, labels or columns are missing, or a span or relation is malformed. The
            message names the line.
    """
    if not is_stored(path):
        raise UserError(
            f"{path}: spans are read from .jsonl or .parquet (non-nested ones also from .conll). Convert the file"
        )
    tokens, spans = columns.text or "tokens", columns.label or "spans"
    requested = [
        Column(tokens, "text"),
        Column(spans, "label", required=label_required or spans_required),
        Column("relations", "label", required=label_required and relations),
    ]
    records = read_records(path, requested).records
    # If relations are read, they decide, because spans may be part of an unlabelled input.
    deciding = 2 if relations else 1
    labelled = any(record.values[deciding] is not None for record in records)
    if label_required and not labelled:
        raise UserError(f"{path} has no labels: column {requested[deciding].name!r} is null throughout")
    items, widened = [], 0
    for number, (words, span_values, relation_values) in records:
        source = f"{path} line {number}"
        text, offsets = None, None
        if isinstance(words, str):  # whose spans are characters
            text = checked_text(path, number, words)
            words, offsets, sentence_spans, wider = mark_entities(f"{source}: {spans}", text, span_values or [])
            widened += wider
        elif not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
            raise UserError(
                f"{source}: {tokens} is {words!r:.60}; expected a list of words, each a text that is not empty"
            )
        else:
            sentence_spans = checked_spans(f"{source}: {spans}", span_values or [], len(words))
        between = []
        for place, head, tail, label in _checked_objects(f"{source}: relations", relation_values or [], "relations"):
            count = len(sentence_spans)
            if not (0 <= head < count and 0 <= tail < count) or head == tail:
                raise UserError(
                    f"{place} is from span {head} to {tail}; expected the indices of two different spans (the line has "
                    f"{count})"
                )
            between.append(Relation(label, head, tail))
        items.append(SpannedSentence(tuple(words), sentence_spans, tuple(between), number, text, offsets))
    return Split(path, tuple(items), labelled, remarks=entity_remarks(widened))


def checked_spans(source: str, values: Any, words: int) -> tuple[Span, ...]:
    """The spans in a sentence with `words` words, from JSON. Raises UserError that begins with `source`."""
    spans = []
    for place, first, end, label in _checked_objects(source, values, "spans"):
        if not 0 <= first < end <= words:
            raise UserError(f"{place} is from word {first} to {end}, but the sentence has {words} words. Correct it")
        spans.append(Span(label, first, end))
    return tuple(spans)


def _checked_objects(source: str, values: Any, kind: str) -> Iterator[tuple[str, int, int, str]]:
    """Checks a list of spans or relations; yields place, two indices and a label. A span may lack its label."""
    first_name, second_name, expected = EXPECTED[kind]
    if not isinstance(values, list):
        raise UserError(f"{source} is {values!r:.60}; expected a list of {kind}, each {expected}")
    for number, value in enumerate(values):
        place = f"{source}[{number}]"
        fields = value if isinstance(value, Mapping) else {}
        first, second, label = fields.get(first_name), fields.get(second_name), fields.get("label")
        has_label = (isinstance(label, str) and label != "") or (kind == "spans" and label in (None, ""))
        # isinstance would take true and false for integers.
        if type(first) is not int or type(second) is not int or not has_label:
            raise UserError(f"{place} is {value!r:.80}; expected {expected}")
        yield place, first, second, label or ""


# The most spans of a row between which relations are predicted: there are quadratically many pairs, with wide vectors.
PAIRED = 32

Triples = list[list[tuple[int, int, int]]]  # by row


class SpanLabels(NamedTuple):
    """The value of TaskBatch.labels: W words per row, K lengths, P paired spans, C types.

    W is T less the special tokens that the vocabulary puts around a text.
    """

    word_slots: Any  # i32[B,W]: where words start
    words: Any  # i32[B,W], 1: a word; 0: none
    # i32[B,W,K], by first word and length: 0 for none, else the type's id + 1. With task.span_scores=binary,
    # i32[B,W,K,C]: 1 for each type.
    types: Any
    pair_firsts: Any  # i32[B,P]: the spans that may have relations
    pair_lengths: Any  # i32[B,P], 0: none
    relations: Any  # i32[B,P,P], from the first span to the second: 0 for none, else the relation's id + 1
    relation_weights: Any  # f32[B,P,P], 0: not a pair of two spans, or unlabelled


@dataclass(frozen=True, eq=False, kw_only=True)
class SpanRows(WordRows[SpannedSentence]):
    """Rows of words with S spans and Q relations; none crosses rows."""

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
    lost: dict[str, int]  # numbers of spans and relations that the rows cannot hold, by reason

    @property
    def paired(self) -> int:
        """P, the number of spans per row between which relations are predicted."""
        return max(1, min(PAIRED, int(np.diff(self.span_offsets).max(initial=0))))

    def targets(self, taken: Taken) -> tuple[SpanLabels, Float32[np.ndarray, "B W K"]]:
        batch, longest, paired = len(taken.rows), self.longest, self.paired
        width = taken.real.shape[1] - self.special
        counts = np.where(taken.filler, 0, np.diff(self.row_words)[taken.rows])
        words = np.arange(width) < counts[:, None]
        # Positions without a word read word 0, so that all indices are valid.
        places = np.where(words, self.row_words[taken.rows][:, None] + np.arange(width), 0)
        by_type = (self.binary_types,) if self.binary_types else ()
        types = np.zeros((batch, width, longest, *by_type), np.int32)
        firsts, lengths = np.zeros((2, batch, paired), np.int32)
        relations, weights = np.zeros((batch, paired, paired), np.int32), np.zeros((batch, paired, paired), np.float32)
        for place, row in enumerate(taken.rows):
            if taken.filler[place]:
                continue
            own = slice(*self.span_offsets[row : row + 2])
            at = (place, self.firsts[own], self.lengths_in_words[own] - 1)
            if self.binary_types:
                types[(*at, self.types[own])] = 1
            else:
                types[at] = self.types[own] + 1
            count = min(paired, own.stop - own.start)
            firsts[place, :count] = self.firsts[own][:count]
            lengths[place, :count] = self.lengths_in_words[own][:count]
            own = slice(*self.relation_offsets[row : row + 2])
            relations[place, self.heads[own], self.tails[own]] = self.relations[own] + 1
            # All pairs of two different spans are trained; most of them have no relation, which is class 0.
            weights[place, :count, :count] = self.labelled * (1 - np.eye(count))
        word_positions = np.where(words, self.word_slots[places], 0).astype(np.int32)
        # A span lies within the words of its row.
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
    """The rows of a split (encode_words), with the spans and relations that they can hold.

    labels are the types of spans; None if spans are part of the input, whose types are ignored. Rows hold no span that
    is longer than max_span words or crosses two rows of a long sentence, and no relation with such a span, between two
    rows, or with one after the row's first PAIRED spans. These are counted, and predictions are measured by them too.
    Raises UserError, with the line, for an unknown label.
    """
    words = encode_words(split, tokenizer, max_length)
    row_words = np.searchsorted(words.word_rows, np.arange(words.count + 1)).astype(np.int64)
    spans: Triples = [[] for _ in range(words.count)]  # first word in the row, length, type
    relations: Triples = [[] for _ in range(words.count)]  # head and tail among the row's spans, label
    lost = dict.fromkeys(("spans_too_long", "spans_cut", "relations_lost"), 0)
    for item, base in zip(split.items, words.sentence_offsets, strict=False):
        places: dict[int, tuple[int, int]] = {}  # by number of a span that is kept: its row and its index there
        for number, span in enumerate(item.spans if split.labelled or labels is None else ()):
            row = int(words.word_rows[base + span.first])
            kind = 0 if labels is None else check_label(split, item.line, span.label, labels)
            if span.end - span.first > max_span:
                lost["spans_too_long"] += 1
            elif words.word_rows[base + span.end - 1] != row:
                lost["spans_cut"] += 1
            else:
                places[number] = row, len(spans[row])
                spans[row].append((int(base) + span.first - int(row_words[row]), span.end - span.first, kind))
        for relation in item.relations if split.labelled and relation_labels else ():
            kind = check_label(split, item.line, relation.label, relation_labels)
            head, tail = places.get(relation.head), places.get(relation.tail)
            if head and tail and head[0] == tail[0] and max(head[1], tail[1]) < PAIRED:
                relations[head[0]].append((head[1], tail[1], kind))
            else:
                lost["relations_lost"] += 1
    firsts, lengths, types = _columns(spans)
    heads, tails, relation_ids = _columns(relations)
    return SpanRows(
        **vars(words),
        row_words=row_words,
        span_offsets=np.cumsum([0, *map(len, spans)], dtype=np.int64),
        firsts=firsts,
        lengths_in_words=lengths,
        types=types,
        relation_offsets=np.cumsum([0, *map(len, relations)], dtype=np.int64),
        heads=heads,
        tails=tails,
        relations=relation_ids,
        longest=max_span,
        special=tokenizer.begin + tokenizer.end,
        binary_types=binary_types,
        labelled=split.labelled,
        lost=lost,
    )


def _columns(by_row: Triples) -> tuple[Int32[np.ndarray, "S"], ...]:
    flat = [values for row in by_row for values in row]
    return tuple(np.array(flat, np.int32).reshape(-1, 3).T.copy())


# The boundaries and the content (SpanHeads) of span vectors, by the name of task.span_vectors.
SPAN_VECTORS = {
    "endpoints": ("hidden", "mean"),
    "boundary": ("networks", "mean"),
    "content": ("networks", "attention"),
}
# Candidate spans for each word of a row: a tree over n words has fewer than 2n nodes.
CANDIDATES = 2


class SpanOutputs(NamedTuple):
    """The heads' outputs: W words per row, spans with up to K words, vectors with size G = 3D."""

    vectors: Any  # f32[B,W,K,G]
    logits: Any  # f32[B,W,K,C], class 0 is none, unless scores are binary; None if spans are given
    relations: Any  # f32[B,P,P,1+Q] between the paired spans, class 0 is none; None without relations


class SpanAnswer(NamedTuple):
    """The arrays from which a row's spans and relations are decoded. A field that the task does not need is None."""

    places: Any  # i32[2W]: the best of all spans with a type, best first: (word * K + length - 1) * C + type
    scores: Any  # f32[2W]: their probabilities; 0: no span
    pair_firsts: Any  # i32[P]: the spans between which relations are predicted
    pair_lengths: Any  # i32[P], 0: none
    relations: Any  # i32[P,P], from span p to span q: 0 for none, else the relation's id + 1
    relation_scores: Any  # f32[P,P]: their probabilities


@dataclass(frozen=True)
class SpanObjective(TaskObjective):
    """Cross-entropy over all spans up to `length` words, and over all pairs of a row's true spans.

    Spans: Jurafsky and Martin, Speech and Language Processing, 3rd edition, "Fine-tuning for Span-Based Applications";
    spans with and without a type weigh the same. A span's vector is computed from the hidden states of its words' first
    pieces. With binary scores, the losses of a span's types are summed. Relations: trained between true spans and
    predicted between predicted ones (Zhong and Chen 2021, section 3.2), from the vectors of Luan et al. 2018, with a
    separate loss term.
    """

    length: int
    types: int
    binary: bool
    vectors: str = "endpoints"  # one of SPAN_VECTORS
    relations: int = 0  # the number of relation labels; 0: none are predicted
    given: bool = False  # spans are part of the input
    relation_threshold: float = 0.0  # the least probability of a predicted relation; 0: more probable than none

    @property
    def heads(self) -> Heads:
        classes = 0 if self.given else self.types + (not self.binary)
        relations = self.relations + 1 if self.relations else 0
        boundaries, content = SPAN_VECTORS[self.vectors]
        return Heads(spans=SpanHeads(self.length, boundaries, content, classes, relations))

    @property
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        terms = ("task", "relation") if self.relations and not self.given else ("task",)
        return dict.fromkeys(terms, ("accuracy",))

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> SpanOutputs:
        labels = batch.labels
        hidden = gather_positions(model.encode(batch, dropout_key).last, labels.word_slots)
        vectors = span_vectors(model, hidden, dropout_key)
        logits = None if self.given else span_logits(model, vectors, dropout_key)
        relations = None
        if self.relations:
            # A missing span has length 0. It reads a span of one word, so that its index is valid; its pairs weigh 0.
            paired = take_spans(vectors, labels.pair_firsts, jnp.maximum(labels.pair_lengths, 1))
            relations = relation_logits(model, paired, dropout_key)
        return SpanOutputs(vectors, logits, relations)

    def loss_terms(self, model: Bert, outputs: SpanOutputs, batch: TaskBatch) -> Terms:
        labels, weights = batch.labels, batch.label_weights
        terms: Terms = {}
        if not self.given:
            if self.binary:
                by_type = jnp.broadcast_to(weights[..., None], outputs.logits.shape)
                loss, _ = binary_sums(outputs.logits, labels.types, by_type)
                # binary_sums counts types as correct, but the accuracy is of spans: all types of a span must be right.
                right = ((outputs.logits >= 0) == (labels.types > 0)).all(axis=-1)
                terms["task"] = Term(loss, {"accuracy": (right * weights).sum()})
            else:
                loss, correct = span_sums(outputs.logits, labels.types, weights)
                terms["task"] = Term(loss, {"accuracy": correct})
        if self.relations:
            loss, correct = classification_sums(outputs.relations, labels.relations, labels.relation_weights)
            terms["task" if self.given else "relation"] = Term(loss, {"accuracy": correct})
        return terms

    def counts(self, batch: TaskBatch) -> Counts:
        """`task`, the spans, and `relation`, the pairs; where spans are given, `task` is the pairs."""
        if self.given:
            return {"task": batch.labels.relation_weights.sum()}
        spans = {"task": batch.label_weights.sum()}
        return spans | ({"relation": batch.labels.relation_weights.sum()} if self.relations else {})

    def answers(self, model: Bert, outputs: SpanOutputs, batch: TaskBatch) -> SpanAnswer:
        labels = batch.labels
        if self.given:
            relations = self.best_relations(outputs.relations)
            return SpanAnswer(None, None, labels.pair_firsts, labels.pair_lengths, *relations)
        # As sequence ids: words are sequence 1, and positions without a word are padding.
        possible = possible_spans(labels.words, self.length)
        if self.binary:
            shares = jax.nn.sigmoid(outputs.logits)
        else:  # all but the best are 0, so that a span has one type
            shares = jax.nn.softmax(outputs.logits, axis=-1)[..., 1:]
            shares = jnp.where(shares >= shares.max(axis=-1, keepdims=True), shares, 0)
        shares = jnp.where(possible[..., None], shares, 0)
        flat = shares.reshape(shares.shape[0], -1)
        scores, places = jax.lax.top_k(flat, min(CANDIDATES * labels.words.shape[1], flat.shape[1]))
        if not self.relations:
            return SpanAnswer(places, scores, None, None, None, None)
        # Relations are predicted between the most probable spans, which training does not see.
        firsts, lengths, exists = choose_spans(shares.max(axis=-1), possible, PAIRED)
        relations = self.best_relations(relation_logits(model, take_spans(outputs.vectors, firsts, lengths)))
        return SpanAnswer(places, scores, firsts, jnp.where(exists, lengths, 0), *relations)

    def best_relations(self, logits: Float[Array, "B P P C"]) -> tuple[Int[Array, "B P P"], Float[Array, "B P P"]]:
        """The most probable relation per pair and its probability, or 0 and the probability of none."""
        shares = jax.nn.softmax(logits, axis=-1)
        none, best = shares[..., 0], shares[..., 1:].max(axis=-1)
        predicted = best >= self.relation_threshold if self.relation_threshold else best > none
        relations = jnp.where(predicted, 1 + shares[..., 1:].argmax(axis=-1), 0)
        return relations.astype(jnp.int32), jnp.where(predicted, best, none)
