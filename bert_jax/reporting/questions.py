"""What a report shows of a model that answers questions: which kinds of questions it answers, and the worst answers."""

import numpy as np

from bert_jax.array_types import Float
from bert_jax.reporting import page
from bert_jax.reporting.curves import percent
from bert_jax.reporting.dev_predictions import DevPredictions
from bert_jax.reporting.errors import Example, marked, shortened
from bert_jax.tasks.kinds.question_files import Question
from bert_jax.tasks.kinds.question_metrics import squad1_metrics

QUESTION_WORDS = ("what", "who", "when", "where", "which", "why", "how many", "how much", "how", "whose", "whom")
AROUND = 160  # characters of a context on each side of an answer


def question_sections(found: DevPredictions) -> list[str]:
    """Scores by question word, and by whether there is an answer."""
    scores = _scores(found)
    groups: dict[str, list[int]] = {}
    for item, question in enumerate(found.items):
        groups.setdefault(question_word(question.question), []).append(item)
    order = sorted(groups, key=lambda word: (word == "other", -len(groups[word])))
    rows = [_row(word, scores, np.array(groups[word])) for word in order]
    without = np.array([question.answers == () for question in found.items])
    for name, kept in (("has an answer", ~without), ("has none", without)):
        if without.any() and kept.any():
            rows.append(_row(name, scores, np.flatnonzero(kept)))
    rows.append(_row("all", scores, np.arange(len(scores))))
    table = page.table(["questions", "number", "exactly right", "F1"], rows)
    note = f"On {found.said}, by the question's word; right and F1 as the official scripts of SQuAD have them."
    return [page.section("Which questions it answers", table, note)]


def question_examples(found: DevPredictions, items: list[int]) -> list[Example]:
    """Questions, their contexts around the guess and the first true answer, which are set apart."""
    return [_example(found.items[item], found.predictions[item]) for item in items]


def question_word(question: str) -> str:
    """The one of QUESTION_WORDS that a question begins with, or else has in it first; `other` for none."""
    words = f" {' '.join(''.join(one if one.isalnum() else ' ' for one in question.lower()).split())} "
    places = {word: words.find(f" {word} ") for word in QUESTION_WORDS}
    there = {word: place for word, place in places.items() if place >= 0}
    return min(there, key=lambda word: (there[word], -len(word)), default="other")


def _scores(found: DevPredictions) -> Float[np.ndarray, "K 2"]:
    """Exact match and F1 of each question; where there is no answer the guess has to be none."""
    scores = []
    for question, told in zip(found.items, found.predictions, strict=True):
        truths = [answer.text for answer in question.answers or ()]
        if truths:
            one = squad1_metrics(("exact_match", "f1"), [truths], [told["answer"]])
            scores.append([one["exact_match"], one["f1"]])
        else:
            scores.append([float(not told["answer"])] * 2)
    return np.array(scores, np.float64)


def _row(name: str, scores: Float[np.ndarray, "K 2"], items: np.ndarray) -> list[str]:
    exact, f1 = scores[items].mean(axis=0)
    return [name, f"{len(items):,}", percent(float(exact)), percent(float(f1))]


def _example(question: Question, told: dict) -> Example:
    true = question.answers[0] if question.answers else None
    heading = f"{true.text if true else 'no answer'}, guessed {told['answer'] or 'no answer'}"
    place = told["start"] if told["start"] is not None else question.context.find(true.text) if true else 0
    end = told["end"] if told["end"] is not None else place
    context = question.context
    before, after = context[max(place - AROUND, 0) : place], context[end : end + AROUND]
    guess = marked(context[place:end], percent(told["score"])) if end > place else ""
    around = f"{'…' if place > AROUND else ''}{page.text(before)}{guess}{page.text(after)}"
    dots = "…" if end + AROUND < len(context) else ""
    content = f"<b>Q</b>{page.text(shortened(question.question))}<br>{around}{dots}"
    return Example(shortened(heading, 120), question.place, content)
