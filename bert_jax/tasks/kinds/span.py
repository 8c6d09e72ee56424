"""Classifies spans of words: nested entities.

span_pairs      adds relations between spans
span_files      reads words, spans and relations
span_rows       encodes them as rows
span_objective  computes the loss and the arrays from which predictions are decoded
span_decoding   decodes the predicted spans and relations of a file
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.command import UserError
from bert_jax.config import TaskConfig
from bert_jax.tasks import reading
from bert_jax.tasks.example import Sentence, Span, SpannedSentence, Split
from bert_jax.tasks.input_records import InputRecord, value_of, words_of
from bert_jax.tasks.kinds import tagging_schemes
from bert_jax.tasks.kinds.span_decoding import (
    OVERLAPS,
    Scored,
    candidate_spans,
    spans_above,
    without_overlaps,
)
from bert_jax.tasks.kinds.span_files import checked_spans, read_spans
from bert_jax.tasks.kinds.span_objective import SPAN_VECTORS, SpanAnswer, SpanObjective
from bert_jax.tasks.kinds.span_rows import PAIRED, SpanRows, encode_spans
from bert_jax.tasks.kinds.words import span_object
from bert_jax.tasks.metric_functions import best_threshold, retrieval_metrics
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import Task, check_choice
from bert_jax.tokenizer import Tokenizer

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
        """Reads JSON lines or Parquet (span_files.read_spans), or CoNLL columns of entity tags."""
        if reading.kind_of_file(path) == "table":
            return read_spans(path, columns, label_required, relations=False)
        found = tagging_schemes.with_usual_letters(reading.read_conll(path, columns, label_required))
        line = tagging_schemes.first_line(found, lambda tag: not tagging_schemes.ENTITY_TAG.fullmatch(tag))
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
        """words and spans, and the spans that rows cannot hold (span_rows.encode_spans)."""
        lost = {name: rows.lost[name] for name in ("spans_too_long", "spans_cut")}
        return {"words": len(rows.word_rows), "spans": len(rows.firsts), **lost}

    def remarks(self, rows: SpanRows) -> list[str]:
        """Warnings about spans and relations that rows cannot hold."""
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
    """The spans of all sentences, each with the number of its sentence."""
    return {(number, span) for number, of_sentence in enumerate(spans) for span in of_sentence}


def matches(predicted: Set[Any], true: Set[Any]) -> tuple[int, int, int]:
    """The numbers of correct, predicted and true items."""
    return len(predicted & true), len(predicted), len(true)


def missing(train: Split, what: str) -> UserError:
    return UserError(f"{train.path} has no {what}. Name another file, or the column that holds them (task.label)")


def _spans_of_tags(sentence: Sentence) -> SpannedSentence:
    spans = tuple(tagging_schemes.entities(sentence.tags or ()))
    return SpannedSentence(sentence.words, spans, (), sentence.lines[0])
