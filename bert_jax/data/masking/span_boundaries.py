"""What the span boundary objective (Joshi et al. 2020, section 3.2) asks of each prediction's span."""

from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Int32


class SpanTargets(NamedTuple):
    """The fields of Batch by the same names: row-local slots; 0 in fillers."""

    span_left: Int32[np.ndarray, "R M"]  # the slot before the span
    span_right: Int32[np.ndarray, "R M"]  # the slot behind it
    span_offsets: Int32[np.ndarray, "R M"]  # 1, 2, ...: the place in the span


def span_targets(
    masked_positions: Int32[np.ndarray, "R M"],
    counts: Int32[np.ndarray, "R"],
    sequence_ids: Int32[np.ndarray, "R T"],
) -> SpanTargets:
    """Spans are runs of predicted slots of one sequence, so what is stored of static masks is enough.

    Both slots lie in the span's sequence, which begins and ends with special tokens; without them, the first and the
    last slot of a span that goes to an end stand for the missing one.
    """
    (count, width), most = sequence_ids.shape, masked_positions.shape[1]
    at = np.flatnonzero(np.arange(most) < counts[:, None])
    row = np.repeat(np.arange(count), counts)
    slots = row * width + masked_positions.reshape(-1)[at]
    flat = sequence_ids.reshape(-1)
    ids = flat[slots]

    new = np.ones(slots.size, bool)
    new[1:] = (np.diff(slots) != 1) | (ids[1:] != ids[:-1]) | (row[1:] != row[:-1])
    firsts = np.flatnonzero(new)
    sizes = np.diff(firsts, append=slots.size)
    begins, origins, span_ids = slots[firsts], row[firsts] * width, ids[firsts]
    left = np.maximum(begins - 1, origins)
    left = np.where(flat[left] == span_ids, left, begins)
    right = np.minimum(begins + sizes, origins + width - 1)
    right = np.where(flat[right] == span_ids, right, begins + sizes - 1)

    fields = np.zeros((3, count, most), np.int32)
    for field, values in zip(fields, (left - origins, right - origins), strict=False):
        field.reshape(-1)[at] = np.repeat(values, sizes)
    fields[2].reshape(-1)[at] = slots - np.repeat(begins - 1, sizes)
    return SpanTargets(*fields)
