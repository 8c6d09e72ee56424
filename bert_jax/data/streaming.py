"""Trains on shards that fit neither into memory nor on a local disk: reads windows of rows from a store.

data/order.py orders the rows, and `WindowCache` holds windows of rows and loads the next ones in threads.
`open_streamed` opens a data set, and `window_caches` divides data.cache_bytes among several.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.data import order
from bert_jax.data.example import Rows
from bert_jax.data.manifest import Part, read_manifest
from bert_jax.data.mixture import Mixture
from bert_jax.data.order import WINDOWS_HELD, Window, WindowOrder, WindowSizes, window_sizes
from bert_jax.data.shards import Dataset, check_trainable, local_copy, open_output
from bert_jax.errors import UserError
from bert_jax.storage.remote import is_remote

_THREADS = 64  # more than cores, because they only wait for the store


def window_order(dataset: Dataset, lanes: int, seed: int, share: float = 1.0) -> WindowOrder:
    """Returns the order of a data set's rows in training, with windows that take a share of the memory for windows.

    Raises:
        UserError: There are fewer rows than lanes.
    """
    window_bytes = share * order.WINDOW_BYTES
    sizes = window_sizes(dataset.rows, lanes, dataset.layout.row_bytes, window_bytes, dataset.address)
    return WindowOrder(dataset.rows, sizes, seed, dataset.fingerprint)


def slice_rows(rows: Rows, begin: int, end: int) -> Rows:
    """Returns views of consecutive rows."""
    return Rows(**{name: column[begin:end] for name, column in rows._asdict().items() if column is not None})


class _Loading(NamedTuple):
    """A window whose rows are loading or loaded."""

    window: Window
    rows: Rows
    pieces: list[Future[Rows]]

    def cancel(self) -> None:
        for piece in self.pieces:
            piece.cancel()


class WindowCache:
    """Reads rows by their numbers in the concatenated epochs. Only one thread at a time may call a method.

    Every lane has at most two windows in memory: batches are read from one while threads load the next. If numbers do
    not ascend within their lane, windows are loaded more than once, but the rows are the same.
    """

    def __init__(self, window_order: WindowOrder, dataset: Dataset, share: float = 1.0) -> None:
        self._order, self._dataset, self._share = window_order, dataset, share
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="windows")
        # By number % lanes. WindowOrder counts lanes from the first row of every epoch. So a lane has another key in
        # every epoch, but a process still reads the same numbers.
        self._held: dict[int, list[_Loading]] = {}
        self.peak_bytes = 0  # the largest value of held_bytes so far

    def read(self, numbers: Int64[np.ndarray, "R"], ahead: bool = True) -> Rows:
        """Returns the rows with these numbers.

        Args:
            ahead: Whether to load windows. False reads every row by itself.

        Raises:
            UserError: A shard cannot be read, or the windows exceed the memory for them.
        """
        if not ahead:
            return self._dataset.gather(self._dataset.rows_in_blocks(self._order.row_numbers(numbers)))
        out = self._dataset.layout.allocate(numbers.size)
        windows, places = self._order.locate(numbers)
        # A window's `first` ascends within its lane, so unique() also puts the windows in their order of use.
        firsts, inverse = np.unique(windows, return_inverse=True)
        lanes, lane_starts = np.unique(firsts % self._order.sizes.lanes, return_index=True)
        self._check_memory(len(lanes))
        # Threads work in the order of requests: first the windows to read now, then the next window of every lane.
        for index in lane_starts.tolist():
            self._advance(int(firsts[index]))
        for lane in lanes.tolist():
            self._look_ahead(lane)
        ends = np.cumsum(np.bincount(inverse, minlength=len(firsts)))
        groups = np.split(np.argsort(inverse, kind="stable"), ends[:-1])  # rows of the result, by window
        for first, into in zip(firsts.tolist(), groups, strict=True):
            # Advancing frees the lane's earlier windows. Windows come in ascending order, so their rows are copied
            # already.
            loading = self._advance(first)
            self._look_ahead(first % self._order.sizes.lanes)
            for piece in loading.pieces:
                piece.result()  # waits until it is loaded, and raises its error
            for column, loaded in zip(out, loading.rows, strict=True):
                if column is not None and loaded is not None:
                    column[into] = loaded[places[into]]
        return out

    @property
    def sizes(self) -> WindowSizes:
        """How an epoch is divided."""
        return self._order.sizes

    @property
    def held_bytes(self) -> int:
        """The memory held by all windows, loading ones included."""
        windows = (loading.window for held in self._held.values() for loading in held)
        return self._dataset.layout.row_bytes * sum(window.rows for window in windows)

    def release(self) -> None:
        """Frees all windows. A later `read` loads them again."""
        for held in self._held.values():
            while held:
                held.pop(0).cancel()

    def close(self) -> None:
        """Ends the threads. Each first finishes the request that it waits for."""
        self.release()
        # Interrupting retries first keeps shutdown(), which waits for running reads, from waiting half a minute.
        self._dataset.close()
        self._threads.shutdown(cancel_futures=True)

    def _check_memory(self, lanes: int) -> None:
        """Raises UserError if the longest windows of so many lanes exceed this data set's share of cache_bytes."""
        longest = WINDOWS_HELD * self._order.sizes.window_rows * self._dataset.layout.row_bytes
        if lanes * longest > self._dataset.cache_bytes * self._share:
            raise UserError(
                f"data.cache_bytes={self._dataset.cache_bytes:g} is too small for the windows of "
                f"{self._dataset.address} that this process reads. Use at least --config.data.cache_bytes="
                f"{math.ceil(lanes * longest / self._share)}, or more processes, which share the windows"
            )

    def _advance(self, first: int) -> _Loading:
        """Returns the window that begins with this number, and frees earlier windows of its lane."""
        lane = first % self._order.sizes.lanes
        held = self._held.setdefault(lane, [])
        # A window that lies behind the held ones is not among them: all of them are dropped, and it is loaded again.
        while held and held[0].window.first != first:
            held.pop(0).cancel()
        if not held:
            self._load(lane, first)
        return held[0]

    def _look_ahead(self, lane: int) -> None:
        held = self._held[lane]
        if len(held) == 1:
            self._load(lane, held[0].window.next)

    def _load(self, lane: int, number: int) -> None:
        """Begins to load the window that holds the row with this number."""
        window = self._order.window(number)
        rows = self._dataset.layout.allocate(window.rows)
        futures, place = [], 0
        for begin, count in zip(window.begins.tolist(), window.counts.tolist(), strict=True):
            # Every piece fills its own rows of the window, so threads need no lock.
            into = slice_rows(rows, place, place + count)
            indices = self._dataset.rows_in_blocks(np.arange(begin, begin + count))
            futures.append(self._threads.submit(self._dataset.gather, indices, into))
            place += count
        self._held[lane].append(_Loading(window, rows, futures))
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


def window_caches(mixtures: Sequence[Mixture], lanes: int, seed: int) -> dict[str, WindowCache]:
    """Returns caches for the streamed data sets of all phases, by fingerprint.

    Raises:
        UserError: As `window_order` does.
    """
    # A data set has one order for all phases, so that a later phase can continue it. Its windows therefore have to fit
    # into its smallest share of the memory.
    shares: dict[str, float] = {}
    datasets: dict[str, Dataset] = {}
    for mixture in mixtures:
        for source, share in zip(mixture.sources, mixture.shares.fractions, strict=True):
            dataset = source.dataset
            if dataset.cache_bytes:
                datasets.setdefault(dataset.fingerprint, dataset)
                shares[dataset.fingerprint] = min(share, shares.get(dataset.fingerprint, 1.0))
    # All orders are made before any cache, so that no threads run if an order is refused.
    orders = {name: window_order(dataset, lanes, seed, shares[name]) for name, dataset in datasets.items()}
    return {name: WindowCache(each, datasets[name], shares[name]) for name, each in orders.items()}


def open_streamed(
    address: str, cache_bytes: float, cache_dir: str, held_out: bool, log: Callable[[str], object]
) -> Dataset:
    """Opens the training part, or the part at the end of the address, to stream it.

    Args:
        address: An output of build_examples, or its train/ or eval/ folder: a local path, gs://, s3:// or hf://.
        cache_dir: A local folder for copies of the tokenizer and, if `held_out` is true, the held-out rows.
        log: Gets a line if anything is copied.

    Raises:
        UserError: The address cannot be read or holds no finished output with Arrow shards, or it is in a store and
            there is no cache_dir.
    """
    output, chosen = open_output(address)
    directory = output.address
    if cache_dir:
        directory = local_copy(output.address, cache_dir, ("eval",) if held_out else (), log)
    elif is_remote(address):
        raise UserError(
            f"{address} is in an object store. Its training rows are streamed, but its tokenizer and its held-out rows "
            "are read from a local disk: set --config.data.cache_dir=DIR to a folder for copies of them"
        )
    manifest = read_manifest(Path(directory))
    part: Part = chosen or "train"
    dataset = Dataset(Path(directory).absolute(), part, manifest, address=output.address, cache_bytes=cache_bytes)
    check_trainable(dataset)
    return dataset
