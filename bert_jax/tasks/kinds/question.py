"""Answers that are a part of a context (SQuAD): encoding in windows, loss, the best spans, metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxtyping import Array, Float

from bert_jax.command import UserError
from bert_jax.model.bert import Bert
from bert_jax.model.head_outputs import answer_logits
from bert_jax.model.heads import Heads
from bert_jax.tasks.example import Split, TaskBatch, TaskRows
from bert_jax.tasks.input_records import InputRecord
from bert_jax.tasks.kinds.kind import Kind
from bert_jax.tasks.kinds.question_answers import Decoded, RowAnswers, best_spans, decode, told
from bert_jax.tasks.kinds.question_files import Question, question_of, read_questions, read_squad
from bert_jax.tasks.kinds.question_metrics import SQUAD1_METRICS, SQUAD2_METRICS, squad1_metrics, squad2_metrics
from bert_jax.tasks.kinds.question_windows import QuestionRows, encode_questions
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.reading import Columns, kind_of_file
from bert_jax.tasks.task import Task
from bert_jax.tokenizer import Tokenizer
from bert_jax.train.losses import answer_sums
from bert_jax.train.objectives import Term, Terms

# Where no dev file has told a better one: no answer where it is likelier than the best (run_squad.py's default).
NULL_THRESHOLD = 0.5


class QuestionAnswering(Kind):
    """An answer to a question, as a part of its context; or, where the task says so, perhaps none."""

    def read(self, task: Task, path: Path, columns: Columns, label_required: bool) -> Split[Question]:
        """SQuAD's JSON where the name ends in .json, else a table of questions, contexts and answers."""
        if kind_of_file(path) == "squad":
            return read_squad(path, label_required)
        return read_questions(path, columns, label_required)

    def parse(self, task: Task, source: Path, records: Sequence[InputRecord]) -> Split[Question]:
        """A question and its context a record, and an id where there is one."""
        found = tuple(question_of(source, record, task.columns) for record in records)
        return Split(source, found, labelled=False)

    def complete(self, task: Task, train: Split[Question]) -> Task:
        """The task, with questions that have no answer where the training file has some.

        Raises UserError for a threshold of no answer where it has none.
        """
        task = replace(task, unanswerable=task.unanswerable or _some_without(train))
        if task.null_threshold is not None and not task.unanswerable:
            raise UserError(
                f"task.null_threshold is {task.null_threshold}, but every question of {train.path} has an answer, so "
                "that the model learns to give one always. Leave it out"
            )
        return replace(task, metrics=task.metrics or self.default_metrics(task))

    def default_metrics(self, task: Task) -> tuple[str, ...]:
        return SQUAD2_METRICS if task.unanswerable else SQUAD1_METRICS

    def encode(self, task: Task, split: Split[Question], tokenizer: Tokenizer) -> QuestionRows:
        """A row a window (questions.windows). The truth is the first answer that is in the context."""
        return QuestionRows(**encode_questions(task, split.items, split.labelled, tokenizer), split=split)

    def counts(self, rows: TaskRows) -> dict[str, int]:
        """unanswerable questions; answers_moved, answers_not_found (those questions are not learnt from)."""
        assert isinstance(rows, QuestionRows) and rows.split is not None
        without = sum(question.answers == () for question in rows.split.items)
        return {"unanswerable": without, "answers_moved": rows.moved, "answers_not_found": rows.not_found}

    def remarks(self, task: Task, rows: TaskRows) -> list[str]:
        """Answers that are not where the file has them, or nowhere in their contexts, where there are any."""
        assert isinstance(rows, QuestionRows) and rows.split is not None
        path, told = rows.split.path, []
        if rows.moved:
            told.append(f"{path}: {rows.moved} answers are not at their answer_start; the nearest like them is taken")
        if rows.not_found:
            told.append(
                f"{path}: of {rows.not_found} of {len(rows.split.items)} questions no answer is in the context; "
                "they are not learnt from"
            )
        return told

    def objective(self, task: Task) -> TaskObjective:
        return QuestionObjective(task.n_best, task.max_answer_length)

    def measure(self, task: Task, rows: TaskRows, answers: Sequence[RowAnswers]) -> dict[str, float]:
        """The metrics of SQuAD 1.1, or of 2.0 where the task or the split has questions without an answer.

        Of 2.0 at the task's threshold; where it has none yet, at the one that is best for this split.
        """
        assert isinstance(rows, QuestionRows) and rows.split is not None
        decoded = decode(rows, answers, task.n_best)
        questions: Sequence[Question] = rows.split.items
        truths = [[answer.text for answer in question.answers or ()] for question in questions]
        guesses = [one.text(question.context) for one, question in zip(decoded, questions, strict=True)]
        if task.unanswerable:
            names, threshold = task.metrics, task.null_threshold
        elif _some_without(rows.split):
            names, threshold = SQUAD2_METRICS, None
        else:
            return squad1_metrics(task.metrics, truths, guesses)
        return squad2_metrics(names, truths, guesses, [one.no_answer for one in decoded], threshold)

    def metric_names(self, task: Task, dev: Split[Question]) -> tuple[str, ...]:
        """Those of SQuAD 2.0 where dev has questions without an answer, though train may have none."""
        measured = SQUAD2_METRICS if not task.unanswerable and _some_without(dev) else task.metrics
        return super().metric_names(replace(task, metrics=measured), dev)

    def calibrated(self, task: Task, metrics: Mapping[str, float]) -> Task:
        """With the threshold of no answer that is best in F1, where none is given."""
        threshold = metrics.get("best_f1_thresh")
        if not task.unanswerable or task.null_threshold is not None or threshold is None:
            return task
        return replace(task, null_threshold=threshold)

    def predictions(self, task: Task, rows: TaskRows, answers: Sequence[RowAnswers]) -> list[dict[str, Any]]:
        """What answers.told tells of each question."""
        assert isinstance(rows, QuestionRows) and rows.split is not None
        threshold = NULL_THRESHOLD if task.null_threshold is None else task.null_threshold
        decoded: list[Decoded] = decode(rows, answers, task.n_best)
        return [
            told(question, one, task.unanswerable, threshold)
            for question, one in zip(rows.split.items, decoded, strict=True)
        ]


@dataclass(frozen=True)
class QuestionObjective(TaskObjective):
    """Cross-entropy of an answer's first slot and of its last (Devlin et al. 2019, sections 4.2 and 4.3)."""

    n_best: int
    max_answer_length: int

    @property
    def heads(self) -> Heads:
        return Heads(question=True)

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B T 2"]:
        """Logits of first and last slots."""
        return answer_logits(model, model.encode(batch, dropout_key).last)

    def terms_of(self, model: Bert, outputs: Float[Array, "B T 2"], batch: TaskBatch) -> Terms:
        places = batch.labels
        loss, correct = answer_sums(outputs, batch.sequence_ids > 0, places.first, places.last, batch.label_weights)
        return {"task": Term(loss, {"accuracy": correct})}

    def answers(self, model: Bert, outputs: Float[Array, "B T 2"], batch: TaskBatch) -> RowAnswers:
        """The n_best spans of each row."""
        return best_spans(outputs, batch.labels, self.n_best, self.max_answer_length)


def _some_without(split: Split[Question]) -> bool:
    return any(question.answers == () for question in split.items)
