"""Statistics of sequence lengths for the manifest (docs/data_format.md)."""

from typing import Any

import numpy as np

from bert_jax.array_types import Int64

_BINS = 32


def summarise(counts: Int64[np.ndarray, "n"]) -> dict[str, Any]:
    """min, mean, median, p95, max, and a histogram [[upper, sequences], ...] of at most 32 equal bins.

    counts   how many sequences have 0, 1, ... tokens; without any sequence all figures are 0
    """
    total = int(counts.sum())
    if not total:
        return {"min": 0, "mean": 0.0, "median": 0, "p95": 0, "max": 0, "histogram": []}
    present = np.flatnonzero(counts)
    below = np.cumsum(counts)
    width = -(-(len(counts) - 1) // _BINS)
    uppers = np.minimum(np.arange(width, len(counts) - 1 + width, width), len(counts) - 1)
    histogram = np.diff(below[uppers], prepend=counts[0])
    return {
        "min": int(present[0]),
        "mean": round(float(counts @ np.arange(len(counts))) / total, 3),
        "median": int(np.searchsorted(below, 0.5 * total)),
        "p95": int(np.searchsorted(below, 0.95 * total)),
        "max": int(present[-1]),
        "histogram": [[upper, count] for upper, count in zip(uppers.tolist(), histogram.tolist(), strict=True)],
    }
