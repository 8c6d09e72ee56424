"""What the span boundary objective (Joshi et al. 2020, section 3.2) asks of each prediction's span."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from bert_jax.data.masking.spans import run_starts


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
    width = sequence_ids.shape[1]
    row, column = np.nonzero(np.arange(masked_positions.shape[1]) < counts[:, None])
    positions = masked_positions[row, column]
    # The sequences of all rows, numbered in order; wider than 32 bits only for 2**31 slots.
    sequences = row * (width + 1) + sequence_ids[row, positions]
    firsts = run_starts(sequences, positions)
    # The same from behind gives the last slot of each span.
    lasts = -run_starts(-sequences[::-1], -positions[::-1])[::-1]
    left, right = np.maximum(firsts - 1, 0), np.minimum(lasts + 1, width - 1)
    ids = sequence_ids[row, positions]
    left = np.where(sequence_ids[row, left] == ids, left, firsts)
    right = np.where(sequence_ids[row, right] == ids, right, lasts)

    fields = np.zeros((3, *masked_positions.shape), np.int32)
    fields[:, row, column] = left, right, positions - firsts + 1
    return SpanTargets(*fields)
