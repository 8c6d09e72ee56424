"""The best answers of a row, on the device, and of all rows of a question, on the host."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.special import expit, softmax

from bert_jax.model.heads import ahead, choose_spans
from bert_jax.tasks.kinds.question_files import Question
from bert_jax.tasks.kinds.question_windows import AnswerSpan, QuestionRows

NO_SPANS = 1e6  # the odds of no answer for a context without pieces


class RowAnswers(NamedTuple):
    """The n best spans of a row, [n] or [B, n], best first, and its score for no answer, [] or [B]."""

    firsts: Any  # i32, positions
    lasts: Any  # i32
    scores: Any  # f32: S.h of the first position plus E.h of the last; -inf where a row has fewer spans
    null: Any  # f32: the score of the span [CLS]


class AnswerText(NamedTuple):
    """A part of a context: characters [start, end), and its score."""

    start: int
    end: int
    score: float


class Decoded(NamedTuple):
    """The best answers to a question.

    | field | |
    |---|---|
    | spans | the best spans, best first; empty for a context without pieces |
    | shares | their probabilities, followed by that of no answer: the softmax over their scores |
    | null_odds | the score for no answer minus that of the best span; NO_SPANS without spans |
    """

    spans: tuple[AnswerText, ...]
    shares: tuple[float, ...]
    null_odds: float

    @property
    def no_answer(self) -> float:
        """The probability of no answer against the best span alone: sigmoid(null - best); 1 without spans."""
        return float(expit(self.null_odds))

    def text(self, context: str) -> str:
        """The text of the best span."""
        return context[self.spans[0].start : self.spans[0].end] if self.spans else ""


def best_spans(logits: Float[Array, "B T 2"], places: AnswerSpan, count: int, longest: int) -> RowAnswers:
    """The best spans of up to `longest` positions in each window that begin at a piece whose best window it is.

    The search is exact; run_squad.py only pairs the 20 best first positions with the 20 best last ones. As there, the
    first piece must be in its best window, the last one need not.
    """
    positions = jnp.arange(logits.shape[1])[None]
    starts, ends = logits[..., 0], logits[..., 1]
    scores = starts[:, :, None] + ahead(ends, longest)
    begins = (places.best_begin[:, None] <= positions) & (positions < places.best_end[:, None])
    inside = positions[:, :, None] + jnp.arange(longest)[None, None] < places.end[:, None, None]
    firsts, lengths, there = choose_spans(scores, begins[:, :, None] & inside, count)
    lasts = firsts + lengths - 1
    found = jnp.take_along_axis(starts, firsts, axis=1) + jnp.take_along_axis(
        ends, jnp.minimum(lasts, logits.shape[1] - 1), axis=1
    )
    return RowAnswers(firsts, lasts, jnp.where(there, found, -jnp.inf), starts[:, 0] + ends[:, 0])


def decode(rows: QuestionRows, answers: Sequence[RowAnswers], count: int) -> list[Decoded]:
    """The `count` best spans of each question over all of its rows, as characters of its context.

    The score for no answer is the lowest one of the rows (run_squad.py). A span without characters is dropped.
    """
    found = []
    shifts = rows.first_pieces - rows.places[:, AnswerSpan._fields.index("begin")]  # from positions to pieces
    for start, stop in pairwise(rows.question_offsets):
        spans = []
        for answer, shift in zip(answers[start:stop], shifts[start:stop], strict=True):
            for first, last, score in zip(answer.firsts, answer.lasts, answer.scores, strict=True):
                if np.isfinite(score):
                    begin, end = rows.characters[shift + first, 0], rows.characters[shift + last, 1]
                    spans.append(AnswerText(int(begin), int(end), float(score)))
        spans = sorted((span for span in spans if span.start < span.end), key=lambda span: -span.score)[:count]
        least = float(min(answer.null for answer in answers[start:stop]))
        shares = softmax(np.array([*(span.score for span in spans), least], np.float64))
        null_odds = least - spans[0].score if spans else NO_SPANS
        found.append(Decoded(tuple(spans), tuple(shares.tolist()), null_odds))
    return found


def answer_object(question: Question, decoded: Decoded, may_be_none: bool, threshold: float) -> dict[str, Any]:
    """The prediction for a question.

    `id`, `answer`, `start` and `end` (characters of the context; None where there is no answer) and `score`, its
    probability among the best spans; `no_answer_probability` and `null_odds`, its logit, where there may be none;
    `scores`: the best spans, as similar objects. There is no answer where the probability of none is above the
    threshold.
    """
    shares = np.array(decoded.shares)
    if not may_be_none and decoded.spans:
        shares = shares[:-1] / shares[:-1].sum()
    spans = [
        {"answer": question.context[span.start : span.end], "score": float(share), "start": span.start, "end": span.end}
        for span, share in zip(decoded.spans, shares, strict=False)
    ]
    nothing = {"answer": "", "score": float(shares[-1]), "start": None, "end": None}
    none = not spans or (may_be_none and decoded.no_answer > threshold)
    one: dict[str, Any] = {"id": question.id} | (nothing if none else spans[0])
    if may_be_none:
        one |= {"no_answer_probability": decoded.no_answer, "null_odds": decoded.null_odds}
    return one | {"scores": spans}
