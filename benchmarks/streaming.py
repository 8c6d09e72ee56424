"""Measures how well streaming in windows shuffles rows, compared with a full permutation.

    python -m benchmarks.streaming [--rows N] [--batch_size B] [--window_bytes 1e9,8e9,64e9]

Prints one JSON line. It has five measures for every memory of the windows (8e9 in training), which need only the
numbers of rows:

1. pairs of rows in a batch that share a document (20 consecutive rows), relative to the mean of random batches;
2. the variance of a batch's mean row number, and 3. of 100 consecutive batches', relative to random rows;
4. the share of rows in 100 consecutive batches that share a document with another row;
5. the Kolmogorov-Smirnov statistic of the distances by which rows move.

The line's value is the first measure.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from benchmarks import common
from bert_jax import command_line
from bert_jax.data import order
from bert_jax.data.order import WindowOrder, common_lanes, window_sizes

LENGTH = 128
ROW_BYTES = 2 * LENGTH + 13  # of a row of one sequence, with ids of 16 bits (docs/data_format.md)
DOCUMENT_ROWS = 20  # 2,500 tokens
BATCHES_TOGETHER, GROUPS = 100, 200


Order = Callable[[np.ndarray], np.ndarray]


class Quality(NamedTuple):
    """How an order differs from a random one, where the values are 1, 1, 1, almost 0 and 0."""

    document_pairs: float
    batch_variance: float
    variance_of_100: float
    document_again: float
    moved: float


def quality(order: Order, rows: int, batch_size: int) -> Quality:
    """Statistics of an epoch, from GROUPS of BATCHES_TOGETHER batches at random steps.

    order   the rows of the data set that are read with these numbers, from 0 to rows - 1
    """
    together = BATCHES_TOGETHER * batch_size
    starts = np.random.default_rng(0).integers(0, rows // batch_size - BATCHES_TOGETHER + 1, GROUPS) * batch_size
    numbers = starts[:, None] + np.arange(together)
    groups = np.stack([order(row) for row in numbers])
    batches = groups.reshape(-1, batch_size)
    pairs = batch_size * (batch_size - 1) / 2 * (DOCUMENT_ROWS - 1) / (rows - 1)  # the expectation for random rows
    variance = rows**2 / 12  # of a random row's number
    # Two independent uniform numbers differ by at most d with probability 1 - (1 - d)^2.
    moved = stats.kstest((np.abs(groups - numbers) / rows).reshape(-1), lambda d: 1 - (1 - d) ** 2).statistic
    return Quality(
        float(_document_pairs(batches).mean() / pairs),
        float(batches.mean(axis=1).var() / (variance / batch_size)),
        float(groups.mean(axis=1).var() / (variance / together)),
        float(np.mean([_share_with_neighbors(group // DOCUMENT_ROWS) for group in groups])),
        float(moved),
    )


def _document_pairs(batches: np.ndarray) -> np.ndarray:
    """Counts the pairs of rows that share a document, for every batch in [N, B]."""
    documents = np.sort(batches // DOCUMENT_ROWS, axis=1)
    pairs = np.zeros(len(batches), np.int64)
    for apart in range(1, min(DOCUMENT_ROWS, documents.shape[1])):
        pairs += (documents[:, apart:] == documents[:, :-apart]).sum(axis=1)
    return pairs


def _share_with_neighbors(documents: np.ndarray) -> float:
    """Returns the share of rows that share their document with another row."""
    _, counts = np.unique(documents, return_counts=True)
    return float(counts[counts > 1].sum() / documents.size)


def streamed_order(rows: int, batch_size: int, window_bytes: float) -> Order:
    """The order in which rows are streamed."""
    sizes = window_sizes(rows, common_lanes([batch_size]), ROW_BYTES, window_bytes, "the data set")
    return WindowOrder(rows, sizes, 0, "benchmark").row_numbers


def permuted_order(rows: int) -> Order:
    """A full permutation."""
    return lambda numbers: order.permute(numbers, rows, 1)


def measure(rows: int, batch_size: int, memories: Sequence[float]) -> dict[str, Any]:
    """Prints the JSON line and returns it."""
    full = quality(permuted_order(rows), rows, batch_size)
    found = {memory: quality(streamed_order(rows, batch_size, memory), rows, batch_size) for memory in memories}
    settings: dict[str, Any] = {
        "rows": rows,
        "row_bytes": ROW_BYTES,
        "batch_size": batch_size,
        "batches": GROUPS * BATCHES_TOGETHER,
        "full_permutation": _rounded(full),
        **{f"window_bytes={memory:g}": _rounded(each) for memory, each in found.items()},
    }
    return common.emit(
        "streaming_shuffle",
        found[memories[0]].document_pairs,
        f"pairs of rows of a document in a batch, relative to random rows (window_bytes={memories[0]:g})",
        "full permutation",
        full.document_pairs,
        settings,
        lower_is_better=True,
    )


def _rounded(found: Quality) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in found._asdict().items()}


def main(arguments: Sequence[str]) -> None:
    parser = command_line.Parser("benchmarks.streaming", __doc__)
    parser.add_argument("--rows", type=int, default=10**9, help="of the data set (default: 10^9)")
    parser.add_argument("--batch_size", type=int, default=256, help="rows of a batch (default: 256)")
    parser.add_argument("--window_bytes", default="1e9,8e9,64e9", help="memory of the windows (default: 1e9,8e9,64e9)")
    options = parser.parse_args(arguments)
    measure(options.rows, options.batch_size, [float(size) for size in options.window_bytes.split(",")])


if __name__ == "__main__":
    command_line.run(main)
