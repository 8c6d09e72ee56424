"""The best answers: those of a search through all spans of all windows."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_question_windows import TASK, letters, split_of  # noqa: F401 (a fixture)

from bert_jax.config import TaskConfig
from bert_jax.errors import UserError
from bert_jax.tasks import registry
from bert_jax.tasks.kinds.question import SQUAD2_METRICS, RowAnswers, best_spans, decode
from bert_jax.tasks.kinds.question_data import Answer, AnswerSpan, QuestionRows

ROWS = 16  # of a batch: one program for all
_best = jax.jit(best_spans, static_argnums=(2, 3))


def answers_of(rows: QuestionRows, logits: np.ndarray, count: int = 8, longest: int = 4) -> list[RowAnswers]:
    assert rows.count <= ROWS
    indices = np.concatenate([np.arange(rows.count), np.full(ROWS - rows.count, -1)])
    batch = rows.batch(indices, logits.shape[1])
    found = jax.device_get(
        _best(jnp.asarray(logits[indices]), AnswerSpan(*map(jnp.asarray, batch.labels)), count, longest)
    )
    return [RowAnswers(*(part[row] for part in found)) for row in range(rows.count)]


def all_spans(rows: QuestionRows, logits: np.ndarray, longest: int) -> list[tuple[float, int, int]]:
    """Every span of every window of the first question: score, and characters, best first."""
    found = []
    for row in range(rows.question_offsets[1]):
        places = AnswerSpan(*rows.places[row].tolist())
        for first in range(places.best_begin, places.best_end):
            for last in range(first, min(first + longest, places.end)):
                pieces = rows.first_pieces[row] - places.begin
                start, end = rows.characters[pieces + first, 0], rows.characters[pieces + last, 1]
                found.append((float(np.float32(logits[row, first, 0]) + np.float32(logits[row, last, 1])), start, end))
    return sorted(found, key=lambda span: -span[0])


@settings(max_examples=15)
@given(st.integers(1, 40), st.sampled_from([2, 4]), st.integers(0, 2**32 - 1))
def test_the_best_spans_are_those_of_a_search_through_all(letters, pieces, longest, seed):  # noqa: F811
    context = " ".join("abcdefghij"[place % 10] for place in range(pieces))
    rows = TASK.encode(split_of(("a?", context, ()), ("b", "c d", ())), letters)
    logits = np.random.default_rng(seed).normal(size=(rows.count, 12, 2)).astype(np.float32)
    decoded = decode(rows, answers_of(rows, logits, 8, longest), 8)
    expected = all_spans(rows, logits, longest)[:8]
    assert [(span.score, span.start, span.end) for span in decoded[0].spans] == expected
    null = logits[: rows.question_offsets[1], 0].sum(axis=-1).min()
    assert decoded[0].no_answer == pytest.approx(1 / (1 + math.exp(expected[0][0] - null)))
    assert sum(decoded[0].shares) == pytest.approx(1) and len(decoded[0].shares) == len(expected) + 1
    assert decoded[1].text("c d") in ("c", "d", "c d")


def test_padding_and_the_question_are_no_answer(letters):  # noqa: F811
    rows = TASK.encode(split_of(("a?", "b c", ())), letters)
    logits = np.zeros((1, 12, 2), np.float32)
    logits[0, [0, 1, 2, 3, 6, 7, 11]] = 100
    logits[0, 4, 0] = logits[0, 5, 1] = 1
    (decoded,) = decode(rows, answers_of(rows, logits), 8)
    assert decoded.text("b c") == "b c" and len(decoded.spans) == 3 and decoded.no_answer == pytest.approx(1)


def test_a_context_without_pieces_has_no_answer(letters):  # noqa: F811
    rows = TASK.encode(split_of(("a?", "\u200b", None)), letters)
    (decoded,) = decode(rows, answers_of(rows, np.zeros((1, 12, 2), np.float32)), 8)
    assert decoded.spans == () and decoded.no_answer == 1 and decoded.text("\u200b") == ""
    told = TASK.predictions(rows, answers_of(rows, np.zeros((1, 12, 2), np.float32)))
    assert told == [{"id": "1", "answer": "", "score": 1.0, "start": None, "end": None, "scores": []}]


def made_answers(rows: QuestionRows, *found: tuple[int, int, float, float]) -> list[RowAnswers]:
    """One span for each row: first position, last position, score, null."""
    return [RowAnswers(*(np.array([part]) for part in one[:3]), np.array(one[3])) for one in found]


def test_metrics_and_predictions_of_questions_that_may_have_no_answer(letters):  # noqa: F811
    task = replace(TASK, unanswerable=True, metrics=SQUAD2_METRICS)
    split = split_of(("a", "b c", (Answer("b", 0),)), ("a", "b c", (Answer("c", 2),)), ("a", "b c", ()))
    rows = task.encode(split, letters)
    # Answers b, b and c; none is the less likely the higher the score of the answer.
    answers = made_answers(rows, (3, 3, 2.0, 0.0), (3, 3, 1.0, 0.0), (4, 4, 0.5, 0.0))
    found = task.measure(rows, answers)
    sure = [1 / (1 + math.exp(score)) for score in (2.0, 1.0, 0.5)]
    assert found["best_f1_thresh"] == pytest.approx(sure[0]) and found["f1"] == found["best_f1"] == pytest.approx(2 / 3)
    calibrated = task.calibrated(found)
    assert calibrated.null_threshold == found["best_f1_thresh"]
    assert calibrated.measure(rows, answers) == found
    assert replace(task, null_threshold=0.5).measure(rows, answers)["f1"] == pytest.approx(1 / 3)
    told = calibrated.predictions(rows, answers)
    assert [one["answer"] for one in told] == ["b", "", ""] and [one["id"] for one in told] == ["1", "2", "3"]
    assert (told[0]["start"], told[0]["end"]) == (0, 1) and told[0]["score"] == pytest.approx(1 - sure[0])
    assert told[1]["start"] is None and told[1]["score"] == told[1]["no_answer_probability"] == pytest.approx(sure[1])
    assert told[2]["scores"] == [{"answer": "c", "score": pytest.approx(1 - sure[2]), "start": 2, "end": 3}]
    assert TASK.calibrated({"f1": 1.0}) == TASK
    chosen = replace(TASK, metrics=("f1",)).complete(split)  # the threshold is measured, too
    assert chosen.calibrated(chosen.measure(rows, answers)).null_threshold == found["best_f1_thresh"]
    assert replace(TASK, metrics=("f1",), null_threshold=0.5).complete(split).metrics == ("f1",)
    settled = replace(task, null_threshold=0.5)
    assert settled.calibrated(settled.measure(rows, answers)) == settled
    assert task.calibrated({}).null_threshold == 0.5
    squad1 = TASK.complete(split_of(("a", "b", (Answer("b", 0),))))
    assert squad1.metric_names(split) == (*SQUAD2_METRICS, "task_loss") == settled.metric_names(split)
    assert "exact_match" in squad1.metric_names(split_of(("a", "b", (Answer("b", 0),))))
    with pytest.raises(UserError, match=r"null_threshold is 0.5, but every question of .* has an answer"):
        replace(TASK, null_threshold=0.5).complete(split_of(("a", "b", (Answer("b", 0),))))
    with pytest.raises(UserError, match=r"task.null_threshold is 1.5; use a probability"):
        replace(TASK, null_threshold=1.5)
    with pytest.raises(UserError, match=r"task.null_threshold is for question, not for classification; leave it out"):
        registry.resolve(TaskConfig(train="a.tsv", null_threshold=0.5))


def test_a_model_of_answers_always_is_measured_on_questions_without_by_the_rules_of_2(letters):  # noqa: F811
    split = split_of(("a", "b c", (Answer("b", 0),)), ("a", "b c", ()))
    rows = TASK.encode(split, letters)
    answers = made_answers(rows, (3, 3, 2.0, 0.0), (3, 3, 1.0, 0.0))
    found = TASK.measure(rows, answers)  # at 1/2: no threshold is ever recorded
    assert (found["HasAns_f1"], found["NoAns_f1"], found["best_f1"]) == (1, 0, 1)
    assert [one["answer"] for one in TASK.predictions(rows, answers)] == ["b", "b"]


def test_metrics_that_are_never_measured_are_refused_before_training(letters):  # noqa: F811
    answered, none = split_of(("a", "b", (Answer("b", 0),))), split_of(("a", "b c", ()))
    exact_match, exact = (replace(TASK, metrics=(name,)) for name in ("exact_match", "exact"))
    with pytest.raises(UserError, match=r"unknown metric 'exact_match' .* choose from: f1, exact, HasAns_f1"):
        exact_match.complete(none)
    with pytest.raises(UserError, match=r"has 'exact_match', but .* has questions without an answer; choose .* exact,"):
        exact_match.complete(answered).metric_names(none)
    with pytest.raises(
        UserError, match=r"has 'exact', but .* has no question without an answer; choose from: f1, exact_m"
    ):
        exact.complete(answered).metric_names(answered)
    assert exact.complete(answered).metric_names(none) == ("exact", "task_loss")
