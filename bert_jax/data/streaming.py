"""Trains on shards that fit neither into memory nor on a local disk: reads windows of rows from a store.

data/order.py orders the rows. `RangeFiles` reads ranges of bytes, `StreamedDataset` reads ranges of rows, and
`WindowCache` holds windows of rows and loads the next ones in threads. `open_streamed` opens such a data set, and
`window_caches` divides data.cache_bytes among several.
"""

import functools
import math
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from bert_jax.array_types import Int64
from bert_jax.data.example import Rows
from bert_jax.data.manifest import AGAIN, Part, read_manifest
from bert_jax.data.mixture import Mixture
from bert_jax.data.order import Window, WindowOrder, window_sizes
from bert_jax.data.shards import (
    Corrupt,
    Dataset,
    check_trainable,
    layout_problem,
    local_copy,
    open_output,
    read_shard,
    size_problem,
    stored_columns,
    value_problem,
)
from bert_jax.errors import UserError
from bert_jax.storage.remote import failure, is_remote, open_folder

# Opening an object takes a request, so recently read files stay open.
_OPEN_FILES = 256
# Pauses between the attempts to read a range. In half a minute, a busy store or a lost connection may recover.
RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


class RangeFiles:
    """Reads ranges of bytes from the files in a folder, local or in a store. Threads may share it.

    Failing requests are repeated for half a minute.

    Args:
        sizes: The sizes of files, which are compared when a file is first opened.
    """

    def __init__(self, address: str, sizes: Mapping[str, int] = MappingProxyType({})) -> None:
        self.address, self._sizes = address.rstrip("/"), sizes
        self._store, self._folder = open_folder(address)
        self._open = functools.lru_cache(_OPEN_FILES)(self._open_path)
        self._closed = threading.Event()

    def read(self, name: str, offset: int, length: int) -> memoryview:
        """Reads the bytes [offset, offset + length).

        Raises:
            UserError: The file is missing, ends earlier or has another size than stated. If the store fails, as
                storage.remote.failure says.
        """
        address = f"{self.address}/{name}"
        for seconds in (*RETRY_SECONDS, None):
            try:
                content = memoryview(self._open(name)(offset, length))
            except (OSError, pa.ArrowException) as error:
                # A missing file stays missing, so it is not retried. wait() returns True as soon as close() is called,
                # which ends the pauses of all threads.
                missing = isinstance(error, FileNotFoundError)
                if missing or seconds is None or self._closed.wait(seconds):
                    raise failure(address, error) from None
            else:
                # A short answer is no failed request: the file is shorter than its manifest entry, and another attempt
                # cannot help.
                if len(content) != length:
                    raise UserError(f"damaged {address}: it ends before byte {offset + length}; copy it again")
                return content
        raise AssertionError("the last attempt returns or raises")

    def close(self) -> None:
        """Interrupts threads that wait for their next attempt. Files close when no thread reads them any more."""
        self._closed.set()
        self._open.cache_clear()

    def _open_path(self, name: str) -> Callable[[int, int], Any]:
        """Opens a file and returns a function (offset, length) -> bytes, which threads may call at the same time."""
        from pyarrow import fs

        path = f"{self._folder}/{name}"
        handler = self._store.handler if isinstance(self._store, fs.PyFileSystem) else None
        if not isinstance(handler, fs.FSSpecHandler):
            stated = self._sizes.get(name)
            try:
                opened = self._store.open_input_file(path)
                problem = stated is not None and size_problem(f"{self.address}/{name}", opened.size(), stated)
            except FileNotFoundError:
                if stated is None:
                    raise
                problem = size_problem(f"{self.address}/{name}", None, stated)
            if problem:
                raise UserError(problem)
            return lambda offset, length: opened.read_at(length, offset)

        # pyarrow wraps an fsspec store here, such as the Hub's. An open fsspec file reads ahead, and has one position,
        # which threads would share. So every range opens the file again, without a cache, and costs one request.
        def read(offset: int, length: int) -> Any:
            try:
                with handler.fs.open(path, "rb", cache_type="none") as file:
                    file.seek(offset)
                    return file.read(length)
            except OSError:
                raise
            except Exception as error:  # every client of a store has error types of its own
                raise OSError(str(error).strip() or type(error).__name__) from error

        return read


_ALIGNMENT = 8  # columns begin at multiples of so many bytes
_END_BYTES = 4096  # read from both ends of a file for its metadata, which takes 1.1 KB and 0.7 KB


class Piece(NamedTuple):
    """Consecutive rows of one shard."""

    shard: int
    first: int  # from the beginning of the shard
    rows: int


class _Column(NamedTuple):
    shape: tuple[int, ...]  # of one row's values
    kind: np.dtype[Any]
    width: int  # bytes per row


class StreamedDataset(Dataset):
    """A part of an output whose rows are read by ranges, wherever they are. Threads may share it.

    Hashes are not checked, because a range is not enough to compute the file's hash. `open_streamed` creates it.

    Args:
        directory: A local folder that holds everything except these rows.
        address: The build_examples output with these rows, local or in a store.
        cache_bytes: Memory for windows, over all data sets of a mixture and all processes.

    Raises:
        UserError: The table of shards is missing or damaged.
    """

    def __init__(
        self, directory: Path, part: Part, manifest: Mapping[str, Any], address: str, cache_bytes: float
    ) -> None:
        super().__init__(directory, part, manifest)
        self.address, self.cache_bytes = address, cache_bytes
        self._stored = {
            name: _Column(shape, np.dtype(kind), math.prod(shape) * np.dtype(kind).itemsize)
            for name, (shape, kind) in stored_columns(manifest).items()
        }
        # A row has as many bytes in memory as in the file, because columns have a fixed width.
        self.row_bytes = sum(column.width for column in self._stored.values())
        self._files = RangeFiles(
            address, dict(zip(self.shards.names.tolist(), self.shards.bytes.tolist(), strict=True))
        )
        # Two threads may read the same framing at once. Both get the same numbers.
        self._framing = functools.cache(self._read_framing)

    def order(self, lanes: int, seed: int, share: float = 1.0) -> WindowOrder:
        """Returns the order of rows in training, with windows that take a share of cache_bytes.

        Raises:
            UserError: There are fewer rows than lanes, or windows are too small.
        """
        sizes = window_sizes(self.rows, lanes, self.row_bytes, self.cache_bytes, self.address, share)
        return WindowOrder(self.rows, sizes, seed, self.fingerprint)

    def allocate(self, rows: int) -> Rows:
        """Allocates arrays for so many rows."""
        return Rows(**{name: np.empty((rows, *column.shape), column.kind) for name, column in self._stored.items()})

    def pieces(self, begin: int, rows: int) -> Iterator[Piece]:
        """Splits consecutive rows at the ends of shards."""
        shard = int(np.searchsorted(self._ends, begin, side="right"))
        while rows:
            left = int(self._ends[shard]) - begin
            taken = min(left, rows)
            if taken:  # a shard may be empty
                yield Piece(shard, int(self.shards.rows[shard]) - left, taken)
            begin, rows, shard = begin + taken, rows - taken, shard + 1

    def read(self, piece: Piece, into: Rows) -> None:
        """Reads a piece into arrays of as many rows. Raises UserError for a shard that cannot be read or is damaged."""
        # Rows have a fixed width, so their places follow from the shard's number of rows and from the bytes around its
        # columns. Shards by one version have the same bytes there. So these are read from shard 0, and from another
        # shard only if its total size shows that they differ.
        name, size = str(self.shards.names[piece.shard]), int(self.shards.bytes[piece.shard])
        before, framing_bytes = self._framing(0)
        shard_rows = int(self.shards.rows[piece.shard])
        places, end = self._places(shard_rows, before)
        if end - before + framing_bytes != size:
            places, _ = self._places(shard_rows, self._framing(piece.shard)[0])
        for column, (shape, kind, width) in self._stored.items():
            content = self._files.read(name, places[column] + piece.first * width, piece.rows * width)
            getattr(into, column)[:] = np.frombuffer(content, kind).reshape(piece.rows, *shape)
        if problem := value_problem(into, self.manifest):
            raise self._damage(name, problem)

    def gather(self, indices: Int64[np.ndarray, "R"]) -> Rows:
        """Copies rows, with a request per row and column. Raises UserError for a shard that cannot be read."""
        rows = self.allocate(len(indices))
        for place, index in enumerate(indices.tolist()):
            for piece in self.pieces(index, 1):
                self.read(piece, slice_rows(rows, place, place + 1))
        return rows

    def shard_rows(self, shard: int) -> Rows:
        """Returns a shard's rows. Raises UserError if it cannot be read."""
        rows = self.allocate(int(self.shards.rows[shard]))
        self.read(Piece(shard, 0, len(rows.input_ids)), rows)
        return rows

    def close(self) -> None:
        """Interrupts threads that wait for their next attempt to read a range."""
        self._files.close()

    def _places(self, rows: int, before: int) -> tuple[dict[str, int], int]:
        """Returns the offsets of the columns in a file, given the first one's, and the offset after the last column."""
        places = {}
        for name, column in self._stored.items():
            places[name] = before
            before += -(-rows * column.width // _ALIGNMENT) * _ALIGNMENT
        return places, before

    def _read_framing(self, shard: int) -> tuple[int, int]:
        """Counts a shard's bytes before its columns, and all its bytes outside of columns."""
        # Only the two ends of the file are read. Arrow then parses a file of the full size in memory, whose rows are
        # zeros. The kernel does not allocate pages that are never written, so they take no memory.
        name = str(self.shards.names[shard])
        size, rows = int(self.shards.bytes[shard]), int(self.shards.rows[shard])
        end = min(_END_BYTES, size)
        memory = mmap.mmap(-1, size)
        memory[:end] = self._files.read(name, 0, end)
        memory[size - end :] = self._files.read(name, size - end, end)
        buffer = pa.py_buffer(memory)
        try:
            parsed = read_shard(pa.BufferReader(buffer))
            problem = layout_problem(parsed, rows, self.manifest)
        except Corrupt as error:
            problem = str(error)
        if problem:
            raise self._damage(name, problem)
        places = {
            column: getattr(parsed, column).__array_interface__["data"][0] - buffer.address for column in self._stored
        }
        before = min(places.values())
        expected, columns_end = self._places(rows, before)
        if places != expected:
            raise UserError(
                f"the columns of {self.address}/{name} are not in the order of docs/data_format.md, so its rows cannot "
                "be read by ranges; leave out data.cache_bytes"
            )
        return before, size - (columns_end - before)

    def _damage(self, name: str, problem: str) -> UserError:
        return UserError(f"damaged shard {self.address}/{name}: {problem}. {AGAIN}")


def slice_rows(rows: Rows, begin: int, end: int) -> Rows:
    """Returns views of consecutive rows."""
    return Rows(**{name: column[begin:end] for name, column in rows._asdict().items() if column is not None})


_THREADS = 64  # more than cores, because they only wait for the store


class _Loading(NamedTuple):
    """A window whose rows are loading or loaded."""

    window: Window
    rows: Rows
    pieces: list[Future[None]]

    def cancel(self) -> None:
        for piece in self.pieces:
            piece.cancel()


class WindowCache:
    """Reads rows by their numbers in the concatenated epochs. Only one thread at a time may call a method.

    Every lane has at most two windows in memory: batches are read from one while threads load the next. If numbers do
    not ascend within their lane, windows are loaded more than once, but the rows are the same.
    """

    def __init__(self, order: WindowOrder, dataset: StreamedDataset) -> None:
        self._order, self._dataset = order, dataset
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
            UserError: A shard cannot be read.
        """
        if not ahead:
            return self._dataset.gather(self._order.row_numbers(numbers))
        out = self._dataset.allocate(numbers.size)
        windows, places = self._order.locate(numbers)
        # A window's `first` ascends within its lane, so unique() also puts the windows in their order of use.
        firsts, inverse = np.unique(windows, return_inverse=True)
        lanes, lane_starts = np.unique(firsts % self._order.sizes.lanes, return_index=True)
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
    def held_bytes(self) -> int:
        """The memory held by all windows, loading ones included."""
        windows = (loading.window for held in self._held.values() for loading in held)
        return self._dataset.row_bytes * sum(window.rows for window in windows)

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
        rows = self._dataset.allocate(window.rows)
        futures, place = [], 0
        for begin, count in zip(window.begins.tolist(), window.counts.tolist(), strict=True):
            for piece in self._dataset.pieces(begin, count):
                # Every piece fills its own rows of the window, so threads need no lock.
                into = slice_rows(rows, place, place + piece.rows)
                futures.append(self._threads.submit(self._dataset.read, piece, into))
                place += piece.rows
        self._held[lane].append(_Loading(window, rows, futures))
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


def window_caches(mixtures: Sequence[Mixture], lanes: int, seed: int) -> dict[str, WindowCache]:
    """Returns caches for the streamed data sets of all phases, by fingerprint.

    Raises:
        UserError: As `StreamedDataset.order` does.
    """
    # A data set has one order for all phases, so that a later phase can continue it. Its windows therefore have to fit
    # into its smallest share of the memory.
    shares: dict[str, float] = {}
    datasets: dict[str, StreamedDataset] = {}
    for mixture in mixtures:
        for source, share in zip(mixture.sources, mixture.shares.fractions, strict=True):
            dataset = source.dataset
            if isinstance(dataset, StreamedDataset):
                datasets.setdefault(dataset.fingerprint, dataset)
                shares[dataset.fingerprint] = min(share, shares.get(dataset.fingerprint, 1.0))
    # All orders are made before any cache, so that no threads run if an order is refused.
    orders = {name: dataset.order(lanes, seed, shares[name]) for name, dataset in datasets.items()}
    return {name: WindowCache(order, datasets[name]) for name, order in orders.items()}


def open_streamed(
    address: str, cache_bytes: float, cache_dir: str, held_out: bool, log: Callable[[str], object]
) -> StreamedDataset:
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
    dataset = StreamedDataset(Path(directory).absolute(), chosen or "train", manifest, output.address, cache_bytes)
    check_trainable(dataset)
    return dataset
