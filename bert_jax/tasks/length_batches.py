"""Batches of rows of similar length, each row once, padded to few different lengths. Pure numpy."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64

from bert_jax.tasks.example import TaskBatch, TokenRows

# Evaluation and inference pad batches to the next of these lengths. They do not depend on the file, so that each
# length is compiled once.
LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)

Batches = Iterator[tuple[Int64[np.ndarray, "B"], TaskBatch]]  # indices of the rows (-1: a filler of weight 0), batch


def padded_length(longest: int, max_length: int) -> int:
    """The smallest of LENGTHS, or multiple of the last one, that holds `longest` tokens; at most max_length."""
    step = LENGTHS[-1]
    fitting = (length for length in LENGTHS if length >= longest)
    return min(next(fitting, -(-longest // step) * step), max_length)


def sorted_batches(rows: TokenRows, batch_size: int, max_length: int) -> Batches:
    """Batches of one size over the rows sorted by length, so that short rows cost little."""
    order = np.argsort(rows.lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        length = padded_length(int(rows.lengths[part].max()), max_length)
        indices = np.concatenate([part, np.full(batch_size - len(part), -1)])
        yield indices, rows.batch(indices, length)


def bucketed_batches(rows: TokenRows, batch_size: int, devices: int, max_length: int) -> Batches:
    """Batches of the rows that are padded to the same length, for inputs of any number.

    The last batch of a length has as many rows as it needs, rounded up to a power of two for each device. This gives
    at most two programs for each length, and fillers are less than half of any batch.
    """
    lengths, of_row = np.unique(rows.lengths, return_inverse=True)
    padded = np.array([padded_length(int(length), max_length) for length in lengths], np.int64)[of_row]
    for length in np.unique(padded):
        members = np.flatnonzero(padded == length)
        for start in range(0, len(members), batch_size):
            part = members[start : start + batch_size]
            per_device = 1 << (-(-len(part) // devices) - 1).bit_length()
            size = min(per_device * devices, -(-batch_size // devices) * devices)
            indices = np.pad(part, (0, size - len(part)), constant_values=-1)
            yield indices, rows.batch(indices, int(length))
