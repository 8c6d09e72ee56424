"""A folder that answers like an object store: after a latency, over a link of limited speed, and it counts requests."""

import threading
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from pyarrow import fs


class EmulatedStore(AbstractFileSystem):
    """The files of a folder, for reading. All threads share one link.

    latency           seconds until a request is answered
    bytes_per_second  of the link; 0: unlimited
    """

    cachable = False

    def __init__(self, folder: Path, latency: float = 0.0, bytes_per_second: float = 0.0) -> None:
        super().__init__()
        self.latency, self.bytes_per_second = latency, bytes_per_second
        self.requests, self.bytes_read = 0, 0
        self.failures = 0  # requests to refuse from now on
        self._files = fsspec.filesystem("dir", path=str(folder), target_protocol="file")
        self._lock = threading.Lock()
        self._link_free = 0.0

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        return self._files.ls(path, detail)

    def info(self, path: str, **_: Any) -> Any:
        return self._files.info(path)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> "EmulatedFile":
        return EmulatedFile(self, path, mode, **{name: options[name] for name in ("cache_type",) if name in options})

    def fetch(self, path: str, start: int, end: int) -> bytes:
        """Answers one request for a range of bytes. Raises ConnectionError as long as `failures` is above 0."""
        with self._lock:
            self.requests += 1
            failed, self.failures = self.failures > 0, max(self.failures - 1, 0)
            self.bytes_read += end - start
            begins = max(time.monotonic() + self.latency, self._link_free)
            self._link_free = begins + ((end - start) / self.bytes_per_second if self.bytes_per_second else 0)
            answered = self._link_free
        if failed:
            raise ConnectionError("the connection was reset")
        time.sleep(max(answered - time.monotonic(), 0))
        content: bytes = self._files.cat_file(path, start=start, end=end)
        return content


class EmulatedFile(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.fetch(self.path, start, end)


def as_pyarrow(store: EmulatedStore) -> fs.FileSystem:
    """The store as bert_jax.storage.remote.open_store returns one."""
    return fs.PyFileSystem(fs.FSSpecHandler(store))
