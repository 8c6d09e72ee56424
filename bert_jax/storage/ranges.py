"""Ranges of bytes of files on disk and in object stores, read by many threads, and again after a failed request."""

import functools
import threading
from typing import Any

import pyarrow as pa

from bert_jax.command import UserError
from bert_jax.storage.remote import failure, open_folder

# Opening an object takes a request, so the files that are read most often stay open.
_OPEN_FILES = 256
# Between the attempts at one range, half a minute together, in which a busy store or a lost connection may recover.
RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


class RangeFiles:
    """The files of a local folder, or of an address in a store, of which ranges are read. Threads may share it.

    `close` interrupts threads that wait between two attempts.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._store, self._folder = open_folder(address)
        self._open = functools.lru_cache(_OPEN_FILES)(self._open_path)
        self._closed = threading.Event()

    def read(self, name: str, offset: int, length: int) -> memoryview:
        """The bytes [offset, offset + length) of a file.

        A request that fails is repeated for half a minute. Raises UserError for a file that does not exist, or ends
        earlier, and the errors of `failure` after the last failed request.
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

    def _open_path(self, path: str) -> Any:
        """Opens a file and returns its function (offset, length) -> bytes, which several threads may call at once."""
        files = _fsspec_files(self._store)
        if files is not None:
            return functools.partial(_read_fsspec, files, path)
        opened = self._store.open_input_file(path)
        return lambda offset, length: opened.read_at(length, offset)


def _fsspec_files(store: Any) -> Any:
    """The file system of fsspec behind a store of pyarrow, such as that of the Hub; None for pyarrow's own."""
    from pyarrow import fs

    handler = store.handler if isinstance(store, fs.PyFileSystem) else None
    return handler.fs if isinstance(handler, fs.FSSpecHandler) else None


def _read_fsspec(files: Any, path: str, offset: int, length: int) -> bytes:
    """One request for exactly this range. A file that stays open has one position, and reads ahead of it."""
    try:
        with files.open(path, "rb", cache_type="none") as file:
            file.seek(offset)
            content: bytes = file.read(length)
            return content
    except OSError:
        raise
    except Exception as error:  # clients of stores have many types of errors
        raise OSError(str(error).strip() or type(error).__name__) from error
