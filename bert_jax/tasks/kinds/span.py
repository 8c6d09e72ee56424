"""Classifies spans of words (nested entities), and relations between spans.

span_data.py has their files, rows and objective. Here the predicted spans and relations are decoded and measured.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from bert_jax.config import TaskConfig
from bert_jax.errors import UserError
from bert_jax.model.heads import structured
from bert_jax.tasks.kinds import tagging
from bert_jax.tasks.kinds.span_data import (
    CANDIDATES,
    PAIRED,
    SPAN_VECTORS,
    SpanAnswer,
    SpanObjective,
    SpanRows,
    checked_spans,
    encode_spans,
    read_spans,
)
from bert_jax.tasks.kinds.tagging import span_object
from bert_jax.tasks.metrics import best_threshold, retrieval_metrics
from bert_jax.tasks.reading import labelled, tables
from bert_jax.tasks.reading.inputs import InputRecord, value_of, words_of
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.rows import Sentence, Span, SpannedSentence, Split
from bert_jax.tasks.task import Task, TaskObjective, check_choice
from bert_jax.tokenization.tokenizer import Tokenizer

# Decodes the predicted spans and relations of a file, and compares them with the true ones.


OVERLAPS = ("any", "nested", "flat")

SentenceRelation = tuple[int, str, Span, Span]  # the number of the sentence, the label, the head and the tail
Scored = dict[Span, float]  # the spans of a sentence and their probabilities


def candidate_spans(rows: SpanRows, answers: Sequence[SpanAnswer], labels: Sequence[str]) -> list[Scored]:
    """The best spans of each sentence, in reading order, an outer span before those inside it.

    They are the best of each row: CANDIDATES for each of its words, or fewer if it has fewer.
    """
    found: list[Scored] = [{} for _ in rows.split.items]
    for answer, count, sentence, start in zip(answers, np.diff(rows.row_words), *sentence_of_rows(rows), strict=True):
        kept = slice(CANDIDATES * count)
        word_and_length, types = np.divmod(answer.places[kept].astype(np.int64), len(labels))
        firsts, lengths = np.divmod(word_and_length, rows.longest)
        order = np.lexsort((-lengths, firsts))
        columns = (values[order].tolist() for values in (start + firsts, lengths, types, answer.scores[kept]))
        for first, length, kind, score in zip(*columns, strict=True):
            if score > 0:
                found[sentence][Span(labels[kind], first, first + length + 1)] = score
    return found


def spans_above(threshold: float, found: Sequence[Scored]) -> list[Scored]:
    """The spans of each sentence with at least this probability."""
    return [{span: score for span, score in one.items() if score >= threshold} for one in found]


def without_overlaps(found: Sequence[Scored], overlap: str) -> list[Scored]:
    """The spans of each sentence without those that overlap a more probable one (Yu et al. 2020, section 3).

    overlap is one of OVERLAPS: with `flat`, two spans have no common word; with `nested`, one of two with a common word
    lies in the other; with `any`, all are kept. The first of equally probable spans is kept. Spans above a threshold
    are the same whether it is applied before or afterwards.
    """
    if overlap == "any":
        return list(found)
    kept: list[Scored] = []
    for one in found:
        chosen: list[Span] = []
        for span in sorted(one, key=one.__getitem__, reverse=True):
            if not any(_clash(span, other, overlap) for other in chosen):
                chosen.append(span)
        kept.append({span: score for span, score in one.items() if span in chosen})
    return kept


def _clash(one: Span, other: Span, overlap: str) -> bool:
    apart = one.end <= other.first or other.end <= one.first
    if apart or overlap == "flat":
        return not apart
    inside = one.first <= other.first and other.end <= one.end
    around = other.first <= one.first and one.end <= other.end
    return not (inside or around)


def sentence_of_rows(rows: SpanRows) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]:
    """The sentence of each row, and how many of its words are in earlier rows."""
    sentences = rows.items()
    return sentences, rows.row_words[:-1] - rows.sentence_offsets[sentences]


def predicted_relations(
    rows: SpanRows, answers: Sequence[SpanAnswer], spans: Sequence[Sequence[Span]], relation_labels: Sequence[str]
) -> dict[SentenceRelation, float]:
    """The relations between these spans of each sentence, and their probabilities.

    Several given spans may have the same words; a predicted relation then holds for all of them.
    """
    sentences, before = sentence_of_rows(rows)
    by_words: list[dict[tuple[int, int], list[Span]]] = [{} for _ in spans]
    for sentence, of_sentence in enumerate(spans):
        for span in of_sentence:
            by_words[sentence].setdefault((span.first, span.end), []).append(span)
    found: dict[SentenceRelation, float] = {}
    for row, answer in enumerate(answers):
        sentence, start = int(sentences[row]), int(before[row])
        firsts = answer.pair_firsts + start
        paired = [
            by_words[sentence].get(pair, [])
            for pair in zip(firsts.tolist(), (firsts + answer.pair_lengths).tolist(), strict=True)
        ]
        for head, tail in np.argwhere(answer.relations > 0).tolist():
            if head != tail:
                label = relation_labels[answer.relations[head, tail] - 1]
                score = float(answer.relation_scores[head, tail])
                for a, b in itertools.product(paired[head], paired[tail]):
                    if a != b:
                        found.setdefault((sentence, label, a, b), score)
    return found


# Longer spans require task.max_span, because each additional length costs as much as the first one.
LONGEST_BY_DEFAULT = 12
UNCALIBRATED = 0.5

Counted = dict[str, tuple[int, int, int]]  # the correct, predicted and true items, by the prefix of their metrics


@dataclass(frozen=True)
class SpanTask(Task[SpannedSentence, SpanRows]):
    """Spans of up to max_span words, which may overlap and nest, each with a type.

    | option | |
    |---|---|
    | max_span | words of the longest span that is considered; 0: until the training file is read |
    | span_scores | `binary`: a probability for each type, so that a span may have several; `classes`: a softmax over
      the types and none, so that a span has at most one |
    | span_vectors | what the vector of a span is made of: `endpoints`, the hidden states of its first and last word and
      the mean of all; `boundary`, a dense layer for the first and one for the last word instead of their hidden
      states; `content`, with these an attention over the words instead of the mean (Lee et al. 2017) |
    | span_overlap | the predicted spans of a sentence: `any`; `nested`, no two of which overlap in part; `flat`, no two
      of which have a common word. The more probable of two is kept (Yu et al. 2020, section 3) |
    | threshold | the probability from which a span is predicted; 0: until it is calibrated to the best F1 on dev |
    """

    kind = "spans"
    unread_columns = ("text_pair", "marks")

    max_span: int = TaskConfig.max_span
    span_scores: str = "binary"
    span_vectors: str = TaskConfig.span_vectors
    span_overlap: str = TaskConfig.span_overlap
    threshold: float = TaskConfig.threshold

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("task.span_scores", self.span_scores, ("binary", "classes"))
        check_choice("task.span_vectors", self.span_vectors, tuple(SPAN_VECTORS))
        check_choice("task.span_overlap", self.span_overlap, OVERLAPS)
        if self.max_span < 0 or not 0 <= self.threshold < 1:
            raise UserError(
                f"task.max_span is {self.max_span} and task.threshold {self.threshold}; use a number of words and a "
                "probability below 1, or 0 to take them from the training file and from dev"
            )

    @property
    def pairs_are_given(self) -> bool:
        """Whether the spans between which relations are predicted are part of the input."""
        return False

    @property
    def relation_names(self) -> tuple[str, ...]:
        """The labels of relations; empty where none are predicted."""
        return ()

    @property
    def least_relation(self) -> float:
        """The least probability of a predicted relation; 0: that of none."""
        return 0.0

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[SpannedSentence]:
        """Reads JSON lines or Parquet (read_spans), or CoNLL columns of entity tags."""
        if tables.kind_of_file(path) == "table":
            return read_spans(path, columns, label_required, relations=False)
        found = tagging.with_usual_letters(labelled.read_conll(path, columns, label_required))
        line = tagging.first_line(found, lambda tag: not structured.ENTITY_TAG.fullmatch(tag))
        if line is not None:
            raise UserError(
                f"{path} line {line}: the tag does not mark an entity; expected O, or B-, I-, E- or S- and a type. "
                "Correct it, or the column (task.label)"
            )
        return Split(path, tuple(map(_spans_of_tags, found.items)), found.labelled)

    def parse(self, source: Path, records: Sequence[InputRecord]) -> Split[SpannedSentence]:
        """Sentences of the given words, or of the words of raw texts; with `spans` where these are given."""
        items = []
        for record in records:
            words, text, offsets = words_of(source, record, self.columns.text)
            spans: tuple[Span, ...] = ()
            if self.pairs_are_given:
                where, names = f"{source} line {record.line}: spans", (self.columns.label, "spans")
                spans = checked_spans(where, value_of(source, record, names), len(words))
            items.append(SpannedSentence(words, spans, (), record.line, text, offsets))
        return Split(source, tuple(items), labelled=False)

    def complete(self, train: Split[SpannedSentence]) -> Task:
        """The task with the types, longest span and metrics of its training file.

        Raises UserError for a file without spans.
        """
        spans = [span for item in train.items for span in item.spans]
        if not spans:
            raise missing(train, "spans")
        longest = self.max_span or min(max(span.end - span.first for span in spans), LONGEST_BY_DEFAULT)
        labels = self.labels or tuple(sorted({span.label for span in spans}))
        return replace(self, labels=labels, max_span=longest).with_metrics()

    @property
    def known_metrics(self) -> Collection[str]:
        return SpanTask.default_metrics(self)

    def default_metrics(self) -> tuple[str, ...]:
        return ("f1", "precision", "recall")

    def encode(self, split: Split[SpannedSentence], tokenizer: Tokenizer) -> SpanRows:
        return encode_spans(
            split,
            tokenizer,
            max_length=self.max_length,
            max_span=self.max_span,
            labels=None if self.pairs_are_given else self.labels,
            binary_types=len(self.labels) if self.span_scores == "binary" else 0,
            relation_labels=self.relation_names,
        )

    def counts(self, rows: SpanRows) -> dict[str, int]:
        """words and spans, and the spans that rows cannot hold (encode_spans)."""
        lost = {name: rows.lost[name] for name in ("spans_too_long", "spans_cut")}
        return {"words": len(rows.word_rows), "spans": len(rows.firsts), **lost}

    def remarks(self, rows: SpanRows) -> list[str]:
        why = {
            "spans_too_long": f"spans are longer than task.max_span={self.max_span} words",
            "spans_cut": f"spans cross rows, which hold task.max_length={self.max_length} tokens of a sentence",
            "relations_lost": f"relations are between spans that no row holds, or after the first {PAIRED} of a row",
        }
        return [
            f"{rows.split.path}: {count} {why[name]}; they are not trained on, and count as missed"
            for name, count in rows.lost.items()
            if count
        ]

    def objective(self) -> TaskObjective:
        return SpanObjective(
            length=self.max_span,
            types=len(self.labels),
            binary=self.span_scores == "binary",
            relations=len(self.relation_names),
            given=self.pairs_are_given,
            vectors=self.span_vectors,
            relation_threshold=self.least_relation,
        )

    def measure(self, rows: SpanRows, answers: Sequence[SpanAnswer]) -> dict[str, float]:
        """The metrics over all spans of the file; and `threshold`, calibrated on it, where the task has none yet.

        A span is correct when its words and its type are.
        """
        counted, _, calibrated = self._span_counts(rows, answers)
        return retrieval_metrics(self.metrics, counted) | calibrated

    def calibrated(self, metrics: Mapping[str, float]) -> "SpanTask":
        """The task with the threshold that is best on dev; 1/2 without a dev file."""
        return self if self.threshold else replace(self, threshold=metrics.get("threshold", UNCALIBRATED))

    def predictions(self, rows: SpanRows, answers: Sequence[SpanAnswer]) -> list[dict[str, Any]]:
        """`words` and `spans` of each sentence. A span has `type`, `text`, `words` [first, end), its probability as
        `score`, and `start` and `end`, characters of the raw text, where there is one."""
        return self._span_objects(rows, self._spans(rows, answers))

    def _span_counts(
        self, rows: SpanRows, answers: Sequence[SpanAnswer]
    ) -> tuple[Counted, list[Scored], dict[str, float]]:
        """The counts that the metrics of spans are computed from, the predicted spans, and `threshold`, where it is
        calibrated."""
        found = without_overlaps(candidate_spans(rows, answers, self.labels), self.span_overlap)
        true_spans = _numbered(item.spans for item in rows.split.items)
        threshold = self.threshold
        if not threshold:
            scores = np.array([score for one in found for score in one.values()])
            hits = np.array([(number, span) in true_spans for number, one in enumerate(found) for span in one], bool)
            threshold = best_threshold(scores, hits, len(true_spans))
        predicted = spans_above(threshold, found)
        counted = {"": matches(_numbered(predicted), true_spans)}
        return counted, predicted, {} if self.threshold else {"threshold": threshold}

    def _spans(self, rows: SpanRows, answers: Sequence[SpanAnswer]) -> list[Scored]:
        """The spans of each sentence and their probabilities: the given ones, or the predicted ones."""
        if self.pairs_are_given:
            return [dict.fromkeys(item.spans, 1.0) for item in rows.split.items]
        found = without_overlaps(candidate_spans(rows, answers, self.labels), self.span_overlap)
        return spans_above(self.threshold or UNCALIBRATED, found)

    def _span_objects(self, rows: SpanRows, spans: Sequence[Mapping[Span, float]]) -> list[dict[str, Any]]:
        return [
            {"words": list(item.words), "spans": [span_object(item, *one) for one in of_item.items()]}
            for item, of_item in zip(rows.split.items, spans, strict=True)
        ]


def _numbered(spans: Iterable[Iterable[Span]]) -> set[tuple[int, Span]]:
    return {(number, span) for number, of_sentence in enumerate(spans) for span in of_sentence}


def matches(predicted: Set[Any], true: Set[Any]) -> tuple[int, int, int]:
    """The numbers of correct, predicted and true items."""
    return len(predicted & true), len(predicted), len(true)


def missing(train: Split, what: str) -> UserError:
    return UserError(f"{train.path} has no {what}. Name another file, or the column that holds them (task.label)")


def _spans_of_tags(sentence: Sentence) -> SpannedSentence:
    spans = tuple(tagging.entities(sentence.tags or ()))
    return SpannedSentence(sentence.words, spans, (), sentence.lines[0])


OF_PREDICTED_SPANS = ("labels", "span_scores", "span_overlap", "threshold")


@dataclass(frozen=True)
class SpanPairTask(SpanTask):
    """Relations between spans, and with relations_between=predicted also the spans themselves.

    | option | |
    |---|---|
    | relations_between | `predicted`: spans are trained and predicted, too; `given`: they are part of the input |
    | relation_threshold | the probability from which the most probable relation of two spans is predicted; 0: where it
      is more probable than none |
    | relation_labels | by id - 1; empty until the training file is read |
    """

    kind = "span_pairs"

    relations_between: str = "predicted"
    relation_threshold: float = TaskConfig.relation_threshold
    relation_labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("task.relations_between", self.relations_between, ("predicted", "given"))
        if not 0 <= self.relation_threshold < 1:
            raise UserError(
                f"task.relation_threshold is {self.relation_threshold}; use a probability below 1, or 0 for relations "
                "that are more probable than none"
            )

    @property
    def least_relation(self) -> float:
        return self.relation_threshold

    @property
    def pairs_are_given(self) -> bool:
        return self.relations_between == "given"

    @property
    def relation_names(self) -> tuple[str, ...]:
        return self.relation_labels

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[SpannedSentence]:
        """Reads JSON lines or Parquet (read_spans)."""
        if tables.kind_of_file(path) != "table":
            raise UserError(f"{path} holds tags but no relations. Give a .jsonl with tokens, spans and relations")
        return read_spans(path, columns, label_required, relations=True, spans_required=self.pairs_are_given)

    def complete(self, train: Split[SpannedSentence]) -> Task:
        """Also sets the labels of relations. Raises UserError for a file without spans or relations, and for options of
        predicted spans where these are given."""
        for item in fields(self):
            value = getattr(self, item.name)
            if self.pairs_are_given and item.name in OF_PREDICTED_SPANS and value != item.default:
                shown = ",".join(value) if isinstance(value, tuple) else value
                raise UserError(
                    f"task.{item.name} is {shown}, which is of predicted spans, but with task.relations_between=given "
                    "none are predicted; leave it out"
                )
        relations = {relation.label for item in train.items for relation in item.relations}
        if not relations and any(item.spans for item in train.items):
            raise missing(train, "relations")
        task = replace(self, relation_labels=self.relation_labels or tuple(sorted(relations)))
        return super(SpanPairTask, task).complete(train)

    @property
    def known_metrics(self) -> Collection[str]:
        return self.default_metrics()

    def default_metrics(self) -> tuple[str, ...]:
        relations = ("relation_f1", "relation_precision", "relation_recall")
        return relations if self.pairs_are_given else (*relations, *super().default_metrics())

    def counts(self, rows: SpanRows) -> dict[str, int]:
        lost = {"relations_lost": rows.lost["relations_lost"]}
        return super().counts(rows) | lost | {"relations": len(rows.heads)}

    def measure(self, rows: SpanRows, answers: Sequence[SpanAnswer]) -> dict[str, float]:
        """Also computes the metrics over all relations. A relation is correct when its two spans and its label are."""
        counted: Counted = {}
        calibrated: dict[str, float] = {}
        spans: Sequence[Iterable[Span]] = [item.spans for item in rows.split.items]
        if not self.pairs_are_given:
            counted, spans, calibrated = self._span_counts(rows, answers)
        found = predicted_relations(rows, answers, [list(one) for one in spans], self.relation_labels)
        true_relations = {
            (number, relation.label, item.spans[relation.head], item.spans[relation.tail])
            for number, item in enumerate(rows.split.items)
            for relation in item.relations
        }
        counted["relation_"] = matches(set(found), true_relations)
        return retrieval_metrics(self.metrics, counted) | calibrated

    def predictions(self, rows: SpanRows, answers: Sequence[SpanAnswer]) -> list[dict[str, Any]]:
        """Also returns `relations`, each with `type`, `head` and `tail`, indices of spans, and `score`."""
        spans = self._spans(rows, answers)
        objects = [one | {"relations": []} for one in self._span_objects(rows, spans)]
        found = predicted_relations(rows, answers, list(map(list, spans)), self.relation_labels)
        for (sentence, label, head, tail), score in found.items():
            places = list(spans[sentence])
            ends = {"head": places.index(head), "tail": places.index(tail)}
            objects[sentence]["relations"].append({"type": label, **ends, "score": score})
        return objects
