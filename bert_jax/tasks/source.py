"""Fine-tuning batches as a function of (seed, step), and evaluation batches that hold each row once. Pure numpy."""

import hashlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64

from bert_jax.data import hashing
from bert_jax.data.permutation import permute
from bert_jax.tasks.example import TaskBatch, TaskRows

# Rows are padded to multiples of this, so that a run compiles a handful of programs and not one for each length.
LENGTH_STEP = 32


def padded_length(longest: int, max_length: int) -> int:
    """The smallest length in use (32, 64 ... max_length) that holds a row of `longest` tokens."""
    return min(-(-longest // LENGTH_STEP) * LENGTH_STEP, max_length)


class TaskSource:
    """The training batches of a task: law 1 of docs/architecture.md over epochs of seeded permutations.

    Step s reads the batch_size rows that follow those of the steps before it in the endless chain of permuted
    epochs; no tail is dropped. A batch is padded to the smallest length that holds its longest row.
    """

    def __init__(self, rows: TaskRows, *, batch_size: int, seed: int, max_length: int) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._max_length = max_length
        self.fingerprints = {"task": _fingerprint(rows)}
        self.changes = (0,)

    def rows_at(self, step: int) -> int:
        """Rows of a step's global batch."""
        return self._batch_size

    def indices(self, step: int) -> Int64[np.ndarray, "B"]:
        """The rows of a step's global batch."""
        count = self._rows.count
        places = step * self._batch_size + np.arange(self._batch_size, dtype=np.int64)
        return permute(places % count, count, hashing.combine(self._seed, places // count))

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> TaskBatch:
        """The global batch of a step, or only those of its rows, padded as the whole batch is."""
        indices = self.indices(step)
        length = padded_length(int(self._rows.lengths[indices].max()), self._max_length)
        return self._rows.batch(indices if rows is None else indices[rows], length)


def evaluation_batches(
    rows: TaskRows, batch_size: int, max_length: int
) -> Iterator[tuple[Int64[np.ndarray, "B"], TaskBatch]]:
    """Each row once, by length so that short rows cost little, with its index (-1: a filler, of weight 0)."""
    order = np.argsort(rows.lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        length = padded_length(int(rows.lengths[part].max()), max_length)
        indices = np.concatenate([part, np.full(batch_size - len(part), -1)])
        yield indices, rows.batch(indices, length)


def _fingerprint(rows: TaskRows) -> str:
    digest = hashlib.sha256()
    for _, array in sorted(rows.arrays().items()):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
