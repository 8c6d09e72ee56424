"""Fine-tuning batches as a function of (seed, step), and evaluation batches that hold each row once. Pure numpy."""

import functools
import hashlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64

from bert_jax.data import hashing
from bert_jax.data.permutation import permute
from bert_jax.tasks.example import TaskBatch, TaskRows

# Rows are padded to the next of these, so that at most so many programs are compiled and little is padding.
LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def padded_length(longest: int, max_length: int) -> int:
    """The smallest of LENGTHS, or multiple of their last, that holds so many tokens; max_length at most."""
    step = LENGTHS[-1]
    fitting = (length for length in LENGTHS if length >= longest)
    return min(next(fitting, -(-longest // step) * step), max_length)


class TaskSource:
    """The training batches of a task: law 1 of docs/architecture.md over epochs of seeded permutations.

    The rows of `pool` steps are those that follow, in the endless chain of permuted epochs, those of the steps before
    them; no tail is dropped. Within a pool rows of like length share a batch, and the batches come in an order that is
    the same for every seed, so that runs of several seeds have batches of like length at each step. A pool of 1 takes
    rows as they come. `steps`, where they are known, end the last pool, so that no row of the last epoch is left out.
    A batch is padded to the smallest length that holds its longest row.
    """

    def __init__(
        self, rows: TaskRows, *, batch_size: int, seed: int, max_length: int, pool: int = 1, steps: int = 0
    ) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._max_length = max_length
        self._pool = pool
        self._steps = steps
        self._sorted = functools.lru_cache(maxsize=2)(self._sort)  # the batches of a pool are asked for in turn
        self.fingerprints = {"task": fingerprint(rows)}
        self.changes = (0,)

    def rows_at(self, step: int) -> int:
        """Rows of a step's global batch."""
        return self._batch_size

    def indices(self, step: int) -> Int64[np.ndarray, "B"]:
        """The rows of a step's global batch."""
        first, count = self._bounds(step)
        order = permute(np.arange(count, dtype=np.int64), count, first)
        place = int(order[step - first]) * self._batch_size
        return self._sorted(first, count)[place : place + self._batch_size]

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> TaskBatch:
        """The global batch of a step, or only those of its rows, padded as the whole batch is."""
        indices = self.indices(step)
        length = padded_length(int(self._rows.lengths[indices].max()), self._max_length)
        return self._rows.batch(indices if rows is None else indices[rows], length)

    def _bounds(self, step: int) -> tuple[int, int]:
        """The first step of a step's pool, and how many steps it has."""
        first = step - step % self._pool
        left = self._steps - first if step < self._steps else self._pool
        return first, min(self._pool, left)

    def _sort(self, first: int, count: int) -> Int64[np.ndarray, "N"]:
        """The rows of so many steps from the first on, by length; those of one length in the order of the chain."""
        size = self._rows.count
        places = np.arange(first * self._batch_size, (first + count) * self._batch_size, dtype=np.int64)
        drawn = permute(places % size, size, hashing.combine(self._seed, places // size))
        if count == 1:
            return drawn
        return drawn[np.argsort(self._rows.lengths[drawn], kind="stable")]


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


def fingerprint(rows: TaskRows) -> str:
    """Says which rows these are, and how they are encoded."""
    digest = hashlib.sha256()
    for _, array in sorted(rows.arrays().items()):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
