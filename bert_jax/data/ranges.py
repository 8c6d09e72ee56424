"""Reads rows from shards by ranges of bytes, on a disk or in a store.

Nothing here knows Arrow: data/shard_file.py computes where rows are. `map_file` is for shards that fit into memory
together. `RangeFiles` reads all others, and keeps a bounded number of files open.
"""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import fs

from bert_jax.data.manifest import AGAIN
from bert_jax.errors import UserError
from bert_jax.storage.remote import failure, open_folder

# Opening an object takes a request, and opening a file as long as reading two ranges. Half of the files that Linux
# lets a process open by default.
OPEN_FILES = 512
# Pauses between the attempts to read a range. In half a minute, a busy store or a lost connection may recover.
RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)

Result = TypeVar("Result")


def size_problem(path: str, size: int | None, wanted: int) -> str | None:
    """Describes a shard that is missing (size None) or has another size than in the manifest, or returns None."""
    if size is None:
        return f"missing shard {path}. {AGAIN}"
    if size != wanted:
        return f"truncated or changed shard {path}: it has {size} bytes instead of {wanted}. {AGAIN}"
    return None


def map_file(path: str, size: int) -> memoryview:
    """Maps a shard of so many bytes into memory. No file stays open. Raises UserError as RangeFiles does."""
    try:
        actual = os.stat(path).st_size  # first, because an empty file cannot be mapped
        if problem := size_problem(path, actual, size):
            raise UserError(problem)
        with pa.memory_map(path) as file:
            return memoryview(file.read_buffer())
    except FileNotFoundError:
        raise UserError(size_problem(path, None, size)) from None
    except OSError as error:
        raise failure(path, error) from None


def overlapping_values(content: memoryview, widths: Sequence[int]) -> list[np.ndarray]:
    """Returns an array for each width: element i has so many bytes of the content, from byte i on."""
    return [np.ndarray((len(content) - width + 1,), f"V{width}", content, strides=(1,)) for width in widths]


class _LocalFile:
    """A file on a disk, from which the system reads only the pages that it is asked for."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size
        if hasattr(os, "posix_fadvise"):  # missing on macOS
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    # Closing when nothing refers to the file any more lets other threads finish reading it.
    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):  # missing if open() failed
            os.close(self._descriptor)

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, offset)

    def read_columns(self, targets: Sequence[memoryview], offsets: Sequence[int]) -> bool:
        # A disk reads whole pages, so nothing between the columns is read.
        for target, offset in zip(targets, offsets, strict=True):
            if os.preadv(self._descriptor, [target], offset) != len(target):
                return False
        return True


class _StoredFile:
    """A file in a store, which threads may read at the same time."""

    def __init__(self, store: fs.FileSystem, path: str) -> None:
        handler = store.handler if isinstance(store, fs.PyFileSystem) else None
        if not isinstance(handler, fs.FSSpecHandler):
            opened = store.open_input_file(path)
            self.size = opened.size()
            self.read: Callable[[int, int], Any] = lambda offset, length: opened.read_at(length, offset)
            return
        # pyarrow wraps an fsspec store here, such as the Hub's. An open fsspec file reads ahead, and has one position,
        # which threads would share. So every range opens the file again, without a cache, and costs one request.
        self.size = int(_numbered(lambda: handler.fs.info(path)["size"]))

        def read(offset: int, length: int) -> Any:
            with handler.fs.open(path, "rb", cache_type="none", size=self.size) as file:
                file.seek(offset)
                return file.read(length)

        self.read = lambda offset, length: _numbered(lambda: read(offset, length))

    def read_columns(self, targets: Sequence[memoryview], offsets: Sequence[int]) -> bool:
        # One request gets the columns and what is between them, unless that is more than half of it.
        begin, end = offsets[0], offsets[-1] + len(targets[-1])
        together = end - begin <= 2 * sum(map(len, targets))
        content = memoryview(self.read(begin, end - begin)) if together else memoryview(b"")
        for target, offset in zip(targets, offsets, strict=True):
            start = offset - begin
            part = content[start : start + len(target)] if together else self.read(offset, len(target))
            if len(part) != len(target):
                return False
            target[:] = part
        return True


def _numbered(read: Callable[[], Result]) -> Result:
    """Turns the errors of an fsspec store into OSError: every client of a store has error types of its own."""
    try:
        return read()
    except OSError:
        raise
    except Exception as error:
        raise OSError(str(error).strip() or type(error).__name__) from error


class RangeFiles:
    """Reads ranges of bytes from the files in a folder, local or in a store. Threads may share it.

    Failing requests are repeated for half a minute. All methods raise UserError for a file that is missing, has another
    size than `size`, or ends early. If the store fails, they raise as storage.remote.failure says.

    Args:
        address: The folder.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._store, self._folder = open_folder(address)
        self._open = functools.lru_cache(OPEN_FILES)(self._open_file)
        self._closed = threading.Event()

    def read(self, name: str, size: int, offset: int, length: int) -> memoryview:
        """Reads the bytes [offset, offset + length) of a file."""
        content = memoryview(self._attempt(name, size, lambda file: file.read(offset, length)))
        if len(content) != length:
            raise self._short(name, offset + length)
        return content

    def read_columns(self, name: str, size: int, targets: Sequence[memoryview], offsets: Sequence[int]) -> None:
        """Fills every target with the bytes from its offset on. Offsets ascend."""
        if not self._attempt(name, size, lambda file: file.read_columns(targets, offsets)):
            raise self._short(name, offsets[-1] + len(targets[-1]))

    def close(self) -> None:
        """Interrupts threads that wait for their next attempt. Files close when no thread reads them any more."""
        self._closed.set()
        self._open.cache_clear()

    def _attempt(self, name: str, size: int, read: Callable[[Any], Result]) -> Result:
        for seconds in (*RETRY_SECONDS, None):
            try:
                return read(self._open(name, size))
            except (OSError, pa.ArrowException) as error:
                # A missing file stays missing, so it is not retried. wait() returns True as soon as close() is called,
                # which ends the pauses of all threads.
                if isinstance(error, FileNotFoundError):
                    raise UserError(size_problem(f"{self.address}/{name}", None, size)) from None
                if seconds is None or self._closed.wait(seconds):
                    raise failure(f"{self.address}/{name}", error) from None
        raise AssertionError("the last attempt returns or raises")

    def _open_file(self, name: str, size: int) -> _LocalFile | _StoredFile:
        path = f"{self._folder}/{name}"
        local = isinstance(self._store, fs.LocalFileSystem)
        file = _LocalFile(path) if local else _StoredFile(self._store, path)
        if problem := size_problem(f"{self.address}/{name}", file.size, size):
            raise UserError(problem)
        return file

    def _short(self, name: str, end: int) -> UserError:
        return UserError(f"damaged {self.address}/{name}: it ends before byte {end}; copy it again")
