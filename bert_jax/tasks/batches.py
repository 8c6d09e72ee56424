"""Fine-tuning batches as a function of (seed, step), grouped by length and padded to few lengths. Pure numpy.

`TaskSource` makes the training batches. The functions above it choose padded lengths, each of which is one compiled
program, and make batches for evaluation and inference.
"""

import functools
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int64

from bert_jax.config import ModelConfig
from bert_jax.data import order
from bert_jax.data.order import permute
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.rows import TaskBatch, TaskRows, TokenRows

SHAPES, STEP = 8, 4  # training batches have at most so many lengths, all multiples of STEP or the task's maximum

SAMPLED_STEPS = 512  # enough to know how long the longest rows of batches are

# What one more program costs. Measured with jax 0.10 on two cores of an AMD EPYC with AVX2, in float32: the step of a
# BERT of 6 layers of 384 compiles in 8.3 s, tracing included, or in 5.4 s with its layers in a scan, and trains 4,100
# positions a second. An accelerator is assumed to reach a third of the peak of an A100.
# On TPUs, a layer of BERT-Large takes 20 s (491 s for 24 of them).
_SECONDS, _SECONDS_A_LAYER, _SECONDS_A_LAYER_ON_TPUS = 4.8, 0.58, 20.0
_CPU_SPEED, _ACCELERATOR_SPEED = 2.6e11, 1e14  # FLOPs a second in matmuls

# Evaluation and inference pad batches to the next of these lengths. They do not depend on the file, so that each
# length is compiled once.
LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)

Batches = Iterator[tuple[Int64[np.ndarray, "B"], TaskBatch]]  # indices of the rows (-1: a filler of weight 0), batch


def best_lengths(
    lengths: Int64[np.ndarray, "N"],
    max_length: int,
    shapes: int = SHAPES,
    *,
    passes: float = 1.0,
    price: float = 0.0,
    step: int = STEP,
) -> tuple[int, ...]:
    """Finds padded lengths, at most `shapes` and ascending multiples of `step`, at which these batches cost least.

    The cost is the sum of the padded lengths, `passes` times, and `price` for every length.

    Args:
        lengths: of the longest row in each batch (longest_rows).
    """
    rounded = np.minimum(-(-lengths // step) * step, max_length)
    sizes, counts = np.unique(rounded, return_counts=True)
    # Exact, by dynamic programming over the histogram: the best lengths for the batches up to some length end with it,
    # and the others are the best ones, one fewer, for the batches up to some shorter length.
    before = np.concatenate([[0], np.cumsum(counts)])  # batches of the first i sizes
    positions = np.concatenate([[0.0], np.full(len(sizes), np.inf)])  # padded, with `number` lengths for the first i
    cuts: list[np.ndarray] = []  # by number and i, the sizes that the shorter lengths cover
    totals = []
    for number in range(1, min(shapes, len(sizes)) + 1):
        # costs[i, j]: the shorter lengths cover the first j sizes, and batches of the sizes j to i have length i.
        costs = positions + (before[:, None] - before) * np.concatenate([[0], sizes])[:, None]
        costs[np.triu_indices(len(positions))] = np.inf
        cuts.append(costs.argmin(axis=1))
        positions = costs.min(axis=1)
        totals.append(passes * positions[-1] + price * number)
    # From the longest length back to the shortest.
    end, chosen = len(sizes), []
    for cut in reversed(cuts[: int(np.argmin(totals)) + 1]):
        chosen.append(int(sizes[end - 1]))
        end = int(cut[end])
    return tuple(reversed(chosen))


def price(model: ModelConfig, runtime: Runtime, platform: str) -> float:
    """Estimates how many positions a model trains in the time that its step compiles for one more length.

    Args:
        platform: As jax.default_backend() names it. Nothing else about the machine matters, so that a run resumes with
            the same lengths on another machine.
    """
    compiled = model.layers if runtime.unrolled(model.layers) else 1
    matrices = layers.flatten(abstract_params(model, Heads())["encoder"]).values()
    times = model.layers if model.shared_layers == "all" else 1
    # 2 FLOPs per parameter and position forward, and 4 backward.
    flops = 6 * times * sum(leaf.size for leaf in matrices)
    speed = _CPU_SPEED if platform == "cpu" else _ACCELERATOR_SPEED
    seconds_a_layer = _SECONDS_A_LAYER_ON_TPUS if platform == "tpu" else _SECONDS_A_LAYER
    return (_SECONDS + seconds_a_layer * compiled) * speed / flops


def padded_length(longest: int, max_length: int) -> int:
    """Returns the smallest of LENGTHS, or multiple of the last one, that holds `longest` tokens; at most max_length."""
    step = LENGTHS[-1]
    fitting = (length for length in LENGTHS if length >= longest)
    return min(next(fitting, -(-longest // step) * step), max_length)


def sorted_batches(rows: TokenRows, batch_size: int, max_length: int) -> Batches:
    """Yields equally large batches over the rows sorted by length, so that short rows cost little."""
    order = np.argsort(rows.lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        length = padded_length(int(rows.lengths[part].max()), max_length)
        indices = np.concatenate([part, np.full(batch_size - len(part), -1)])
        yield indices, rows.batch(indices, length)


def bucketed_batches(rows: TokenRows, batch_size: int, devices: int, max_length: int) -> Batches:
    """Yields batches whose rows have the same padded length, for any number of inputs."""
    lengths, row_lengths = np.unique(rows.lengths, return_inverse=True)
    padded = np.array([padded_length(int(length), max_length) for length in lengths], np.int64)[row_lengths]
    for length in np.unique(padded):
        members = np.flatnonzero(padded == length)
        for start in range(0, len(members), batch_size):
            part = members[start : start + batch_size]
            # The last batch of a length has as many rows as it needs, rounded up to a power of two for each device.
            # This gives at most two programs for a length, and fillers are less than half of any batch.
            per_device = 1 << (-(-len(part) // devices) - 1).bit_length()
            size = min(per_device * devices, -(-batch_size // devices) * devices)
            indices = np.pad(part, (0, size - len(part)), constant_values=-1)
            yield indices, rows.batch(indices, int(length))


class TaskSource:
    """A task's training batches: law 1 in docs/architecture.md over epochs of seeded permutations.

    Args:
        lengths: A batch is padded to the smallest one that fits its longest row.
        pool: The steps in a pool. A pool takes the rows that follow the last pool in the endless concatenation of
            permuted epochs, and within it rows of similar length share a batch. A pool of 1 takes rows in their order.
            The order of the batches is the same for every seed.
        steps: The run's length, if known. It ends the last pool, so the last epoch leaves no row out.
    """

    def __init__(
        self, rows: TaskRows, batch_size: int, seed: int, lengths: Sequence[int], *, pool: int = 1, steps: int = 0
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
        """Returns the number of rows in a step's global batch."""
        return self._batch_size

    def indices(self, step: int) -> Int64[np.ndarray, "B"]:
        """Returns the rows in a step's global batch."""
        # The pool of the step: its first step, and its number of steps.
        first = step - step % self._pool
        left = self._steps - first if step < self._steps else self._pool
        count = min(self._pool, left)
        order = permute(np.arange(count, dtype=np.int64), count, first)
        place = int(order[step - first]) * self._batch_size
        return self._sorted(first, count)[place : place + self._batch_size]

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> TaskBatch:
        """Returns a step's global batch, or only these rows of it, padded as the whole batch is."""
        indices = self.indices(step)
        return self._rows.batch(indices if rows is None else indices[rows], self._padded(step))

    def chain(self, first: int, count: int) -> Int64[np.ndarray, "N"]:
        """Returns the rows of `count` steps from `first` in the concatenation of epochs, before pools are sorted."""
        size = self._rows.count
        places = np.arange(first * self._batch_size, (first + count) * self._batch_size, dtype=np.int64)
        # Every epoch has a permutation of its own.
        return permute(places % size, size, order.combine(self._seed, places // size))

    def first_of_each_length(self) -> tuple[int, ...]:
        """Returns the first steps of the padded lengths, among the first pools, which have nearly all lengths."""
        last = max(4 * self._pool, 64)
        first: dict[int, int] = {}
        for step in range(min(last, self._steps or last)):
            first.setdefault(self._padded(step), step)
            if len(first) == len(self._lengths):
                break
        return tuple(first.values())

    def _padded(self, step: int) -> int:
        longest = self._rows.lengths[self.indices(step)].max()
        return next(length for length in self._lengths if length >= longest)

    def _sort(self, first: int, count: int) -> Int64[np.ndarray, "N"]:
        """Returns the rows of `count` steps from `first`, sorted by length."""
        permuted = self.chain(first, count)
        if count == 1:
            return permuted
        # A stable sort keeps rows of equal length in their permuted order.
        return permuted[np.argsort(self._rows.lengths[permuted], kind="stable")]


def longest_rows(rows: TaskRows, batch_size: int, pool: int = 1) -> Int64[np.ndarray, "S"]:
    """Returns the length of the longest row in each of a run's first batches, and of the longest row of all.

    All seeds get the batches of seed 0, so that trials that differ only in seeds share compiled programs.
    """
    sample = -(-SAMPLED_STEPS // pool) * pool  # whole pools, whose batches have all lengths
    chain = TaskSource(rows, batch_size, 0, (), pool=pool).chain(0, sample)
    lengths = rows.lengths[chain].reshape(-1, pool * batch_size)
    if pool > 1:
        lengths = np.sort(lengths)
    longest = lengths.reshape(-1, batch_size).max(axis=1)
    # Another seed may put the longest row into a batch, so a length must hold it.
    return np.array([*longest, rows.lengths.max()], np.int64)


def fingerprint(rows: TaskRows) -> str:
    """Hashes the rows and their encoding."""
    digest = hashlib.sha256()
    for _, array in sorted(rows.arrays().items()):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
