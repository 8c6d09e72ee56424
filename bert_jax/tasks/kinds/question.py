"""Question answering: the answer is in the context (SQuAD: Rajpurkar et al. 2016, 2018).

question_data.py reads questions and encodes them as rows that slide over a long context. Here are the official metrics,
the best answers by row and by question, and `QuestionTask` with its objective.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float64
from scipy.special import expit, softmax

from bert_jax.config.finetuning import QuestionOptions
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert
from bert_jax.model.heads.config import Heads
from bert_jax.model.heads.structured import IMPOSSIBLE, ahead, choose_spans
from bert_jax.model.outputs import answer_logits
from bert_jax.tasks.kinds.question_data import (
    AnswerSpan,
    Question,
    QuestionRows,
    encode_questions,
    parse_question,
    read_questions,
    read_squad,
)
from bert_jax.tasks.metrics import check_metric_names, select_metrics
from bert_jax.tasks.reading.inputs import InputRecord
from bert_jax.tasks.reading.tables import Columns, kind_of_file
from bert_jax.tasks.rows import Split, TaskBatch
from bert_jax.tasks.task import Description, Task, TaskObjective, answer_sums
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train.losses import Scalar, soft_class_sum
from bert_jax.train.objectives import Term, Terms

# Exact match and F1 of answers, as the official scripts compute them, as shares of 1.
#
# SQuAD 1.1: evaluate-v1.1.py (Rajpurkar et al. 2016, section 6.1); SQuAD 2.0: evaluate-v2.0.py (Rajpurkar et al. 2018,
# section 4), whose metric names are kept.


N_BEST = 20  # answers kept of each row, and then of each question (run_squad.py)
THRESHOLD = "best_f1_thresh"  # the metric that is the best null_threshold
SQUAD1_METRICS = ("f1", "exact_match")
SQUAD2_METRICS = (
    *("f1", "exact", "HasAns_f1", "HasAns_exact", "NoAns_f1", "NoAns_exact"),
    *("best_f1", THRESHOLD, "best_exact", "best_exact_thresh"),
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compared_words(text: str) -> list[str]:
    """An answer's words, in lower case, without ASCII punctuation and English articles."""
    # In the order of the official scripts: an article may only be recognized once its punctuation is gone.
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _best_scores(references: Sequence[list[str]], prediction: list[str]) -> tuple[float, float]:
    """The highest exact match and the highest F1 over the references."""
    overlaps = []
    for reference in references:
        shared = sum((Counter(reference) & Counter(prediction)).values())
        # In the order of the official scripts, so that the last bits agree.
        precision, recall = 1.0 * shared / max(len(prediction), 1), 1.0 * shared / max(len(reference), 1)
        overlaps.append((2 * precision * recall) / (precision + recall) if shared else 0.0)
    return float(prediction in references), max(overlaps)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def squad1_metrics(
    names: Sequence[str], references: Sequence[Sequence[str]], predictions: Sequence[str]
) -> dict[str, float]:
    """`exact_match` and `f1`: the maximum over a question's true answers, of which there is at least one."""
    scores = [
        _best_scores(list(map(compared_words, reference)), compared_words(prediction))
        for reference, prediction in zip(references, predictions, strict=True)
    ]
    exact, f1 = np.array(scores, np.float64).T
    return select_metrics(names, {"exact_match": _mean(exact), "f1": _mean(f1)})


def squad2_metrics(
    names: Sequence[str],
    references: Sequence[Sequence[str]],
    predictions: Sequence[str],
    no_answer: Sequence[float],
    threshold: float | None,
) -> dict[str, float]:
    """SQUAD2_METRICS, for questions that may have no answer: those without references.

    A prediction whose probability of no answer (no_answer) is above the threshold counts as no answer. The default
    threshold is best_f1_thresh, the best one for this split. A mean over no questions is NaN.
    """
    answerable = np.array([bool(reference) for reference in references])
    scores = []
    for reference, prediction in zip(references, predictions, strict=True):
        # An answer without compared words counts as no answer; two such answers are equal.
        words = compared_words(prediction)
        true = [compared for text in reference if (compared := compared_words(text))] or [[]]
        exact_match, overlap = _best_scores(true, words)
        scores.append((exact_match, overlap if words and true[0] else exact_match))
    exact, f1 = np.array(scores, np.float64).T
    answered = np.array([bool(prediction) for prediction in predictions])
    probabilities = np.array(no_answer, np.float64)
    metrics: dict[str, float] = {}
    metrics["best_exact"], metrics["best_exact_thresh"] = best_threshold(exact, probabilities, answerable, answered)
    metrics["best_f1"], metrics[THRESHOLD] = best_threshold(f1, probabilities, answerable, answered)
    withheld = probabilities > (metrics[THRESHOLD] if threshold is None else threshold)
    for name, raw in (("exact", exact), ("f1", f1)):
        # No answer is right for a question that has none, and wrong for any other.
        final = np.where(withheld, ~answerable, raw)
        metrics |= {
            name: _mean(final),
            f"HasAns_{name}": _mean(final[answerable]),
            f"NoAns_{name}": _mean(final[~answerable]),
        }
    return select_metrics(names, metrics)


def best_threshold(
    scores: Float64[np.ndarray, "Q"],
    no_answer: Float64[np.ndarray, "Q"],
    answerable: Bool[np.ndarray, "Q"],
    answered: Bool[np.ndarray, "Q"],
) -> tuple[float, float]:
    """The best mean score, and its threshold: the probability of no answer up to which answers are given.

    `answered`: the predicted text is not empty. As in the official script, questions are added one by one, the lowest
    probability of no answer first (equal ones in file order), and the first maximum counts. If giving no answer at all
    is best, the threshold is 0.
    """
    order = np.argsort(no_answer, kind="stable")
    # For a question that has an answer, giving one adds its score. For one that has none, it loses the point for no
    # answer, unless the predicted text is empty anyway.
    gains = np.where(answerable, scores, np.where(answered, -1.0, 0.0))[order]
    # Entry n: the sum of scores if the first n questions get answers and the others none.
    reached = np.cumsum(np.concatenate([[float((~answerable).sum())], gains]))
    best = int(reached.argmax())
    return float(reached[best]) / len(scores), float(no_answer[order[best - 1]]) if best else 0.0


# The best answers of a row, on the device, and of all rows of a question, on the host.


NO_SPANS = 1e6  # the odds of no answer for a context without pieces


class RowAnswers(NamedTuple):
    """A row's n best spans, [n] or [B, n], best first, and its score for no answer, [] or [B]."""

    firsts: Any  # i32, positions
    lasts: Any  # i32
    scores: Any  # f32: S.h of the first position plus E.h of the last; -inf if a row has fewer spans
    null: Any  # f32: the score of the span [CLS]


class AnswerText(NamedTuple):
    """A span in the context, characters [start, end), and its score."""

    start: int
    end: int
    score: float


class Decoded(NamedTuple):
    """The best answers to a question."""

    spans: tuple[AnswerText, ...]  # best first; empty for a context without pieces
    shares: tuple[float, ...]  # their probabilities, then the probability of no answer: a softmax over all scores
    null_odds: float  # the score for no answer minus the best span's; NO_SPANS without spans

    @property
    def no_answer(self) -> float:
        """The probability of no answer against the best span alone: sigmoid(null - best); 1 without spans."""
        return float(expit(self.null_odds))

    def text(self, context: str) -> str:
        """The text of the best span."""
        return context[self.spans[0].start : self.spans[0].end] if self.spans else ""


def best_spans(logits: Float[Array, "B T 2"], places: AnswerSpan, count: int, longest: int) -> RowAnswers:
    """Each window's best spans, up to `longest` positions long, that begin at a piece whose best window it is.

    The search is exact; run_squad.py only pairs the 20 best first positions with the 20 best last ones. As there, the
    first piece must be in its best window, the last one need not.
    """
    positions = jnp.arange(logits.shape[1])[None]
    starts, ends = logits[..., 0], logits[..., 1]
    # scores[b, t, k]: the span of k + 1 positions from t.
    scores = starts[:, :, None] + ahead(ends, longest)
    begins = (places.best_begin[:, None] <= positions) & (positions < places.best_end[:, None])
    inside = positions[:, :, None] + jnp.arange(longest)[None, None] < places.end[:, None, None]
    firsts, lengths, exists = choose_spans(scores, begins[:, :, None] & inside, count)
    lasts = firsts + lengths - 1
    # choose_spans returns no scores. The place of a span that does not exist may be past the row; its value becomes
    # -inf.
    values = jnp.take_along_axis(starts, firsts, axis=1) + jnp.take_along_axis(
        ends, jnp.minimum(lasts, logits.shape[1] - 1), axis=1
    )
    # Position 0, which is [CLS], stands for no answer.
    return RowAnswers(firsts, lasts, jnp.where(exists, values, -jnp.inf), starts[:, 0] + ends[:, 0])


def decode(rows: QuestionRows, answers: Sequence[RowAnswers], count: int = N_BEST) -> list[Decoded]:
    """Finds each question's `count` best spans over all its rows, as characters in its context.

    The score for no answer is the lowest one of the rows (run_squad.py). A span without characters is dropped.
    """
    decoded = []
    shifts = rows.first_pieces - rows.places[:, AnswerSpan._fields.index("begin")]  # from positions to pieces
    for start, stop in pairwise(rows.question_offsets):
        spans = []
        for answer, shift in zip(answers[start:stop], shifts[start:stop], strict=True):
            for first, last, score in zip(answer.firsts, answer.lasts, answer.scores, strict=True):
                if np.isfinite(score):
                    begin, end = rows.characters[shift + first, 0], rows.characters[shift + last, 1]
                    spans.append(AnswerText(int(begin), int(end), float(score)))
        spans = sorted((span for span in spans if span.start < span.end), key=lambda span: -span.score)[:count]
        # No answer must be plausible in all windows, since the answer is in one of them.
        least = float(min(answer.null for answer in answers[start:stop]))
        shares = softmax(np.array([*(span.score for span in spans), least], np.float64))
        null_odds = least - spans[0].score if spans else NO_SPANS
        decoded.append(Decoded(tuple(spans), tuple(shares.tolist()), null_odds))
    return decoded


# Without a threshold from a dev file: no answer if it is more probable than the best one (run_squad.py's default).
NULL_THRESHOLD = 0.5
ANSWER_LENGTH = 30  # the most pieces of an answer by default (run_squad.py)
COMMON = 0.99  # the share of the training file's answers that max_answer_length fits


@dataclass(frozen=True)
class QuestionTask(QuestionOptions, Task[Question, QuestionRows]):
    """An answer from the question's context; with unanswerable, there may be none (SQuAD 2.0)."""

    kind = "question"
    known_metrics = tuple(dict.fromkeys((*SQUAD2_METRICS, *SQUAD1_METRICS)))

    unanswerable: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unanswerable:
            check_metric_names(self.metrics, SQUAD2_METRICS)

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[Question]:
        """Reads SQuAD's JSON if the name ends in .json, else a table of questions, contexts and answers."""
        if kind_of_file(path) == "squad":
            return read_squad(path, label_required)
        return read_questions(path, columns, label_required)

    def parse_record(self, source: Path, record: InputRecord) -> Question:
        return parse_question(source, record, self.columns)

    def complete(self, train: Split[Question]) -> Task:
        """Sets unanswerable if the training file has questions without an answer, and adds the metric THRESHOLD.

        Raises UserError for a null_threshold if every question has an answer.
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
        """One row per window (encode_questions). The target is the first answer that is in the context."""
        return encode_questions(
            split,
            tokenizer,
            max_length=self.max_length,
            max_query_length=self.max_query_length,
            doc_stride=self.doc_stride,
        )

    def describe(self, rows: QuestionRows, training: bool = False) -> Description:
        """Counts unanswerable questions, answers_moved, and answers_not_found, whose questions are not trained on."""
        path, questions, remarks = rows.split.path, rows.split.items, []
        if rows.moved:
            remarks = [f"{path}: {rows.moved} answers are not at their answer_start; the nearest occurrence is used"]
        if rows.not_found:
            # A few answers may be missing from their contexts. If all are, the columns are probably wrong.
            if training and rows.not_found == sum(bool(question.answers) for question in questions):
                answers = ((question.place, answer.text) for question in questions for answer in question.answers or ())
                place, text = next(answers)
                raise UserError(
                    f"{path}: no answer occurs in its context, so none can be learned ({place}: {text!r:.60}). "
                    "Correct the answers, or the columns (task.text_pair, task.label)"
                )
            remarks.append(
                f"{path}: {rows.not_found} of {len(questions)} questions have no answer that occurs in the "
                "context; they are not trained on"
            )
        remarks += self._long_answers(rows, training)
        without = sum(question.answers == () for question in questions)
        counts = {"unanswerable": without, "answers_moved": rows.moved, "answers_not_found": rows.not_found}
        return Description(counts, remarks)

    def fitted(self, rows: QuestionRows) -> "QuestionTask":
        """Sets max_answer_length, unless it is given: ANSWER_LENGTH, or what COMMON of the answers need."""
        sizes = sorted(filter(None, rows.answer_sizes))
        if self.max_answer_length or not sizes:
            return self
        common = sizes[math.ceil(COMMON * len(sizes)) - 1]
        return replace(self, max_answer_length=min(max(common, ANSWER_LENGTH), self.max_length))

    def _long_answers(self, rows: QuestionRows, training: bool) -> list[str]:
        """Remarks on answers that cannot be predicted, or that need a longer limit than usual."""
        path, limit = rows.split.path, self.max_answer_length or ANSWER_LENGTH
        long = sum(size > limit for size in rows.answer_sizes)
        remarks = {
            f"{path}: training answers are long, so answers of up to {limit} pieces are predicted "
            "(task.max_answer_length)": training and limit > ANSWER_LENGTH,
            f"{path}: {long} answers are longer than task.max_answer_length={limit} pieces, so they cannot be "
            f"predicted; the longest has {max(rows.answer_sizes, default=0)}": long,
            f"{path}: {rows.cut_answers} answers are in no window as a whole, so they are trained as no answer; "
            f"increase task.max_length={self.max_length} or decrease task.doc_stride={self.doc_stride}": (
                rows.cut_answers
            ),
        }
        return [remark for remark, applies in remarks.items() if applies]

    def objective(self) -> TaskObjective:
        return QuestionObjective(self.max_answer_length or ANSWER_LENGTH)

    def measure(self, rows: QuestionRows, answers: Sequence[RowAnswers]) -> dict[str, float]:
        """Computes the SQuAD 1.1 metrics, or those of 2.0 if the task or the split has questions without an answer.

        The metrics of 2.0 use the task's null_threshold. A task without one uses the best threshold for this split, or
        NULL_THRESHOLD if all training questions have answers, since it never records one.
        """
        decoded = decode(rows, answers)
        questions = rows.split.items
        references = [[answer.text for answer in question.answers or ()] for question in questions]
        predicted = [best.text(question.context) for best, question in zip(decoded, questions, strict=True)]
        known = self._split_metrics(rows.split)
        names = self.metrics if set(self.metrics) <= set(known) else known
        if known == SQUAD1_METRICS:
            return squad1_metrics(names, references, predicted)
        threshold = self.null_threshold if self.unanswerable else NULL_THRESHOLD
        return squad2_metrics(names, references, predicted, [best.no_answer for best in decoded], threshold)

    def metric_names(self, split: Split[Question], explicit: bool = False) -> tuple[str, ...]:
        """The SQuAD 2.0 metrics if the split has questions without an answer, even if the training file has none."""
        known = self._split_metrics(split)
        unknown = [name for name in self.metrics if name not in known]
        if unknown and (explicit or self.metrics != self.default_metrics()):
            some = "has questions without an answer" if known == SQUAD2_METRICS else "has no question without an answer"
            raise UserError(
                f"task.metrics (in evaluate: --metrics) has {unknown[0]!r}, but {split.path} {some}; choose from: "
                f"{', '.join(known)}"
            )
        return (*(known if unknown else self.metrics), "task_loss")

    def calibrated(self, metrics: Mapping[str, float]) -> "QuestionTask":
        """The task with the null_threshold that has the best F1 on dev; NULL_THRESHOLD without a dev file."""
        if not self.unanswerable or self.null_threshold is not None:
            return self
        return replace(self, null_threshold=metrics.get(THRESHOLD, NULL_THRESHOLD))

    def with_null_threshold(self, threshold: float) -> "QuestionTask":
        """The task as one whose questions may have no answer, with this threshold."""
        if self.unanswerable:
            return replace(self, null_threshold=threshold)
        return replace(self, unanswerable=True, null_threshold=threshold, metrics=SQUAD2_METRICS)

    def for_split(self, split: Split[Question]) -> "QuestionTask":
        """The task with NULL_THRESHOLD if it always gives an answer, but the split has questions without one."""
        return self.with_null_threshold(NULL_THRESHOLD) if not self.unanswerable and _some_without(split) else self

    def _split_metrics(self, split: Split[Question]) -> tuple[str, ...]:
        return SQUAD2_METRICS if self.unanswerable or _some_without(split) else SQUAD1_METRICS

    def predictions(self, rows: QuestionRows, answers: Sequence[RowAnswers]) -> list[dict[str, Any]]:
        """`id`, `answer`, `start` and `end` (None if there is no answer), `score`, and `scores`, the best spans.

        Scores are probabilities among the best spans. If there may be no answer, also `no_answer_probability` and
        `null_odds`, its logit; above the threshold, there is none.
        """
        threshold = NULL_THRESHOLD if self.null_threshold is None else self.null_threshold
        predictions = []
        for question, decoded in zip(rows.split.items, decode(rows, answers), strict=True):
            shares = np.array(decoded.shares)
            # Without the possibility of no answer, the spans share its probability.
            if not self.unanswerable and decoded.spans:
                shares = shares[:-1] / shares[:-1].sum()
            spans = [
                {
                    "answer": question.context[span.start : span.end],
                    "score": float(share),
                    "start": span.start,
                    "end": span.end,
                }
                for span, share in zip(decoded.spans, shares, strict=False)
            ]
            nothing = {"answer": "", "score": float(shares[-1]), "start": None, "end": None}
            none = not spans or (self.unanswerable and decoded.no_answer > threshold)
            prediction: dict[str, Any] = {"id": question.id} | (nothing if none else spans[0])
            if self.unanswerable:
                prediction |= {"no_answer_probability": decoded.no_answer, "null_odds": decoded.null_odds}
            predictions.append(prediction | {"scores": spans})
        return predictions


@dataclass(frozen=True)
class QuestionObjective(TaskObjective):
    """Cross-entropy of the answer's first and last position (Devlin et al. 2019, sections 4.2 and 4.3)."""

    max_answer_length: int

    @property
    def heads(self) -> Heads:
        return Heads(question=True)

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B T 2"]:
        """Logits for the answer's first and last position."""
        return answer_logits(model, model.encode(batch, dropout_key).last)

    def loss_terms(self, model: Bert, outputs: Float[Array, "B T 2"], batch: TaskBatch) -> Terms:
        places = batch.labels
        loss, correct = answer_sums(outputs, batch.sequence_ids > 0, places.first, places.last, batch.label_weights)
        return {"task": Term(loss, {"accuracy": correct})}

    def soft_sum(
        self, outputs: Float[Array, "B T 2"], teacher: Float[Array, "B T 2"], batch: TaskBatch, temperature: float
    ) -> Scalar:
        """Returns the mean of both ends' sums over the sequence's positions, as in answer_sums."""
        possible = (batch.sequence_ids > 0)[:, None]
        ours, theirs = (jnp.where(possible, logits.swapaxes(1, 2), IMPOSSIBLE) for logits in (outputs, teacher))
        # Each end has half of the weight, because the loss is their mean.
        weights = jnp.broadcast_to(batch.label_weights[:, None] / 2, (len(outputs), 2))
        return soft_class_sum(ours, theirs, weights, temperature)

    def answers(self, model: Bert, outputs: Float[Array, "B T 2"], batch: TaskBatch) -> RowAnswers:
        return best_spans(outputs, batch.labels, N_BEST, self.max_answer_length)


def _some_without(split: Split[Question]) -> bool:
    return any(question.answers == () for question in split.items)
