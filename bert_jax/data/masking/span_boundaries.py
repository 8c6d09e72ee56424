"""The inputs of the span boundary objective (Joshi et al. 2020, section 3.2) for each prediction."""

from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Int32


class SpanTargets(NamedTuple):
    """The fields of Batch with the same names: positions in the row; 0 in fillers."""

    span_left: Int32[np.ndarray, "R M"]  # the position before the span
    span_right: Int32[np.ndarray, "R M"]  # the position after the span
    span_offsets: Int32[np.ndarray, "R M"]  # 1, 2, ...: the position within the span


def span_targets(
    masked_positions: Int32[np.ndarray, "R M"],
    counts: Int32[np.ndarray, "R"],
    sequence_ids: Int32[np.ndarray, "R T"],
) -> SpanTargets:
    """The boundaries of each prediction's span, found as runs of predicted positions of one sequence.

    They need only what static masks store. Both boundaries lie in the span's sequence, which begins and ends with
    special tokens. If a sequence lacks these, the first or last position of the span stands for the missing boundary.
    """
    (count, width), most = sequence_ids.shape, masked_positions.shape[1]
    at = np.flatnonzero(np.arange(most) < counts[:, None])
    row = np.repeat(np.arange(count), counts)
    flat_indices = row * width + masked_positions.reshape(-1)[at]
    flat = sequence_ids.reshape(-1)
    ids = flat[flat_indices]

    new = np.ones(flat_indices.size, bool)
    new[1:] = (np.diff(flat_indices) != 1) | (ids[1:] != ids[:-1]) | (row[1:] != row[:-1])
    firsts = np.flatnonzero(new)
    sizes = np.diff(firsts, append=flat_indices.size)
    begins, origins, span_ids = flat_indices[firsts], row[firsts] * width, ids[firsts]
    left = np.maximum(begins - 1, origins)
    left = np.where(flat[left] == span_ids, left, begins)
    right = np.minimum(begins + sizes, origins + width - 1)
    right = np.where(flat[right] == span_ids, right, begins + sizes - 1)

    fields = np.zeros((3, count, most), np.int32)
    for field, values in zip(fields, (left - origins, right - origins), strict=False):
        field.reshape(-1)[at] = np.repeat(values, sizes)
    fields[2].reshape(-1)[at] = flat_indices - np.repeat(begins - 1, sizes)
    return SpanTargets(*fields)
