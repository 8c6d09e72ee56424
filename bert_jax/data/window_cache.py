"""Keeps the windows of a WindowOrder in memory that are being read, and loads the next ones in threads.

Of every lane there are at most two windows: the one that batches are read from, and the one after it.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.data.example import Rows
from bert_jax.data.shard_ranges import ShardRanges, slice_rows
from bert_jax.data.window_order import Window, WindowOrder

# Requests wait for the store and take hardly any time of a core.
_THREADS = 64


class _Loading(NamedTuple):
    """A window whose rows are being read, or have been."""

    window: Window
    rows: Rows
    pieces: list[Future[None]]

    def wait(self) -> Rows:
        """The rows, once all of them are read. Raises what reading them raised."""
        for piece in self.pieces:
            piece.result()
        return self.rows


class WindowCache:
    """Reads rows by their numbers in the concatenated epochs, best in ascending order within each lane.

    Any other order gives the same rows, but loads windows more than once. One thread at a time may call a method.
    """

    def __init__(self, order: WindowOrder, ranges: ShardRanges) -> None:
        self._order, self._ranges = order, ranges
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="windows")
        # By the number of a row modulo the number of lanes. This changes its lane from epoch to epoch, in which lanes
        # are counted from the first row, but not the process that reads it.
        self._held: dict[int, list[_Loading]] = {}
        self.peak_bytes = 0  # the most that windows have taken at one time

    def read(self, numbers: Int64[np.ndarray, "R"], ahead: bool = True) -> Rows:
        """The rows with these numbers, from their windows, or if `ahead` is false each by itself.

        Raises UserError for a shard that cannot be read.
        """
        if not ahead:
            return self._ranges.gather(self._order.row_numbers(numbers))
        out = self._ranges.allocate(numbers.size)
        where = self._order.locate(numbers)
        firsts, which = np.unique(where.window, return_inverse=True)  # in the order of each lane
        lanes = firsts % self._order.sizes.lanes
        # All lanes load what is read now before any of them loads what is read later.
        for index in np.unique(lanes, return_index=True)[1].tolist():
            self._advance(int(firsts[index]))
        for index in np.unique(lanes, return_index=True)[1].tolist():
            self._look_ahead(int(lanes[index]))
        ends = np.cumsum(np.bincount(which, minlength=len(firsts)))
        places = np.split(np.argsort(which, kind="stable"), ends[:-1])
        for first, some in zip(firsts.tolist(), places, strict=True):
            self._copy(first, where.row[some], some, out)
        return out

    @property
    def held_bytes(self) -> int:
        """The memory of all windows."""
        return self._ranges.row_bytes * sum(each.window.rows for held in self._held.values() for each in held)

    def release(self) -> None:
        """Frees all windows. Those of the next rows are loaded again."""
        for held in self._held.values():
            while held:
                _drop_first(held)

    def close(self) -> None:
        """Ends the threads, after the requests that they are waiting for."""
        self.release()
        self._ranges.close()
        self._threads.shutdown(cancel_futures=True)

    def _copy(self, first: int, rows: Int64[np.ndarray, "K"], into: Int64[np.ndarray, "K"], out: Rows) -> None:
        """Copies rows of a window to these places of `out`."""
        loading = self._advance(first)
        self._look_ahead(first % self._order.sizes.lanes)
        for column, loaded in zip(out, loading.wait(), strict=True):
            if column is not None and loaded is not None:
                column[into] = loaded[rows]

    def _advance(self, first: int) -> _Loading:
        """The window of this first number, which its lane reads from now on. The windows before it are freed."""
        lane = first % self._order.sizes.lanes
        held = self._held.setdefault(lane, [])
        while held and held[0].window.first != first:
            _drop_first(held)
        if not held:
            self._load(lane, first)
        return held[0]

    def _look_ahead(self, lane: int) -> None:
        held = self._held[lane]
        if len(held) == 1:
            self._load(lane, held[0].window.next)

    def _load(self, lane: int, number: int) -> None:
        """Begins to load the window that holds the row of this number."""
        window = self._order.window(number)
        rows = self._ranges.allocate(window.rows)
        futures, place = [], 0
        for begin, count in zip(window.begins.tolist(), window.counts.tolist(), strict=True):
            for piece in self._ranges.pieces(begin, count):
                into = slice_rows(rows, place, place + piece.rows)
                futures.append(self._threads.submit(self._ranges.read, piece, into))
                place += piece.rows
        self._held[lane].append(_Loading(window, rows, futures))
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


def _drop_first(held: list[_Loading]) -> None:
    for piece in held.pop(0).pieces:
        piece.cancel()
