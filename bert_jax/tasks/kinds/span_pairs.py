"""Relations between spans of words."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.config import TaskConfig
from bert_jax.tasks import reading
from bert_jax.tasks.example import Span, SpannedSentence, Split
from bert_jax.tasks.kinds.span import Counted, SpanTask, matches, missing
from bert_jax.tasks.kinds.span_decoding import predicted_relations
from bert_jax.tasks.kinds.span_files import read_spans
from bert_jax.tasks.kinds.span_objective import SpanAnswer
from bert_jax.tasks.kinds.span_rows import SpanRows
from bert_jax.tasks.metric_functions import retrieval_metrics
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import Task, check_choice

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
        """Reads JSON lines or Parquet (span_files.read_spans)."""
        if reading.kind_of_file(path) != "table":
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
        """Also counts relations, and those that rows cannot hold."""
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
