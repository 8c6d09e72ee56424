"""The Hugging Face Hub as a store of pyarrow: files of hf://datasets/ORG/NAME/PATH, read in ranges and never written.

huggingface_hub finds the token (HF_TOKEN, hf auth login) and the endpoint (HF_ENDPOINT).
"""

import contextlib
import errno
import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import fs


def hub_store() -> fs.FileSystem:
    """The Hub, with paths such as datasets/ORG/NAME@REVISION/PATH."""
    from huggingface_hub import HfFileSystem

    return fs.PyFileSystem(_Handler(HfFileSystem()))


class _Handler(fs.FSSpecHandler):
    """Turns the errors of requests, of which there are many types, into OSError. Refuses to write."""

    def get_file_info(self, paths: list[str]) -> Any:
        with _os_errors():
            return super().get_file_info(paths)

    def get_file_info_selector(self, selector: fs.FileSelector) -> Any:
        with _os_errors():
            return super().get_file_info_selector(selector)

    def open_input_file(self, path: str) -> Any:
        with _os_errors():
            return pa.PythonFile(_File(self.fs.open(path, mode="rb")), mode="r")

    open_input_stream = open_input_file

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        raise OSError(errno.EROFS, "files on the Hub are only read here; upload with hf upload")

    def create_dir(self, path: str, recursive: bool) -> None:
        self.open_output_stream(path, None)


class _File(io.RawIOBase):
    """An open file of the Hub."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, target: Any, /) -> int:
        with _os_errors():
            piece = self._opened.read(len(target))
        target[: len(piece)] = piece
        return len(piece)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return int(self._opened.seek(offset, whence))

    def tell(self) -> int:
        return int(self._opened.tell())

    def close(self) -> None:
        self._opened.close()
        super().close()


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, str(error).strip() or type(error).__name__) from error
