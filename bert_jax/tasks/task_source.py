"""Fine-tuning batches as a function of (seed, step), and evaluation batches that hold each row once. Pure numpy."""

import functools
import hashlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64

from bert_jax.data import hashing
from bert_jax.data.permutation import permute
from bert_jax.tasks.example import TaskBatch, TaskRows

# What is measured or answered is padded to the next of these, whatever the file: each is compiled once.
LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)

# What is learnt from, to so many lengths at most, multiples of STEP that are chosen for the file.
SHAPES, STEP = 6, 8


def padded_length(longest: int, max_length: int) -> int:
    """The smallest of LENGTHS, or multiple of their last, that holds so many tokens; max_length at most."""
    step = LENGTHS[-1]
    fitting = (length for length in LENGTHS if length >= longest)
    return min(next(fitting, -(-longest // step) * step), max_length)


def best_lengths(lengths: Int64[np.ndarray, "N"], max_length: int, shapes: int = SHAPES) -> tuple[int, ...]:
    """The lengths, at most so many, that rows are padded to with the fewest slots in all; ascending.

    Each is a multiple of STEP, or max_length. Exact, by dynamic programming over the histogram: the best choice for the
    rows up to some length ends there, and is the best of one length fewer up to some shorter length before that.
    """
    rounded = np.minimum(-(-lengths // STEP) * STEP, max_length)
    sizes, counts = np.unique(rounded, return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])
    slots = np.concatenate([[0.0], np.full(len(sizes), np.inf)])  # of the rows of the first i sizes, in so many lengths
    cuts: list[np.ndarray] = []  # where the last of them begins
    for _ in range(min(shapes, len(sizes))):
        costs = slots + (before[:, None] - before) * np.concatenate([[0], sizes])[:, None]
        costs[np.triu_indices(len(slots))] = np.inf
        cuts.append(costs.argmin(axis=1))
        slots = costs.min(axis=1)
    end, chosen = len(sizes), []
    for cut in reversed(cuts):
        chosen.append(int(sizes[end - 1]))
        end = int(cut[end])
    return tuple(reversed(chosen))


class TaskSource:
    """The training batches of a task: law 1 of docs/architecture.md over epochs of seeded permutations.

    The rows of `pool` steps are those that follow, in the endless chain of permuted epochs, those of the steps before
    them; no tail is dropped. Within a pool rows of like length share a batch, and the batches come in an order that is
    the same for every seed, so that runs of several seeds have batches of like length at each step. A pool of 1 takes
    rows as they come. `steps`, where they are known, end the last pool, so that no row of the last epoch is left out.
    A batch is padded to the smallest of `best_lengths` that holds its longest row.
    """

    def __init__(
        self, rows: TaskRows, *, batch_size: int, seed: int, max_length: int, pool: int = 1, steps: int = 0
    ) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._lengths = best_lengths(rows.lengths, max_length)
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
        return self._rows.batch(indices if rows is None else indices[rows], self.padded(self.longest(step)))

    def longest(self, step: int) -> int:
        """The tokens of the longest row of a step."""
        return int(self._rows.lengths[self.indices(step)].max())

    def padded(self, longest: int) -> int:
        """What a batch is padded to whose longest row has so many tokens."""
        return next(length for length in self._lengths if length >= longest)

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
