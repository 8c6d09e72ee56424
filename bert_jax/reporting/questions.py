"""Sections on a model that answers questions: scores by question word, and cards of its worst answers."""

import numpy as np

from bert_jax.array_types import Float
from bert_jax.reporting import page
from bert_jax.reporting.chart import percent
from bert_jax.reporting.dev_predictions import DevPredictions
from bert_jax.reporting.document import Section, Table
from bert_jax.reporting.errors import ErrorCard, highlight, truncate
from bert_jax.tasks.kinds.question_files import Question
from bert_jax.tasks.kinds.question_metrics import squad1_metrics

QUESTION_WORDS = ("what", "who", "when", "where", "which", "why", "how many", "how much", "how", "whose", "whom")
CONTEXT = 160  # characters shown on each side of an answer


def question_section(found: DevPredictions) -> Section:
    """Returns scores by question word, and by whether the question has an answer."""
    scores = _scores(found)
    groups: dict[str, list[int]] = {}
    for item, question in enumerate(found.items):
        groups.setdefault(question_word(question.question), []).append(item)
    order = sorted(groups, key=lambda word: (word == "other", -len(groups[word])))
    rows = [_row(word, scores, np.array(groups[word])) for word in order]
    without = np.array([question.answers == () for question in found.items])
    for name, kept in (("has an answer", ~without), ("has no answer", without)):
        if without.any() and kept.any():
            rows.append(_row(name, scores, np.flatnonzero(kept)))
    rows.append(_row("all", scores, np.arange(len(scores))))
    note = f"On {found.description}. Exact match and F1 are those of the official SQuAD scripts."
    return Section("Scores by question word", [Table(["questions", "number", "exact match", "F1"], [rows])], note)


def question_card(question: Question, prediction: dict) -> ErrorCard:
    """Returns a card with a question and the context around the predicted answer, or else around the first label."""
    label = question.answers[0] if question.answers else None
    heading = f"{label.text if label else 'no answer'}, predicted {prediction['answer'] or 'no answer'}"
    context = question.context
    start = prediction["start"]
    if start is None:
        start = context.find(label.text) if label else 0
    end = prediction["end"] if prediction["end"] is not None else start
    before, after = context[max(start - CONTEXT, 0) : start], context[end : end + CONTEXT]
    answer = highlight(context[start:end], percent(prediction["score"])) if end > start else ""
    excerpt = f"{'…' if start > CONTEXT else ''}{page.text(before)}{answer}{page.text(after)}"
    dots = "…" if end + CONTEXT < len(context) else ""
    content = f"<b>Q</b>{page.text(truncate(question.question))}<br>{excerpt}{dots}"
    return ErrorCard(truncate(heading, 120), question.place, content)


def question_word(question: str) -> str:
    """Returns the first of QUESTION_WORDS in a question, or `other`."""
    letters = "".join(letter if letter.isalnum() else " " for letter in question.lower())
    words = f" {' '.join(letters.split())} "
    places = {word: words.find(f" {word} ") for word in QUESTION_WORDS}
    found = {word: place for word, place in places.items() if place >= 0}
    return min(found, key=lambda word: (found[word], -len(word)), default="other")


def _scores(found: DevPredictions) -> Float[np.ndarray, "K 2"]:
    """Returns exact match and F1 of each question. A question without an answer is right if none is predicted."""
    scores = []
    for question, prediction in zip(found.items, found.predictions, strict=True):
        labels = [answer.text for answer in question.answers or ()]
        if labels:
            one = squad1_metrics(("exact_match", "f1"), [labels], [prediction["answer"]])
            scores.append([one["exact_match"], one["f1"]])
        else:
            scores.append([float(not prediction["answer"])] * 2)
    return np.array(scores, np.float64)


def _row(name: str, scores: Float[np.ndarray, "K 2"], items: np.ndarray) -> list[str]:
    exact, f1 = scores[items].mean(axis=0)
    return [name, f"{len(items):,}", percent(float(exact)), percent(float(f1))]
