"""The most frequent confusions of classes, and the calibration of probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.array_types import Bool, Float, Int64

BINS = 15  # Guo et al. 2017, section 4


@dataclass(frozen=True)
class Calibration:
    """Predictions by their probability, in bins of equal width: bin m holds those in ((m - 1) / M, m / M]."""

    counts: Int64[np.ndarray, "M"]
    confidence: Float[np.ndarray, "M"]  # mean probability; NaN in an empty bin
    accuracy: Float[np.ndarray, "M"]  # share of correct predictions; NaN in an empty bin

    @property
    def error(self) -> float:
        """The expected calibration error (Guo et al. 2017, section 2, equation 3)."""
        gaps = np.nan_to_num(np.abs(self.accuracy - self.confidence))
        return float((self.counts * gaps).sum() / self.counts.sum())


def calibrate(confidence: Float[np.ndarray, "R"], correct: Bool[np.ndarray, "R"], bins: int = BINS) -> Calibration:
    """Returns the calibration of predictions with these probabilities."""
    places = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    counts = np.bincount(places, minlength=bins)
    with np.errstate(invalid="ignore"):
        means = [np.bincount(places, values, bins) / counts for values in (confidence, correct.astype(float))]
    return Calibration(counts, *means)


def most_confused(
    counts: Int64[np.ndarray, "C C"], names: Sequence[str], most: int
) -> list[tuple[str, str, int, float]]:
    """Returns label, prediction, count, and share of the label's cases, the most frequent confusions first."""
    wrong = counts * (1 - np.eye(len(counts), dtype=np.int64))
    order = [divmod(int(place), len(counts)) for place in np.argsort(-wrong, axis=None, kind="stable")[:most]]
    return [
        (names[label], names[other], int(wrong[label, other]), float(wrong[label, other] / counts[label].sum()))
        for label, other in order
        if wrong[label, other]
    ]
