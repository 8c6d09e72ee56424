"""Question answering: an answer is a part of the context (SQuAD: Rajpurkar et al. 2016, 2018).

question_files    reads SQuAD's JSON, and records of question, context and answers
question_windows  encodes a question and its context as rows that slide over a long context
question_answers  finds the best answers of a row, and of all rows of a question
question_metrics  exact match and F1 of words, as the official scripts of SQuAD 1.1 and 2.0 compute them
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from bert_jax.command import UserError
from bert_jax.config import TaskConfig
from bert_jax.model.bert import Bert
from bert_jax.model.heads import Heads
from bert_jax.model.task_outputs import answer_logits
from bert_jax.tasks.example import Split, TaskBatch
from bert_jax.tasks.input_records import InputRecord
from bert_jax.tasks.kinds.question_answers import RowAnswers, answer_object, best_spans, decode
from bert_jax.tasks.kinds.question_files import Question, question_of, read_questions, read_squad
from bert_jax.tasks.kinds.question_metrics import (
    SQUAD1_METRICS,
    SQUAD2_METRICS,
    THRESHOLD,
    squad1_metrics,
    squad2_metrics,
)
from bert_jax.tasks.kinds.question_windows import QuestionRows, encode_questions
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.reading import Columns, kind_of_file
from bert_jax.tasks.task import Task
from bert_jax.tasks.task_losses import IMPOSSIBLE, answer_sums
from bert_jax.tokenizer import Tokenizer
from bert_jax.train.losses import Scalar
from bert_jax.train.objectives import Term, Terms
from bert_jax.train.soft_losses import soft_class_sum

# Without a threshold from a dev file: no answer where it is more probable than the best one (run_squad.py's default).
NULL_THRESHOLD = 0.5


@dataclass(frozen=True)
class QuestionTask(Task[Question, QuestionRows]):
    """An answer to a question that is a part of its context; with unanswerable, there may be none.

    | option | |
    |---|---|
    | max_query_length | pieces of a question at most |
    | doc_stride | pieces from one window of a long context to the next |
    | n_best | answers kept for each question |
    | max_answer_length | pieces of an answer at most |
    | unanswerable | whether questions may have no answer (SQuAD 2.0) |
    | null_threshold | the probability of no answer above which a question has none; None: the best one on dev |
    """

    kind = "question"
    unread_columns = ("marks",)
    has_labels = False

    max_query_length: int = TaskConfig.max_query_length
    doc_stride: int = TaskConfig.doc_stride
    n_best: int = TaskConfig.n_best
    max_answer_length: int = TaskConfig.max_answer_length
    unanswerable: bool = False
    null_threshold: float | None = TaskConfig.null_threshold

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.null_threshold is not None and not 0 <= self.null_threshold <= 1:
            raise UserError(
                f"task.null_threshold is {self.null_threshold}; use a probability from 0 to 1, or leave it out for "
                "the threshold that is best on dev"
            )
        for name in ("max_query_length", "doc_stride", "n_best", "max_answer_length"):
            if getattr(self, name) < 1:
                raise UserError(f"task.{name} is {getattr(self, name)}; use 1 or more")

    @property
    def known_metrics(self) -> Collection[str]:
        return SQUAD2_METRICS if self.unanswerable else dict.fromkeys((*SQUAD2_METRICS, *SQUAD1_METRICS))

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[Question]:
        """Reads SQuAD's JSON where the name ends in .json, else a table of questions, contexts and answers."""
        if kind_of_file(path) == "squad":
            return read_squad(path, label_required)
        return read_questions(path, columns, label_required)

    def parse(self, source: Path, records: Sequence[InputRecord]) -> Split[Question]:
        """A question and its context from each record, and its id where there is one."""
        found = tuple(question_of(source, record, self.columns) for record in records)
        return Split(source, found, labelled=False)

    def complete(self, train: Split[Question]) -> Task:
        """The task with unanswerable set where the training file has questions without an answer; its metrics then have
        the threshold that predictions use, too.

        Raises UserError for a null_threshold where every question has one.
        """
        task = replace(self, unanswerable=self.unanswerable or _some_without(train))
        if task.null_threshold is not None and not task.unanswerable:
            raise UserError(
                f"task.null_threshold is {task.null_threshold}, but every question of {train.path} has an answer, so "
                "the model learns to always give one. Leave it out"
            )
        metrics = task.metrics or task.default_metrics()
        if task.unanswerable and task.null_threshold is None and THRESHOLD not in metrics:
            metrics = (*metrics, THRESHOLD)  # which `calibrated` needs
        return replace(task, metrics=metrics)

    def default_metrics(self) -> tuple[str, ...]:
        return SQUAD2_METRICS if self.unanswerable else SQUAD1_METRICS

    def encode(self, split: Split[Question], tokenizer: Tokenizer) -> QuestionRows:
        """One row for each window (question_windows). The target is the first answer that is in the context."""
        return encode_questions(
            split,
            tokenizer,
            max_length=self.max_length,
            max_query_length=self.max_query_length,
            doc_stride=self.doc_stride,
        )

    def counts(self, rows: QuestionRows) -> dict[str, int]:
        """unanswerable questions; answers_moved; answers_not_found, whose questions are not trained on."""
        without = sum(question.answers == () for question in rows.split.items)
        return {"unanswerable": without, "answers_moved": rows.moved, "answers_not_found": rows.not_found}

    def remarks(self, rows: QuestionRows) -> list[str]:
        """Warnings about answers that are not at their answer_start, or not in their context."""
        path, found = rows.split.path, []
        if rows.moved:
            found.append(f"{path}: {rows.moved} answers are not at their answer_start; the nearest occurrence is used")
        if rows.not_found:
            found.append(
                f"{path}: {rows.not_found} of {len(rows.split.items)} questions have no answer that occurs in the "
                "context; they are not trained on"
            )
        return found

    def training_remarks(self, rows: QuestionRows) -> list[str]:
        """Raises UserError where no answer of the file occurs in its context."""
        if rows.not_found and rows.not_found == sum(bool(question.answers) for question in rows.split.items):
            answers = ((question.place, one.text) for question in rows.split.items for one in question.answers or ())
            place, text = next(answers)
            raise UserError(
                f"{rows.split.path}: no answer occurs in its context, so none can be learned ({place}: {text!r:.60}). "
                "Correct the answers, or the columns (task.text_pair, task.label)"
            )
        return []

    def objective(self) -> TaskObjective:
        return QuestionObjective(self.n_best, self.max_answer_length)

    def measure(self, rows: QuestionRows, answers: Sequence[RowAnswers]) -> dict[str, float]:
        """The metrics of SQuAD 1.1, or of 2.0 if the task or the split has questions without an answer.

        The metrics of 2.0 use the task's null_threshold. A task without one uses the best threshold for this split, or
        NULL_THRESHOLD if all questions of the training file have answers, since it never records one.
        """
        decoded = decode(rows, answers, self.n_best)
        questions = rows.split.items
        references = [[answer.text for answer in question.answers or ()] for question in questions]
        predicted = [one.text(question.context) for one, question in zip(decoded, questions, strict=True)]
        known = self._metrics_of(rows.split)
        names = self.metrics if set(self.metrics) <= set(known) else known
        if known == SQUAD1_METRICS:
            return squad1_metrics(names, references, predicted)
        threshold = self.null_threshold if self.unanswerable else NULL_THRESHOLD
        return squad2_metrics(names, references, predicted, [one.no_answer for one in decoded], threshold)

    def check_metrics(self, split: Split[Question]) -> None:
        """Raises UserError for a metric of SQuAD 1.1 on questions that may have no answer, or the other way round."""
        known = self._metrics_of(split)
        if unknown := [name for name in self.metrics if name not in known]:
            some = "has questions without an answer" if known == SQUAD2_METRICS else "has no question without an answer"
            raise UserError(
                f"task.metrics (in evaluate: --metrics) has {unknown[0]!r}, but {split.path} {some}; choose from: "
                f"{', '.join(known)}"
            )

    def metric_names(self, dev: Split[Question]) -> tuple[str, ...]:
        """Those of SQuAD 2.0 where dev has questions without an answer, even if the training file has none.

        Raises UserError for a metric that the task names and dev does not have.
        """
        if self.metrics != self.default_metrics():
            self.check_metrics(dev)
        known = self._metrics_of(dev)
        return (*(self.metrics if set(self.metrics) <= set(known) else known), "task_loss")

    def calibrated(self, metrics: Mapping[str, float]) -> "QuestionTask":
        """The task with the null_threshold of the best F1 on dev, NULL_THRESHOLD without a dev file, unless it has one
        already."""
        if not self.unanswerable or self.null_threshold is not None:
            return self
        return replace(self, null_threshold=metrics.get(THRESHOLD, NULL_THRESHOLD))

    def with_null_threshold(self, threshold: float) -> "QuestionTask":
        """The task as one of questions that may have no answer, with this threshold."""
        if self.unanswerable:
            return replace(self, null_threshold=threshold)
        return replace(self, unanswerable=True, null_threshold=threshold, metrics=SQUAD2_METRICS)

    def for_questions_of(self, split: Split[Question]) -> "QuestionTask":
        """The task with NULL_THRESHOLD where it always gives an answer, but the split has questions without one."""
        return self.with_null_threshold(NULL_THRESHOLD) if not self.unanswerable and _some_without(split) else self

    def _metrics_of(self, split: Split[Question]) -> tuple[str, ...]:
        """The metrics that a split can have."""
        return SQUAD2_METRICS if self.unanswerable or _some_without(split) else SQUAD1_METRICS

    def predictions(self, rows: QuestionRows, answers: Sequence[RowAnswers]) -> list[dict[str, Any]]:
        """The object of question_answers.answer_object for each question."""
        threshold = NULL_THRESHOLD if self.null_threshold is None else self.null_threshold
        return [
            answer_object(question, one, self.unanswerable, threshold)
            for question, one in zip(rows.split.items, decode(rows, answers, self.n_best), strict=True)
        ]


@dataclass(frozen=True)
class QuestionObjective(TaskObjective):
    """Cross-entropy of the first and the last position of an answer (Devlin et al. 2019, sections 4.2 and 4.3)."""

    n_best: int
    max_answer_length: int

    @property
    def heads(self) -> Heads:
        return Heads(question=True)

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B T 2"]:
        """Logits of the first and the last position of the answer."""
        return answer_logits(model, model.encode(batch, dropout_key).last)

    def terms_of(self, model: Bert, outputs: Float[Array, "B T 2"], batch: TaskBatch) -> Terms:
        places = batch.labels
        loss, correct = answer_sums(outputs, batch.sequence_ids > 0, places.first, places.last, batch.label_weights)
        return {"task": Term(loss, {"accuracy": correct})}

    @property
    def has_soft_targets(self) -> bool:
        return True

    def soft_sum(
        self, outputs: Float[Array, "B T 2"], teacher: Float[Array, "B T 2"], batch: TaskBatch, temperature: float
    ) -> Scalar:
        """The mean of the sums of both ends, over the positions of the sequence (as answer_sums)."""
        possible = (batch.sequence_ids > 0)[:, None]
        ours, theirs = (jnp.where(possible, each.swapaxes(1, 2), IMPOSSIBLE) for each in (outputs, teacher))
        weights = jnp.broadcast_to(batch.label_weights[:, None] / 2, (len(outputs), 2))
        return soft_class_sum(ours, theirs, weights, temperature)

    def answers(self, model: Bert, outputs: Float[Array, "B T 2"], batch: TaskBatch) -> RowAnswers:
        """The n_best spans of each row."""
        return best_spans(outputs, batch.labels, self.n_best, self.max_answer_length)


def _some_without(split: Split[Question]) -> bool:
    return any(question.answers == () for question in split.items)
