"""Exact match and F1 of answers, as the official scripts compute them, as shares of 1.

SQuAD 1.1: evaluate-v1.1.py (Rajpurkar et al. 2016, section 6.1); SQuAD 2.0: evaluate-v2.0.py (Rajpurkar et al. 2018,
section 4), whose metric names are kept.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64

from bert_jax.tasks.metric_functions import select_metrics

THRESHOLD = "best_f1_thresh"  # the metric that is the best null_threshold
SQUAD1_METRICS = ("f1", "exact_match")
SQUAD2_METRICS = (
    *("f1", "exact", "HasAns_f1", "HasAns_exact", "NoAns_f1", "NoAns_exact"),
    *("best_f1", THRESHOLD, "best_exact", "best_exact_thresh"),
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compared_words(text: str) -> list[str]:
    """The words of an answer that are compared: in lower case, without ASCII punctuation and English articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def overlap(reference: Sequence[str], prediction: Sequence[str]) -> float:
    """F1 of the words of two answers; 0 where they share none."""
    shared = sum((Counter(reference) & Counter(prediction)).values())
    if not shared:
        return 0.0
    precision, recall = 1.0 * shared / len(prediction), 1.0 * shared / len(reference)
    return (2 * precision * recall) / (precision + recall)


def squad1_metrics(
    names: Sequence[str], references: Sequence[Sequence[str]], predictions: Sequence[str]
) -> dict[str, float]:
    """`exact_match` and `f1`: the maximum over a question's true answers, of which there is at least one."""
    scores = [
        _best(map(compared_words, reference), compared_words(prediction))
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
    """SQUAD2_METRICS, for questions that may have no answer (a question without references has none).

    references are the true answers to each question, predictions the best answer to each. A prediction whose
    probability of no answer is above the threshold counts as no answer. The default threshold is best_f1_thresh, the
    best one for this split. A mean over no questions is NaN.
    """
    answerable = np.array([bool(reference) for reference in references])
    scores = [
        _squad2_scores(reference, prediction) for reference, prediction in zip(references, predictions, strict=True)
    ]
    exact, f1 = np.array(scores, np.float64).T
    given = np.array([bool(prediction) for prediction in predictions])
    probabilities = np.array(no_answer, np.float64)
    best_exact = best_threshold(exact, probabilities, answerable, given)
    best_f1 = best_threshold(f1, probabilities, answerable, given)
    withheld = probabilities > (best_f1.threshold if threshold is None else threshold)
    found = {
        "best_exact": best_exact.score,
        "best_exact_thresh": best_exact.threshold,
        "best_f1": best_f1.score,
        THRESHOLD: best_f1.threshold,
    }
    for name, raw in (("exact", exact), ("f1", f1)):
        final = np.where(withheld, ~answerable, raw)
        found |= {
            name: _mean(final),
            f"HasAns_{name}": _mean(final[answerable]),
            f"NoAns_{name}": _mean(final[~answerable]),
        }
    return select_metrics(names, found)


class Best(NamedTuple):
    """The best score over all thresholds, as a share of 1, and its threshold."""

    score: float
    threshold: float


def best_threshold(
    scores: Float64[np.ndarray, "Q"],
    no_answer: Float64[np.ndarray, "Q"],
    answerable: Bool[np.ndarray, "Q"],
    given: Bool[np.ndarray, "Q"],
) -> Best:
    """The threshold of no_answer up to which answers are given that maximizes the sum of scores.

    `given`: the predicted text is not empty. As in the official script, questions are added one by one, the lowest
    probability of no answer first (of equals in the order of the file); the first maximum counts; and where giving no
    answer at all is best, the threshold is 0.
    """
    order = np.argsort(no_answer, kind="stable")
    gains = np.where(answerable, scores, np.where(given, -1.0, 0.0))[order]
    reached = np.cumsum(np.concatenate([[float((~answerable).sum())], gains]))
    best = int(reached.argmax())
    return Best(float(reached[best]) / len(scores), float(no_answer[order[best - 1]]) if best else 0.0)


def _squad2_scores(reference: Sequence[str], prediction: str) -> tuple[float, float]:
    """Exact match and F1. An answer without compared words counts as no answer; two such answers are equal."""
    words = compared_words(prediction)
    references = [found for text in reference if (found := compared_words(text))] or [[]]
    exact, f1 = _best(references, words)
    return exact, f1 if words and references[0] else exact


def _best(references: Iterable[list[str]], prediction: list[str]) -> tuple[float, float]:
    exact, f1 = zip(*((float(words == prediction), overlap(words, prediction)) for words in references), strict=True)
    return max(exact), max(f1)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")
