"""Rows streamed in shuffled windows: how well they are shuffled, and how long training waits for them.

    python -m benchmarks.streaming [--part shuffle|wait] [--rows N] [--batch_size B] [--cache_bytes 2e7,1e8,1e9]

Prints one JSON line for each part.

shuffle  compares the order of an epoch with a full permutation, by the rows' numbers alone, for each cache_bytes:
         pairs of rows of one document (20 consecutive rows) in a batch, relative to what random rows have on average;
         the variance of the mean row number of a batch, and of 100 consecutive batches, relative to random rows; the
         share of the rows of 100 consecutive batches that have a document in common with another one; and the largest
         difference of the distributions of how far rows move (the statistic of Kolmogorov and Smirnov). The value is
         the first of them.
wait     streams a data set, made for it, from an emulated store that answers after 50 ms and sends 100 MB/s. Batches
         are consumed at a fixed rate. The value is the share of the time after the first batch that is spent waiting.
"""

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from benchmarks import common
from benchmarks.emulated_store import EmulatedStore, as_pyarrow
from benchmarks.loader import SAMPLE, SAMPLE_VOCABULARY
from bert_jax import command
from bert_jax.config import PretrainDataConfig
from bert_jax.data import permutation
from bert_jax.data.batch_schedule import batch_schedule
from bert_jax.data.example import Rows
from bert_jax.data.opening import open_phases
from bert_jax.data.phases import PhasedLoader
from bert_jax.data.prefetch import Prefetched
from bert_jax.data.shards import open_dataset, write_shard
from bert_jax.data.window_order import WindowOrder, common_lanes, window_sizes
from bert_jax.storage import remote
from data_prep import build_examples, train_tokenizer
from data_prep.build_options import BuildOptions
from data_prep.train_tokenizer import TokenizerOptions

LENGTH = 128
ROW_BYTES = 2 * LENGTH + 13  # of a row of one sequence, with ids of 16 bits (docs/data_format.md)
DOCUMENT_ROWS = 20  # 2,500 tokens
BATCHES_TOGETHER, GROUPS = 100, 200
LATENCY, BYTES_PER_SECOND = 0.05, 100e6
STEP_SECONDS = 0.1  # 256 rows of 128 tokens: 0.33 million tokens a second
SHARD_ROWS = 16_000  # about 4 MB


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
    groups = np.stack([order(each) for each in numbers])
    batches = groups.reshape(-1, batch_size)
    pairs = batch_size * (batch_size - 1) / 2 * (DOCUMENT_ROWS - 1) / (rows - 1)  # that are expected
    variance = rows**2 / 12  # of the number of a random row
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
    """The number of pairs of rows of one document in each batch [N, B]."""
    documents = np.sort(batches // DOCUMENT_ROWS, axis=1)
    pairs = np.zeros(len(batches), np.int64)
    for apart in range(1, min(DOCUMENT_ROWS, documents.shape[1])):
        pairs += (documents[:, apart:] == documents[:, :-apart]).sum(axis=1)
    return pairs


def _share_with_neighbors(documents: np.ndarray) -> float:
    """The share of rows whose document another row has, too."""
    _, counts = np.unique(documents, return_counts=True)
    return float(counts[counts > 1].sum() / documents.size)


def streamed_order(rows: int, batch_size: int, cache_bytes: float) -> Order:
    """The order in which rows are streamed."""
    sizes = window_sizes(rows, common_lanes([batch_size]), ROW_BYTES, cache_bytes, "the data set")
    return WindowOrder(rows, sizes, 0, "benchmark").row_numbers


def permuted_order(rows: int) -> Order:
    """A full permutation."""
    return lambda numbers: permutation.permute(numbers, rows, 1)


def measure_shuffle(rows: int, batch_size: int, caches: Sequence[float]) -> dict[str, Any]:
    """Prints the JSON line of the part `shuffle` and returns it."""
    full = quality(permuted_order(rows), rows, batch_size)
    found = {cache: quality(streamed_order(rows, batch_size, cache), rows, batch_size) for cache in caches}
    settings: dict[str, Any] = {
        "rows": rows,
        "row_bytes": ROW_BYTES,
        "batch_size": batch_size,
        "batches": GROUPS * BATCHES_TOGETHER,
        "full_permutation": _rounded(full),
        **{f"cache_bytes={cache:g}": _rounded(each) for cache, each in found.items()},
    }
    return common.emit(
        "streaming_shuffle",
        found[caches[0]].document_pairs,
        f"pairs of rows of a document in a batch, relative to random rows (cache_bytes={caches[0]:g})",
        "full permutation",
        full.document_pairs,
        settings,
        lower_is_better=True,
    )


def _rounded(found: Quality) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in found._asdict().items()}


def measure_wait(
    rows: int, batch_size: int, cache_bytes: float, steps: int, step_seconds: float = STEP_SECONDS
) -> dict[str, Any]:
    """Prints the JSON line of the part `wait` and returns it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        work = Path(folder)
        total = _build(work / "store" / "rows", rows)
        store = EmulatedStore(work / "store", LATENCY, BYTES_PER_SECOND)
        stack.callback(setattr, remote, "open_store", remote.open_store)
        pretended = as_pyarrow(store)
        remote.open_store = lambda address: (pretended, address[5:].partition("/")[2])
        data = PretrainDataConfig(train="gs://emulated/rows", cache_bytes=cache_bytes, cache_dir=str(work / "cache"))
        phases = open_phases(data)
        vocabulary = phases[0].mixture.dataset.vocabulary()
        loader = PhasedLoader(phases, vocabulary, batches=batch_schedule("", batch_size), seed=0)
        stack.enter_context(contextlib.closing(loader))
        store.requests = store.bytes_read = 0
        began = time.perf_counter()
        batches = stack.enter_context(Prefetched(loader.batch, 0, data.prefetch))
        next(batches)
        first, waited, read = time.perf_counter() - began, batches.waited_seconds, store.bytes_read
        began = time.perf_counter()
        for _ in range(steps):
            time.sleep(step_seconds)
            next(batches)
        seconds = time.perf_counter() - began
        share = (batches.waited_seconds - waited) / seconds
        settings = {
            "latency_ms": LATENCY * 1e3,
            "link_mb_per_second": BYTES_PER_SECOND / 1e6,
            "data_mb": round(total / 1e6, 1),
            "cache_bytes": f"{cache_bytes:g}",
            "batch_size": batch_size,
            "steps": steps,
            "tokens_per_second": round(steps * batch_size * LENGTH / seconds),
            "first_batch_seconds": round(first, 2),
            "first_batch_mb": round(read / 1e6, 1),
            "mb_per_second": round((store.bytes_read - read) / seconds / 1e6, 2),
            "kb_per_request": round(store.bytes_read / max(store.requests, 1) / 1e3, 1),
        }
    return common.emit("streaming_wait", share, "share of the time", None, None, settings, lower_is_better=True)


def _build(directory: Path, rows: int) -> int:
    """Writes a data set of so many training rows, those of the sample repeated. Returns the bytes of its shards."""
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, sample = Path(folder) / "vocabulary", Path(folder) / "sample"
        options = TokenizerOptions(SAMPLE, vocabulary, vocab_size=SAMPLE_VOCABULARY, lowercase=True)
        train_tokenizer.train(options)
        build_examples.build(BuildOptions(SAMPLE, vocabulary, sample, LENGTH, mask_unit="word", workers=1))
        shutil.copytree(sample, directory)
        dataset = open_dataset(sample, "train")
        source = dataset.gather(np.arange(dataset.rows))
    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    manifest["shards"] = [shard for shard in manifest["shards"] if shard["name"].startswith("eval/")]
    total = 0
    for number, first in enumerate(range(0, rows, SHARD_ROWS)):
        name = f"train/shard-{number:05d}.arrow"
        some = np.arange(first, min(first + SHARD_ROWS, rows)) % dataset.rows
        columns = {column: values[some] for column, values in source._asdict().items() if values is not None}
        written = write_shard(directory / name, Rows(**columns))
        manifest["shards"].append({"name": name, **written._asdict()})
        total += written.bytes
    manifest["parts"]["train"]["rows"] = rows
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return total


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("python -m benchmarks.streaming", __doc__)
    parser.add_argument("--part", choices=("shuffle", "wait"), help="only this part (default: both)")
    parser.add_argument("--rows", type=int, default=0, help="of the data set (default: 10^9, and 10^6 in wait)")
    parser.add_argument("--batch_size", type=int, default=256, help="rows of a batch (default: 256)")
    parser.add_argument("--cache_bytes", default="", help="sizes of the cache (default: 1e9,8e9,64e9, and 8e7 in wait)")
    parser.add_argument("--steps", type=int, default=300, help="steps of the part wait (default: 300)")
    parser.add_argument("--step_seconds", type=float, default=STEP_SECONDS, help="of each of them (default: 0.1)")
    options = parser.parse_args(arguments)
    caches = [float(size) for size in options.cache_bytes.split(",") if size]
    if options.part != "wait":
        measure_shuffle(options.rows or 10**9, options.batch_size, caches or [1e9, 8e9, 64e9])
    if options.part != "shuffle":
        cache = caches[0] if caches else 8e7
        measure_wait(options.rows or 1_000_000, options.batch_size, cache, options.steps, options.step_seconds)


if __name__ == "__main__":
    command.run(main)
