"""Classes guessed and true: who is taken for whom, and whether probabilities mean what they say. Pure numpy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.array_types import Bool, Float, Int64, Integer

BINS = 15  # Guo et al. 2017, section 4


def confusion(
    truth: Integer[np.ndarray, "R"], guess: Integer[np.ndarray, "R"], classes: int
) -> Int64[np.ndarray, "C C"]:
    """How often a class, in its row, was taken for another, in its column."""
    return np.bincount(truth.astype(np.int64) * classes + guess, minlength=classes**2).reshape(classes, classes)


@dataclass(frozen=True)
class ClassScores:
    """Of each class; a share of nothing is 0."""

    precision: Float[np.ndarray, "C"]
    recall: Float[np.ndarray, "C"]
    f1: Float[np.ndarray, "C"]


def class_scores(counts: Int64[np.ndarray, "C C"]) -> ClassScores:
    """From a confusion."""
    right = np.diag(counts).astype(float)
    precision, recall = _share(right, counts.sum(axis=0)), _share(right, counts.sum(axis=1))
    return ClassScores(precision, recall, _share(2 * precision * recall, precision + recall))


@dataclass(frozen=True)
class Calibration:
    """Guesses by their probability, in bins of equal width: bin m holds those in ((m - 1) / M, m / M]."""

    counts: Int64[np.ndarray, "M"]
    confidence: Float[np.ndarray, "M"]  # the mean of the probabilities; NaN in an empty bin
    accuracy: Float[np.ndarray, "M"]  # the share that is right; NaN in an empty bin

    @property
    def error(self) -> float:
        """The expected calibration error (Guo et al. 2017, section 2, equation 3)."""
        gaps = np.nan_to_num(np.abs(self.accuracy - self.confidence))
        return float((self.counts * gaps).sum() / self.counts.sum())


def calibrate(confidence: Float[np.ndarray, "R"], right: Bool[np.ndarray, "R"], bins: int = BINS) -> Calibration:
    """Of guesses with these probabilities."""
    places = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    counts = np.bincount(places, minlength=bins)
    with np.errstate(invalid="ignore"):
        means = [np.bincount(places, values, bins) / counts for values in (confidence, right.astype(float))]
    return Calibration(counts, *means)


def most_confused(
    counts: Int64[np.ndarray, "C C"], names: Sequence[str], most: int
) -> list[tuple[str, str, int, float]]:
    """The truth, what it was taken for, how often, and in which share of the truth's cases; the most frequent first."""
    wrong = counts * (1 - np.eye(len(counts), dtype=np.int64))
    order = [divmod(int(place), len(counts)) for place in np.argsort(-wrong, axis=None, kind="stable")[:most]]
    return [
        (names[truth], names[guess], int(wrong[truth, guess]), float(wrong[truth, guess] / counts[truth].sum()))
        for truth, guess in order
        if wrong[truth, guess]
    ]


def _share(part: Float[np.ndarray, "C"], whole: np.ndarray) -> Float[np.ndarray, "C"]:
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)
