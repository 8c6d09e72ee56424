"""A folder that the main process and its workers all reach, on a file system or an object store."""

import os
import platform
from typing import Any

from pyarrow import fs

from bert_jax.command import UserError

_UNFINISHED = ".tmp"


class Exchange:
    """Files of a folder, as `/mnt/shared/x`, `gs://bucket/x`, `s3://bucket/x`; each is there whole or not at all.

    Raises UserError when the file system is unknown or cannot be reached.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        try:
            if "://" in folder:
                self._system, self._root = fs.FileSystem.from_uri(folder)
            else:
                self._system, self._root = fs.LocalFileSystem(), os.path.abspath(folder)
        except (OSError, ValueError) as error:  # pyarrow's own errors are these
            raise UserError(f"--exchange {folder}: {' '.join(str(error).split())}") from None

    @property
    def is_local(self) -> bool:
        return isinstance(self._system, fs.LocalFileSystem)

    def make(self, *folders: str) -> None:
        for folder in folders:
            self._system.create_dir(self._path(folder), recursive=True)

    def write(self, name: str, content: bytes) -> None:
        unfinished = self._path(f"{name}.{os.urandom(4).hex()}{_UNFINISHED}")
        with self._system.open_output_stream(unfinished, compression=None) as stream:
            stream.write(content)
        self._system.move(unfinished, self._path(name))

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        with self._system.open_input_stream(self._path(name), compression=None) as stream:
            return stream.read()

    def read_first(self, name: str) -> bytes:
        """On a worker, what must be there. Raises UserError, saying that the worker does not see the folder."""
        try:
            return self.read(name)
        except FileNotFoundError:
            raise UserError(
                f"{self.folder} is not there on worker {platform.node()}: name a folder that all workers reach, as "
                "--engine_options '--exchange=gs://BUCKET/FOLDER'"
            ) from None

    def names(self, folder: str) -> set[str]:
        """The files in a folder of the exchange, without their folder."""
        found: list[Any] = self._system.get_file_info(fs.FileSelector(self._path(folder), allow_not_found=True))
        return {info.base_name for info in found if info.is_file and not info.base_name.endswith(_UNFINISHED)}

    def remove(self, name: str) -> None:
        self._system.delete_file(self._path(name))

    def clear(self) -> None:
        """Removes the folder with all that it holds, if it is there."""
        if self._system.get_file_info(self._root).type == fs.FileType.Directory:
            self._system.delete_dir(self._root)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
