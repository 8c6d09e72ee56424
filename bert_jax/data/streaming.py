"""Trains on shards that fit neither memory nor a local disk: windows of rows are read where the shards are.

data/order.py orders the rows. `RangeFiles` reads ranges of bytes, `StreamedDataset` ranges of rows, and `WindowCache`
keeps windows of rows in memory and loads the next ones in threads. `open_streamed` opens such a data set,
and `window_caches` divides data.cache_bytes among several.
"""

import functools
import math
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
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
    check_sizes,
    check_trainable,
    layout_problem,
    local_copy,
    open_output,
    read_shard,
    stored_columns,
    value_problem,
)
from bert_jax.errors import UserError
from bert_jax.storage.remote import Folder, failure, is_remote, open_folder

# Opening an object takes a request, so the files that are read most often stay open.
_OPEN_FILES = 256
# Between the attempts at one range, half a minute together, in which a busy store or a lost connection may recover.
RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


class RangeFiles:
    """Reads ranges of the files in a local folder, or at an address in a store. Threads may share it.

    Failing requests are repeated for half a minute. `close` interrupts threads between two attempts.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._store, self._folder = open_folder(address)
        self._open = functools.lru_cache(_OPEN_FILES)(self._open_path)
        self._closed = threading.Event()

    def read(self, name: str, offset: int, length: int) -> memoryview:
        """Reads the bytes [offset, offset + length).

        Raises UserError for a file that does not exist or ends earlier, and errors of `failure` after the last attempt.
        """
        path, address = f"{self._folder}/{name}", f"{self.address}/{name}"
        for seconds in (*RETRY_SECONDS, None):
            try:
                content = memoryview(self._open(path)(offset, length))
            except (OSError, pa.ArrowException) as error:
                missing = isinstance(error, FileNotFoundError)
                if missing or seconds is None or self._closed.wait(seconds):
                    raise failure(address, error) from None
            else:
                if len(content) != length:
                    raise UserError(f"damaged {address}: it ends before byte {offset + length}; copy it again")
                return content
        raise AssertionError("the last attempt returns or raises")

    def close(self) -> None:
        """Ends waiting for further attempts, and closes the files once no thread reads them."""
        self._closed.set()
        self._open.cache_clear()

    def _open_path(self, path: str) -> Callable[[int, int], Any]:
        """Opens a file and returns its function (offset, length) -> bytes, which several threads may call at once."""
        from pyarrow import fs

        handler = self._store.handler if isinstance(self._store, fs.PyFileSystem) else None
        if not isinstance(handler, fs.FSSpecHandler):
            opened = self._store.open_input_file(path)
            return lambda offset, length: opened.read_at(length, offset)

        # Behind pyarrow's store is one of fsspec, such as the Hub's. A file that stays open has one position, and reads
        # ahead of it, so it is opened for each range, without a cache: one request for exactly this range.
        def read(offset: int, length: int) -> Any:
            try:
                with handler.fs.open(path, "rb", cache_type="none") as file:
                    file.seek(offset)
                    return file.read(length)
            except OSError:
                raise
            except Exception as error:  # clients of stores have many types of errors
                raise OSError(str(error).strip() or type(error).__name__) from error

        return read


_ALIGNMENT = 8  # of the columns in a file, in bytes
_END_BYTES = 4096  # of a file that hold its metadata, at its beginning and at its end: 1.1 and 0.7 KB


class Piece(NamedTuple):
    """Consecutive rows of one shard."""

    shard: int
    first: int  # row in the shard
    rows: int


class _Column(NamedTuple):
    """A column of the rows."""

    shape: tuple[int, ...]  # of one row's values
    kind: np.dtype[Any]
    width: int  # of a row, in bytes


class StreamedDataset(Dataset):
    """A part of an output whose rows are read by ranges, wherever they are. Threads may share it.

    Columns have rows of a fixed width and begin at multiples of 8 bytes (docs/data_format.md). So a row's place follows
    from the shard's number of rows and from the bytes around its columns, which are the same in all shards by the same
    version. They are read from the first shard, and from any other shard with an unexpected total size. Hashes are not
    checked, since a range does not show its file's hash.

    `open_streamed` creates it.

    Args:
      directory: a local folder that holds everything except these rows.
      address: the output of build_examples with these rows: a folder, or in a store.
      cache_bytes: the memory for windows, over all data sets of a mixture and all processes.

    Raises:
      UserError: for a missing shard, or another size than in the manifest.
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
        self.row_bytes = sum(column.width for column in self._stored.values())
        check_sizes(address, self.shards, Folder(address).sizes(part))
        self._files = RangeFiles(address)
        self._framing = functools.cache(self._read_framing)

    def order(self, lanes: int, seed: int, share: float = 1.0) -> WindowOrder:
        """The order of rows in training, with windows in a share of cache_bytes.

        Raises UserError for fewer rows than lanes, and for windows that are too small.
        """
        sizes = window_sizes(self.rows, lanes, self.row_bytes, self.cache_bytes, self.address, share)
        return WindowOrder(self.rows, sizes, seed, self.fingerprint)

    def allocate(self, rows: int) -> Rows:
        """Space for so many rows."""
        return Rows(**{name: np.empty((rows, *column.shape), column.kind) for name, column in self._stored.items()})

    def pieces(self, begin: int, rows: int) -> Iterator[Piece]:
        """Divides consecutive rows at the ends of shards."""
        shard = int(np.searchsorted(self._ends, begin, side="right"))
        while rows:
            left = int(self._ends[shard]) - begin
            taken = min(left, rows)
            if taken:  # a shard may be empty
                yield Piece(shard, self.shards[shard]["rows"] - left, taken)
            begin, rows, shard = begin + taken, rows - taken, shard + 1

    def read(self, piece: Piece, into: Rows) -> None:
        """Reads a piece into arrays of as many rows. Raises UserError for a shard that cannot be read or is damaged."""
        entry = self.shards[piece.shard]
        before, framing_bytes = self._framing(0)
        places, end = self._places(entry["rows"], before)
        if end - before + framing_bytes != entry["bytes"]:
            places, _ = self._places(entry["rows"], self._framing(piece.shard)[0])
        for column, (shape, kind, width) in self._stored.items():
            content = self._files.read(entry["name"], places[column] + piece.first * width, piece.rows * width)
            getattr(into, column)[:] = np.frombuffer(content, kind).reshape(piece.rows, *shape)
        if problem := value_problem(into, self.manifest):
            raise self._damage(entry["name"], problem)

    def gather(self, indices: Int64[np.ndarray, "R"]) -> Rows:
        """Copies the requested rows, each read by itself. Raises UserError for a shard that cannot be read."""
        rows = self.allocate(len(indices))
        for place, index in enumerate(indices.tolist()):
            for piece in self.pieces(index, 1):
                self.read(piece, slice_rows(rows, place, place + 1))
        return rows

    def shard_rows(self, shard: int) -> Rows:
        """All rows of one of `shards`. Raises UserError for a shard that cannot be read."""
        rows = self.allocate(self.shards[shard]["rows"])
        self.read(Piece(shard, 0, len(rows.input_ids)), rows)
        return rows

    def close(self) -> None:
        """Ends waiting for another attempt at a range."""
        self._files.close()

    def _places(self, rows: int, before: int) -> tuple[dict[str, int], int]:
        """Where columns begin in a file, if the first one begins at `before`, and where the last one ends."""
        places = {}
        for name, column in self._stored.items():
            places[name] = before
            before += -(-rows * column.width // _ALIGNMENT) * _ALIGNMENT
        return places, before

    def _read_framing(self, shard: int) -> tuple[int, int]:
        """Counts a shard's bytes before its columns, and all bytes but its columns, from both ends of its file.

        Arrow parses a file of the shard's size in memory. Its rows are zeros, which take no space.
        """
        entry = self.shards[shard]
        name, size, rows = entry["name"], entry["bytes"], entry["rows"]
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
    """Views of consecutive rows."""
    return Rows(**{name: column[begin:end] for name, column in rows._asdict().items() if column is not None})


# Requests wait for the store and take hardly any time of a core.
_THREADS = 64


class _Loading(NamedTuple):
    """A window whose rows are being read, or have been."""

    window: Window
    rows: Rows
    pieces: list[Future[None]]

    def cancel(self) -> None:
        for piece in self.pieces:
            piece.cancel()


class WindowCache:
    """Reads rows by their numbers in the concatenated epochs, best in ascending order within each lane.

    It holds at most two windows of every lane: one from which batches are read, and the next one, which threads load.
    Any other order gives the same rows, but loads windows more than once. One thread at a time may call a method.
    """

    def __init__(self, order: WindowOrder, dataset: StreamedDataset) -> None:
        self._order, self._dataset = order, dataset
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
            return self._dataset.gather(self._order.row_numbers(numbers))
        out = self._dataset.allocate(numbers.size)
        location = self._order.locate(numbers)
        firsts, inverse = np.unique(location.window, return_inverse=True)  # in the order of each lane
        lanes, lane_starts = np.unique(firsts % self._order.sizes.lanes, return_index=True)
        # All lanes load what is read now before any of them loads what is read later.
        for index in lane_starts.tolist():
            self._advance(int(firsts[index]))
        for lane in lanes.tolist():
            self._look_ahead(lane)
        ends = np.cumsum(np.bincount(inverse, minlength=len(firsts)))
        places = np.split(np.argsort(inverse, kind="stable"), ends[:-1])
        for first, into in zip(firsts.tolist(), places, strict=True):
            loading = self._advance(first)
            self._look_ahead(first % self._order.sizes.lanes)
            for piece in loading.pieces:
                piece.result()  # waits for its rows, and raises the error of reading them
            for column, loaded in zip(out, loading.rows, strict=True):
                if column is not None and loaded is not None:
                    column[into] = loaded[location.row[into]]
        return out

    @property
    def held_bytes(self) -> int:
        """The memory of all windows."""
        windows = (loading.window for held in self._held.values() for loading in held)
        return self._dataset.row_bytes * sum(window.rows for window in windows)

    def release(self) -> None:
        """Frees all windows. A later read loads them again."""
        for held in self._held.values():
            while held:
                held.pop(0).cancel()

    def close(self) -> None:
        """Ends the threads, after the requests that they are waiting for."""
        self.release()
        self._dataset.close()
        self._threads.shutdown(cancel_futures=True)

    def _advance(self, first: int) -> _Loading:
        """The window that begins with this number. Its lane reads from it now, and the windows before it are freed."""
        lane = first % self._order.sizes.lanes
        held = self._held.setdefault(lane, [])
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
                into = slice_rows(rows, place, place + piece.rows)
                futures.append(self._threads.submit(self._dataset.read, piece, into))
                place += piece.rows
        self._held[lane].append(_Loading(window, rows, futures))
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


def window_caches(mixtures: Sequence[Mixture], lanes: int, seed: int) -> dict[str, WindowCache]:
    """Caches for the streamed data sets of all phases' mixtures, by fingerprint.

    A data set has the same order in all phases, so that a later phase resumes it. Its windows therefore have its
    smallest share of the memory. Raises UserError as `StreamedDataset.order` does.
    """
    shares: dict[str, float] = {}
    datasets: dict[str, StreamedDataset] = {}
    for mixture in mixtures:
        for source, share in zip(mixture.sources, mixture.shares.fractions, strict=True):
            dataset = source.dataset
            if isinstance(dataset, StreamedDataset):
                datasets.setdefault(dataset.fingerprint, dataset)
                shares[dataset.fingerprint] = min(share, shares.get(dataset.fingerprint, 1.0))
    # All orders come first: if one of them is refused, no threads have been started.
    orders = {name: dataset.order(lanes, seed, shares[name]) for name, dataset in datasets.items()}
    return {name: WindowCache(order, datasets[name]) for name, order in orders.items()}


def open_streamed(
    address: str, cache_bytes: float, cache_dir: str, held_out: bool, log: Callable[[str], object]
) -> StreamedDataset:
    """Opens the training part to stream it, or the part at the end of the address.

    Args:
      address: the output of build_examples, or its train/ or eval/: a local folder, gs://, s3:// or hf://.
      cache_dir: a local folder for copies of the tokenizer and, if `held_out` is true, the held-out rows.
      log: gets a line if anything is copied.

    Raises:
      UserError: for an address that cannot be read or holds no finished output of Arrow shards, and for an address in a
        store without a cache_dir.
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
