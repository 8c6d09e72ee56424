"""Classifies spans of words (nested entities), and relations between spans.

span_data.py has their files, rows and objective. Here the predicted spans and relations are decoded and measured.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int64

from bert_jax.config.finetuning import SpanOptions, SpanPairOptions
from bert_jax.errors import UserError
from bert_jax.model.heads import structured
from bert_jax.tasks import tag_schemes
from bert_jax.tasks.kinds.span_data import (
    CANDIDATES,
    PAIRED,
    SpanAnswer,
    SpanObjective,
    SpanRows,
    checked_spans,
    encode_spans,
    read_spans,
)
from bert_jax.tasks.kinds.tagging import RawWords, span_object
from bert_jax.tasks.metrics import best_threshold, check_metric_names, retrieval_metrics
from bert_jax.tasks.reading import labelled, tables
from bert_jax.tasks.reading.inputs import PIECES, InputRecord, read_value, record_words, unit_of_words
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.rows import Span, SpannedSentence, Split
from bert_jax.tasks.task import Description, Task
from bert_jax.tokenization.tokenizer import Tokenizer

# Decodes the predicted spans and relations of a file, and compares them with the true ones.


OVERLAPS = ("any", "nested", "flat")

SentenceRelation = tuple[int, str, Span, Span]  # the number of the sentence, the label, the head and the tail
Scored = dict[Span, float]  # the spans of a sentence and their probabilities
Counted = dict[str, tuple[int, int, int]]  # the correct, predicted and true items, by the prefix of their metrics


def candidate_spans(rows: SpanRows, answers: Sequence[SpanAnswer], labels: Sequence[str]) -> list[Scored]:
    """Finds each sentence's best spans, in reading order, an outer span before the ones inside it.

    A row contributes CANDIDATES spans for every word, or all if it has fewer.
    """
    candidates: list[Scored] = [{} for _ in rows.split.items]
    for answer, count, sentence, start in zip(answers, np.diff(rows.row_words), *sentence_of_rows(rows), strict=True):
        # The answers have places for every position of the padded batch. Only as many as the row's own words give it
        # count, so that padding changes no result.
        best = slice(CANDIDATES * count)
        # places = (word * K + length - 1) * C + type (SpanAnswer)
        word_and_length, types = np.divmod(answer.places[best].astype(np.int64), len(labels))
        firsts, lengths = np.divmod(word_and_length, rows.longest)
        # lexsort sorts by its last key first: by the first word, then the longest span.
        order = np.lexsort((-lengths, firsts))
        columns = (values[order].tolist() for values in (start + firsts, lengths, types, answer.scores[best]))
        for first, length, kind, score in zip(*columns, strict=True):
            if score > 0:
                candidates[sentence][Span(labels[kind], first, first + length + 1)] = score
    return candidates


def spans_above(threshold: float, sentences: Sequence[Scored]) -> list[Scored]:
    """Selects each sentence's spans with at least this probability."""
    return [{span: score for span, score in spans.items() if score >= threshold} for spans in sentences]


def without_overlaps(sentences: Sequence[Scored], overlap: str) -> list[Scored]:
    """Drops spans that overlap a more probable one in their sentence (Yu et al. 2020, section 3).

    If spans are equally probable, the first one is kept. A threshold gives the same spans whether it is applied before
    or afterwards.

    Args:
        overlap: One of OVERLAPS: with `flat`, two spans have no common word; with `nested`, one of two with a common
            word lies in the other; with `any`, all are kept.
    """
    if overlap == "any":
        return list(sentences)

    def clash(span: Span, other: Span) -> bool:
        if span.end <= other.first or other.end <= span.first:
            return False
        inside = span.first <= other.first and other.end <= span.end
        around = other.first <= span.first and span.end <= other.end
        return overlap == "flat" or not (inside or around)

    remaining: list[Scored] = []
    for spans in sentences:
        chosen: list[Span] = []
        for span in sorted(spans, key=spans.__getitem__, reverse=True):
            if not any(clash(span, other) for other in chosen):
                chosen.append(span)
        # In the given order again, which is the reading order.
        remaining.append({span: score for span, score in spans.items() if span in chosen})
    return remaining


def sentence_of_rows(rows: SpanRows) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]:
    """Returns each row's sentence, and how many of its words are in earlier rows."""
    sentences = rows.items()
    return sentences, rows.row_words[:-1] - rows.sentence_offsets[sentences]


def predicted_relations(
    rows: SpanRows, answers: Sequence[SpanAnswer], spans: Sequence[Iterable[Span]], relation_labels: Sequence[str]
) -> dict[SentenceRelation, float]:
    """Finds the relations between these spans, by sentence, with their probabilities.

    Several given spans may have the same words; a predicted relation then holds for all of them.
    """
    by_words: list[dict[tuple[int, int], list[Span]]] = [{} for _ in spans]
    for known, sentence_spans in zip(by_words, spans, strict=True):
        for span in sentence_spans:
            known.setdefault((span.first, span.end), []).append(span)
    relations: dict[SentenceRelation, float] = {}
    for answer, sentence, start in zip(answers, *map(np.ndarray.tolist, sentence_of_rows(rows)), strict=True):
        firsts = answer.pair_firsts + start
        ends = firsts + answer.pair_lengths
        paired = [by_words[sentence].get(pair, []) for pair in zip(firsts.tolist(), ends.tolist(), strict=True)]
        for head, tail in np.argwhere(answer.relations > 0).tolist():
            label = relation_labels[answer.relations[head, tail] - 1]
            score = float(answer.relation_scores[head, tail])
            # Heads and tails are the same list of spans; a relation is between two different ones.
            for a, b in itertools.product(paired[head], paired[tail]) if head != tail else ():
                if a != b:
                    relations.setdefault((sentence, label, a, b), score)
    return relations


def _numbered(spans: Iterable[Iterable[Span]]) -> set[tuple[int, Span]]:
    # With the sentence's number, because several sentences may have equal spans.
    return {(number, span) for number, sentence_spans in enumerate(spans) for span in sentence_spans}


def _matches(predicted: Set[Any], true: Set[Any]) -> tuple[int, int, int]:
    """The numbers of correct, predicted and true items."""
    return len(predicted & true), len(predicted), len(true)


def _missing(train: Split, items: str) -> UserError:
    return UserError(f"{train.path} has no {items}. Name another file, or the column that holds them (task.label)")


# Longer spans require task.max_span, because each additional length costs as much as the first one.
LONGEST_BY_DEFAULT = 12
UNCALIBRATED = 0.5
SPAN_METRICS = ("f1", "precision", "recall")
RELATION_METRICS = ("relation_f1", "relation_precision", "relation_recall")


@dataclass(frozen=True)
class SpanTask(SpanOptions, RawWords, Task[SpannedSentence, SpanRows]):
    """Spans of up to max_span words, which may overlap and nest, each with a type.

    span_scores=binary predicts every type on its own, `classes` by a softmax over the types and none. span_vectors:
    `content` attends to the words as in Lee et al. 2017. span_overlap keeps the more probable span (Yu et al. 2020,
    section 3).
    """

    kind = "spans"
    known_metrics: ClassVar[tuple[str, ...]] = SPAN_METRICS
    usual_metrics: ClassVar[tuple[str, ...]] = SPAN_METRICS

    @property
    def pairs_are_given(self) -> bool:
        """Whether the input includes the spans between which relations are predicted."""
        return False

    @property
    def relation_names(self) -> tuple[str, ...]:
        """The labels of relations; empty if none are predicted."""
        return ()

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[SpannedSentence]:
        """Reads JSON lines or Parquet (read_spans), or CoNLL columns of entity tags."""
        if tables.kind_of_file(path) == "table":
            return read_spans(path, columns, label_required, relations=False)
        tagged = tag_schemes.with_usual_letters(labelled.read_conll(path, columns, label_required))
        line = tag_schemes.first_line(tagged, lambda tag: not structured.ENTITY_TAG.fullmatch(tag))
        if line is not None:
            raise UserError(
                f"{path} line {line}: the tag does not mark an entity; expected O, or B-, I-, E- or S- and a type. "
                "Correct it, or the column (task.label)"
            )
        items = (
            SpannedSentence(item.words, tuple(tag_schemes.entities(item.tags or ())), (), item.lines[0])
            for item in tagged.items
        )
        return Split(path, tuple(items), tagged.labelled)

    def parse_record(self, source: Path, record: InputRecord) -> SpannedSentence:
        """A sentence from words or a raw text; with `spans` if these are given."""
        # Given spans count the words of the text, which must not be split again.
        unit = PIECES if self.pairs_are_given else self.raw_words
        words, text, offsets, raw = record_words(source, record, self.columns.text, unit)
        spans: tuple[Span, ...] = ()
        if self.pairs_are_given:
            values = read_value(source, record, (self.columns.label, "spans"))
            spans = checked_spans(f"{source} line {record.line}: spans", values, len(words))
        return SpannedSentence(words, spans, (), record.line, text, offsets, raw and not self.pairs_are_given)

    def complete(self, train: Split[SpannedSentence]) -> Task:
        """Sets the types, the longest span and the metrics. Raises UserError for a file without spans."""
        spans = [span for item in train.items for span in item.spans]
        if not spans:
            raise _missing(train, "spans")
        longest = self.max_span or min(max(span.end - span.first for span in spans), LONGEST_BY_DEFAULT)
        labels = self.labels or tuple(sorted({span.label for span in spans}))
        raw_words = unit_of_words(item.words for item in train.items)
        return replace(self, labels=labels, max_span=longest, raw_words=raw_words).with_metrics()

    def encode(self, split: Split[SpannedSentence], tokenizer: Tokenizer) -> SpanRows:
        return encode_spans(
            self.split_raw(split, tokenizer),
            tokenizer,
            max_length=self.max_length,
            max_span=self.max_span,
            labels=None if self.pairs_are_given else self.labels,
            binary_types=len(self.labels) if self.span_scores == "binary" else 0,
            relation_labels=self.relation_names,
        )

    def describe(self, rows: SpanRows, training: bool = False) -> Description:
        """Counts words and spans, and the spans that rows cannot hold (encode_spans)."""
        reasons = {
            "spans_too_long": f"spans are longer than task.max_span={self.max_span} words",
            "spans_cut": f"spans cross rows, which hold task.max_length={self.max_length} tokens of a sentence",
            "relations_lost": f"relations are between spans that no row holds, or after the first {PAIRED} of a row",
        }
        remarks = [
            f"{rows.split.path}: {count} {reasons[name]}; they are not trained on, and count as missed"
            for name, count in rows.lost.items()
            if count
        ]
        lost = {name: rows.lost[name] for name in ("spans_too_long", "spans_cut")}
        return Description({"words": len(rows.word_rows), "spans": len(rows.firsts), **lost}, remarks)

    def objective(self) -> SpanObjective:
        return SpanObjective(self.max_span, len(self.labels), self.span_scores == "binary", self.span_vectors)

    def measure(self, rows: SpanRows, answers: Sequence[SpanAnswer]) -> dict[str, float]:
        """Computes the metrics over all spans in the file, and calibrates `threshold` on it if the task has none yet.

        A span is correct when its words and its type are.
        """
        counts, _, calibrated = self._count_spans(rows, answers)
        return retrieval_metrics(self.metrics, counts) | calibrated

    def calibrated(self, metrics: Mapping[str, float]) -> "SpanTask":
        """The task with the threshold that is best on dev; 1/2 without a dev file."""
        return self if self.threshold else replace(self, threshold=metrics.get("threshold", UNCALIBRATED))

    def predictions(self, rows: SpanRows, answers: Sequence[SpanAnswer]) -> list[dict[str, Any]]:
        """`words` and `spans` by sentence.

        A span has `type`, `text`, `words` [first, end), its probability as `score`, and `start` and `end`, characters
        of the raw text if there is one.
        """
        return [
            {"words": list(item.words), "spans": [span_object(item, *scored) for scored in spans.items()]}
            for item, spans in zip(rows.split.items, self._spans(rows, answers), strict=True)
        ]

    def _count_spans(
        self, rows: SpanRows, answers: Sequence[SpanAnswer]
    ) -> tuple[Counted, list[Scored], dict[str, float]]:
        """The counts for retrieval_metrics, the predicted spans, and `threshold` if it is calibrated."""
        candidates = without_overlaps(candidate_spans(rows, answers, self.labels), self.span_overlap)
        true_spans = _numbered(item.spans for item in rows.split.items)
        threshold, calibrated = self.threshold, {}
        if not threshold:
            scores = np.array([score for spans in candidates for score in spans.values()])
            hits = [(number, span) in true_spans for number, spans in enumerate(candidates) for span in spans]
            # True spans that are no candidates count as missed at any threshold.
            threshold = best_threshold(scores, np.array(hits, bool), len(true_spans))
            calibrated = {"threshold": threshold}
        predicted = spans_above(threshold, candidates)
        return {"": _matches(_numbered(predicted), true_spans)}, predicted, calibrated

    def _spans(self, rows: SpanRows, answers: Sequence[SpanAnswer]) -> list[Scored]:
        """Each sentence's spans, given or predicted, and their probabilities."""
        if self.pairs_are_given:
            return [dict.fromkeys(item.spans, 1.0) for item in rows.split.items]
        candidates = without_overlaps(candidate_spans(rows, answers, self.labels), self.span_overlap)
        return spans_above(self.threshold or UNCALIBRATED, candidates)


OF_PREDICTED_SPANS = ("labels", "span_scores", "span_overlap", "threshold")


@dataclass(frozen=True)
class SpanPairTask(SpanPairOptions, SpanTask):
    """Relations between spans, and with relations_between=predicted also the spans themselves."""

    kind = "span_pairs"
    known_metrics = (*RELATION_METRICS, *SPAN_METRICS)

    relation_labels: tuple[str, ...] = ()  # by id - 1; empty until the training file is read

    def __post_init__(self) -> None:
        super().__post_init__()
        # If spans are given, there is nothing to measure about them.
        check_metric_names(self.metrics, self.default_metrics())

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
        """Also sets the labels of relations.

        Raises UserError for a file without spans or relations, and for options of predicted spans if these are given.
        """
        for item in fields(self):
            value = getattr(self, item.name)
            if self.pairs_are_given and item.name in OF_PREDICTED_SPANS and value != item.default:
                shown = ",".join(value) if isinstance(value, tuple) else value
                raise UserError(
                    f"task.{item.name} is {shown}, which applies to predicted spans, but with "
                    "task.relations_between=given none are predicted; leave it out"
                )
        relations = {relation.label for item in train.items for relation in item.relations}
        # SpanTask.complete reports a file without spans.
        if not relations and any(item.spans for item in train.items):
            raise _missing(train, "relations")
        task = replace(self, relation_labels=self.relation_labels or tuple(sorted(relations)))
        # With two arguments, super() continues with the new task; without, it would continue with `self`.
        return super(SpanPairTask, task).complete(train)

    def default_metrics(self) -> tuple[str, ...]:
        return RELATION_METRICS if self.pairs_are_given else (*RELATION_METRICS, *SPAN_METRICS)

    def describe(self, rows: SpanRows, training: bool = False) -> Description:
        """Also counts relations, and the ones that rows cannot hold."""
        counts, remarks = super().describe(rows)
        relations = {"relations_lost": rows.lost["relations_lost"], "relations": len(rows.heads)}
        return Description(counts | relations, remarks)

    def objective(self) -> SpanObjective:
        return replace(
            super().objective(),
            relations=len(self.relation_labels),
            given=self.pairs_are_given,
            relation_threshold=self.relation_threshold,
        )

    def measure(self, rows: SpanRows, answers: Sequence[SpanAnswer]) -> dict[str, float]:
        """Also computes the metrics over all relations. A relation is correct when its two spans and its label are."""
        counts: Counted = {}
        calibrated: dict[str, float] = {}
        spans: Sequence[Iterable[Span]] = [item.spans for item in rows.split.items]
        if not self.pairs_are_given:
            counts, spans, calibrated = self._count_spans(rows, answers)
        relations = predicted_relations(rows, answers, spans, self.relation_labels)
        # Heads and tails are spans instead of indices, because the predicted spans have other indices.
        true_relations = {
            (number, relation.label, item.spans[relation.head], item.spans[relation.tail])
            for number, item in enumerate(rows.split.items)
            for relation in item.relations
        }
        counts["relation_"] = _matches(set(relations), true_relations)
        return retrieval_metrics(self.metrics, counts) | calibrated

    def predictions(self, rows: SpanRows, answers: Sequence[SpanAnswer]) -> list[dict[str, Any]]:
        """Also returns `relations`, each with `type`, `head` and `tail`, indices of spans, and `score`."""
        spans = self._spans(rows, answers)
        objects = [prediction | {"relations": []} for prediction in super().predictions(rows, answers)]
        relations = predicted_relations(rows, answers, spans, self.relation_labels)
        for (sentence, label, head, tail), score in relations.items():
            # The prediction lists its spans in this order, so these are their indices.
            places = list(spans[sentence])
            ends = {"head": places.index(head), "tail": places.index(tail)}
            objects[sentence]["relations"].append({"type": label, **ends, "score": score})
        return objects
