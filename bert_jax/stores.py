"""Folders and object stores under one face: gs:// and s3:// by pyarrow, beside local paths.

Stores are read with the credentials that each one's own tools use (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL,
...; GOOGLE_APPLICATION_CREDENTIALS, gcloud auth application-default login).
"""

import contextlib
import datetime
import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from bert_jax.command import UserError

if TYPE_CHECKING:  # at run time imported where a store is opened: it has the stores' own libraries in it
    from pyarrow import fs

REMOTE = ("gs://", "s3://")
BLOCK = 1 << 22  # of a file, read at once
_PATIENCE = datetime.timedelta(minutes=2)  # with a store that does not answer


def is_remote(path: str) -> bool:
    return path.startswith(REMOTE)


def open_store(path: str) -> "tuple[fs.FileSystem, str]":
    """The store of a gs:// or s3:// address, and the path in it. Raises UserError for one without a bucket."""
    bucket = path[5:].split("/", 1)[0]
    if not bucket:
        raise UserError(f"{path} names no bucket. Give {path[:5]}BUCKET/NAME")
    return _store(path[:5], bucket), path[5:]


@functools.lru_cache
def _store(scheme: str, bucket: str) -> "fs.FileSystem":
    from pyarrow import fs

    if scheme == "gs://":
        return fs.GcsFileSystem(retry_time_limit=_PATIENCE)
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        protocol, _, host = endpoint.rpartition("://")
        return fs.S3FileSystem(endpoint_override=host.rstrip("/"), scheme=protocol or "https")
    if "AWS_REGION" in os.environ or "AWS_DEFAULT_REGION" in os.environ:
        return fs.S3FileSystem()
    return fs.S3FileSystem(region=fs.resolve_s3_region(bucket))


class Place:
    """A folder, or what a store has under an address. Raises UserError for what the store refuses."""

    def __init__(self, address: str) -> None:
        from pyarrow import fs

        self.address = address.rstrip("/")
        if is_remote(address):
            self._store, path = open_store(address)
            self._path = path.rstrip("/")
        else:
            self._store, self._path = fs.LocalFileSystem(), os.path.abspath(self.address)

    def files(self, within: str = "") -> set[str]:
        """The names of all files, or of those in one folder."""
        from pyarrow import fs

        with self._explained(within):
            selector = fs.FileSelector(f"{self._path}/{within}".rstrip("/"), allow_not_found=True, recursive=True)
            found = [info.path for info in self._store.get_file_info(selector) if info.is_file]
        return {path.removeprefix(self._path).lstrip("/") for path in found}

    def has(self, name: str) -> bool:
        with self._explained(name):
            return bool(self._store.get_file_info(f"{self._path}/{name}").is_file)

    def size(self, name: str) -> int:
        """In bytes. Raises UserError where there is no such file."""
        with self._explained(name):
            info = self._store.get_file_info(f"{self._path}/{name}")
        if not info.is_file:
            raise UserError(f"{self.address}/{name} is missing. Name a finished output of data_prep.build_examples")
        return cast(int, info.size)

    def read(self, name: str) -> bytes:
        return b"".join(self.blocks(name))

    def blocks(self, name: str) -> Iterator[bytes]:
        """The content, piece by piece."""
        if not self.size(name):
            return
        with self._explained(name), self._store.open_input_stream(f"{self._path}/{name}", compression=None) as stream:
            while block := stream.read(BLOCK):
                yield block

    def write(self, name: str, blocks: Iterator[bytes]) -> None:
        """Where the store is one of objects, a file is there when it is closed, and not before."""
        path = f"{self._path}/{name}"
        with self._explained(name):
            if self._store.type_name not in ("s3", "gcs"):  # these have no folders
                self._store.create_dir(path.rsplit("/", 1)[0], recursive=True)
            with self._store.open_output_stream(path, compression=None) as stream:
                for block in blocks:
                    stream.write(block)

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.address}/{name}: {first_line(error)}. Check the address, the credentials and the space"
            ) from None


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")
