"""Spans of words and pairs of them: nested entities, relations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.tasks import reading
from bert_jax.tasks.example import Sentence, Span, SpannedSentence, Split, TaskRows
from bert_jax.tasks.input_records import InputRecord, value_of, words_of
from bert_jax.tasks.kinds import tagging_schemes
from bert_jax.tasks.kinds.kind import Kind
from bert_jax.tasks.kinds.span_decoding import (
    best_threshold,
    candidates,
    guessed_relations,
    guessed_spans,
    right,
)
from bert_jax.tasks.kinds.span_files import checked_spans, read_spans
from bert_jax.tasks.kinds.span_objective import SpanAnswer, SpanObjective
from bert_jax.tasks.kinds.span_rows import PAIRED, SpanRows, encode_spans
from bert_jax.tasks.metric_functions import found_metrics
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import Task
from bert_jax.tokenizer import Tokenizer

# Where the training file has longer spans, task.max_span must be said: each length costs as much as the first.
LONGEST_BY_DEFAULT = 12
UNCALIBRATED = 0.5


class Spans(Kind):
    """Spans of up to task.max_span words, which may overlap and nest (kind spans), and relations (kind span_pairs).

    task.span_scores        `binary`: the probability of yes for each type, so that a span may have several;
                            `classes`: that of the best type, by a softmax over the types and none
    task.threshold          from which probability a span is one: what gives the best F1 on dev
    task.relations_between  `predicted`: spans are learnt and guessed, too; `given`: they are part of the input
    """

    def read(self, task: Task, path: Path, columns: Columns, label_required: bool) -> Split[SpannedSentence]:
        """JSON lines or Parquet (read_spans); or CoNLL columns of entity tags, whose spans are flat."""
        pairs = task.kind == "span_pairs"
        if reading.kind_of_file(path) == "table":
            return read_spans(path, columns, label_required or task.pairs_are_given, pairs)
        if pairs:
            raise UserError(f"{path} holds tags and no relations. Give a .jsonl with tokens, spans and relations")
        found = tagging_schemes.with_usual_letters(reading.read_conll(path, columns, label_required))
        if (
            line := tagging_schemes.first_line(found, lambda tag: not tagging_schemes.ENTITY_TAG.fullmatch(tag))
        ) is not None:
            raise UserError(
                f"{path} line {line}: the tag marks no entity; wanted O, or B-, I-, E- or S- and a type. "
                "Correct it, or the column (task.label)"
            )
        return Split(path, tuple(map(_spans_of_tags, found.items)), found.labelled)

    def parse(self, task: Task, source: Path, records: Sequence[InputRecord]) -> Split[SpannedSentence]:
        """Sentences of the words that were given, or that texts split into; with `spans` where these are given."""
        items = []
        for record in records:
            words, text, offsets = words_of(source, record, task.columns.text)
            spans: tuple[Span, ...] = ()
            if task.pairs_are_given:
                where, names = f"{source} line {record.line}: spans", (task.columns.label, "spans")
                spans = checked_spans(where, value_of(source, record, names), len(words))
            items.append(SpannedSentence(words, spans, (), record.line, text, offsets))
        return Split(source, tuple(items), labelled=False)

    def complete(self, task: Task, train: Split[SpannedSentence]) -> Task:
        """The task with the types, relations, longest span and metrics of its training file, where it names none.

        Raises UserError for a file without spans or, of pairs, without relations.
        """
        spans = [span for item in train.items for span in item.spans]
        relations = {relation.label for item in train.items for relation in item.relations}
        if not spans or (task.kind == "span_pairs" and not relations):
            what = "spans" if not spans else "relations"
            raise UserError(
                f"{train.path} has no {what}. Name another file, or the column that holds them (task.label)"
            )
        longest = task.max_span or min(max(span.end - span.first for span in spans), LONGEST_BY_DEFAULT)
        return replace(
            task,
            labels=task.labels or tuple(sorted({span.label for span in spans})),
            relation_labels=task.relation_labels or (tuple(sorted(relations)) if task.kind == "span_pairs" else ()),
            max_span=longest,
            metrics=task.metrics or self.default_metrics(task),
        )

    def default_metrics(self, task: Task) -> tuple[str, ...]:
        relations = ("relation_f1", "relation_precision", "relation_recall") if task.kind == "span_pairs" else ()
        return relations if task.pairs_are_given else (*relations, "f1", "precision", "recall")

    def encode(self, task: Task, split: Split[SpannedSentence], tokenizer: Tokenizer) -> SpanRows:
        return encode_spans(task, split, tokenizer)

    def counts(self, rows: TaskRows) -> dict[str, int]:
        """words, spans and relations; and those that rows cannot hold (span_rows.encode_spans)."""
        assert isinstance(rows, SpanRows)
        found = {"words": len(rows.word_rows), "spans": len(rows.firsts), **rows.lost}
        return found | ({"relations": len(rows.heads)} if "relations_lost" in rows.lost else {})

    def remarks(self, task: Task, rows: TaskRows) -> list[str]:
        """What rows cannot hold, where there is any."""
        assert isinstance(rows, SpanRows) and rows.split is not None
        why = {
            "spans_too_long": f"spans are longer than task.max_span={task.max_span} words",
            "spans_cut": f"spans lie across rows, which hold task.max_length={task.max_length} tokens of a sentence",
            "relations_lost": f"relations are between spans that no row holds, or behind a row's first {PAIRED}",
        }
        return [
            f"{rows.split.path}: {count} {why[name]}; they are not learnt, and count as missed"
            for name, count in rows.lost.items()
            if count
        ]

    def objective(self, task: Task) -> TaskObjective:
        return SpanObjective(
            length=task.max_span,
            types=len(task.labels),
            binary=task.span_scores == "binary",
            relations=len(task.relation_labels),
            given=task.pairs_are_given,
        )

    def measure(self, task: Task, rows: TaskRows, answers: Sequence[SpanAnswer]) -> dict[str, float]:
        """The metrics, over all spans and relations of the file; and `threshold` where the task has none yet.

        A span is found when its words and its type are right; a relation, when its two spans and its label are.
        """
        assert isinstance(rows, SpanRows) and rows.split is not None
        counted: dict[str, tuple[int, int, int]] = {}
        settled: dict[str, float] = {}
        spans: Sequence[Iterable[Span]] = [item.spans for item in rows.split.items]
        if not task.pairs_are_given:
            found = candidates(task, rows, answers)
            hits, total = right(task, rows, found), sum(len(set(item.spans)) for item in rows.split.items)
            if not task.threshold:
                settled["threshold"] = best_threshold(found.scores, hits, total)
                task = replace(task, threshold=settled["threshold"])
            kept = found.scores >= task.threshold
            counted[""] = (int(hits[kept].sum()), int(kept.sum()), total)
            spans = guessed_spans(task, rows, found.above(task.threshold))
        if task.kind == "span_pairs":
            guesses = {guess[:4] for guess in guessed_relations(task, rows, answers, [list(one) for one in spans])}
            truth = {
                (number, relation.label, item.spans[relation.head], item.spans[relation.tail])
                for number, item in enumerate(rows.split.items)
                for relation in item.relations
            }
            counted["relation_"] = (len(guesses & truth), len(guesses), len(truth))
        return found_metrics(task.metrics, counted) | settled

    def calibrated(self, task: Task, metrics: Mapping[str, float]) -> Task:
        """The task with the threshold that is best on dev; 1/2 where there is no dev."""
        return task if task.threshold else replace(task, threshold=metrics.get("threshold", UNCALIBRATED))

    def predictions(self, task: Task, rows: TaskRows, answers: Sequence[SpanAnswer]) -> list[dict[str, Any]]:
        """`words` and `spans` of each sentence, a span with `type`, `text`, `words` [first, end), its probability as
        `score`, and `start` and `end`, characters of the raw text, where there is one; and `relations`, each with
        `type`, `head` and `tail`, places among the spans, and `score`."""
        assert isinstance(rows, SpanRows) and rows.split is not None
        items = rows.split.items
        if task.pairs_are_given:
            spans: list[dict[Span, float]] = [dict.fromkeys(item.spans, 1.0) for item in items]
        else:
            found = candidates(task, rows, answers).above(task.threshold or UNCALIBRATED)
            spans = guessed_spans(task, rows, found)
        told: list[dict[str, Any]] = [
            {"words": list(item.words), "spans": [_told(item, *one) for one in of_item.items()]}
            for item, of_item in zip(items, spans, strict=True)
        ]
        if task.kind == "span_pairs":
            for one in told:
                one["relations"] = []
            for sentence, label, head, tail, score in guessed_relations(task, rows, answers, list(map(list, spans))):
                places = list(spans[sentence])
                ends = {"head": places.index(head), "tail": places.index(tail)}
                told[sentence]["relations"].append({"type": label, **ends, "score": score})
        return told


def _told(item: SpannedSentence, span: Span, score: float) -> dict[str, Any]:
    one = {"type": span.label, "text": " ".join(item.words[span.first : span.end]), "score": score}
    if item.text is not None and item.offsets is not None:
        start, end = item.offsets[span.first][0], item.offsets[span.end - 1][1]
        one |= {"text": item.text[start:end], "start": start, "end": end}
    return one | {"words": [span.first, span.end]}


def _spans_of_tags(sentence: Sentence) -> SpannedSentence:
    spans = tuple(tagging_schemes.entities(sentence.tags or ()))
    return SpannedSentence(sentence.words, spans, (), sentence.lines[0])
