"""Fine-tuning batches as a function of (seed, step). Pure numpy."""

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from bert_jax.data import hashing
from bert_jax.data.permutation import permute
from bert_jax.tasks.example import TaskBatch, TaskRows


class TaskSource:
    """The training batches of a task: law 1 of docs/architecture.md over epochs of seeded permutations.

    Steps are grouped into pools of `pool` steps. A pool takes the rows that follow those of the pool before it in the
    endless concatenation of permuted epochs; no rows are dropped at an epoch's end. Within a pool, rows of similar
    length share a batch. The order of the batches is the same for every seed. A pool of 1 takes rows in their order.
    `steps`, if known, ends the last pool, so that no row of the last epoch is left out. A batch is padded to the
    smallest of `best_lengths` that holds its longest row.
    """

    def __init__(
        self,
        rows: TaskRows,
        *,
        batch_size: int,
        seed: int,
        lengths: Sequence[int],
        pool: int = 1,
        steps: int = 0,
    ) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._lengths = tuple(lengths)
        self._pool = pool
        self._steps = steps
        # The batches of a pool are requested one after another.
        self._sorted = functools.lru_cache(maxsize=2)(self._sort)
        self.fingerprints = {"task": fingerprint(rows)}
        self.changes = (0,)

    def rows_at(self, step: int) -> int:
        """The number of rows of a step's global batch."""
        return self._batch_size

    def indices(self, step: int) -> Int64[np.ndarray, "B"]:
        """The rows of a step's global batch."""
        first, count = self._bounds(step)
        order = permute(np.arange(count, dtype=np.int64), count, first)
        place = int(order[step - first]) * self._batch_size
        return self._sorted(first, count)[place : place + self._batch_size]

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> TaskBatch:
        """The global batch of a step, or only these rows of it, padded as the whole batch is."""
        indices = self.indices(step)
        return self._rows.batch(indices if rows is None else indices[rows], self._padded(step))

    def first_of_each_length(self) -> tuple[int, ...]:
        """The first step of each padded length, among the first pools, which have batches of nearly all lengths."""
        last = max(4 * self._pool, 64)
        found: dict[int, int] = {}
        for step in range(min(last, self._steps) if self._steps else last):
            found.setdefault(self._padded(step), step)
            if len(found) == len(self._lengths):
                break
        return tuple(found.values())

    def _padded(self, step: int) -> int:
        longest = self._rows.lengths[self.indices(step)].max()
        return next(length for length in self._lengths if length >= longest)

    def _bounds(self, step: int) -> tuple[int, int]:
        """The first step of a step's pool, and how many steps it has."""
        first = step - step % self._pool
        left = self._steps - first if step < self._steps else self._pool
        return first, min(self._pool, left)

    def _sort(self, first: int, count: int) -> Int64[np.ndarray, "N"]:
        """The rows of `count` steps from `first`, sorted by length; rows of equal length keep their permuted order."""
        size = self._rows.count
        places = np.arange(first * self._batch_size, (first + count) * self._batch_size, dtype=np.int64)
        permuted = permute(places % size, size, hashing.combine(self._seed, places // size))
        if count == 1:
            return permuted
        return permuted[np.argsort(self._rows.lengths[permuted], kind="stable")]


def fingerprint(rows: TaskRows) -> str:
    """A hash of the rows and their encoding."""
    digest = hashlib.sha256()
    for _, array in sorted(rows.arrays().items()):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
