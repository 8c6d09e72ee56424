"""Files and folders on disk, in object stores (gs://, s3://) and on the Hugging Face Hub (hf://) behind one interface.

Start with `Folder` and `open_file`. `failure` explains a store's error in one line, `find_files` searches by glob.
pyarrow reads and writes the stores, because every installation has it: fsspec and etils need a package for each store.
Credentials come from each store's own tools (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL, ...;
GOOGLE_APPLICATION_CREDENTIALS, gcloud auth application-default login; HF_TOKEN, HF_ENDPOINT, hf auth login).
"""

import contextlib
import errno
import functools
import glob
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import pyarrow as pa
from pyarrow import fs

from bert_jax.command_line import explain_os_error
from bert_jax.errors import RunAgain, UserError

# Each has five characters, by which addresses are cut.
REMOTE = ("gs://", "s3://", "hf://")
Errors: TypeAlias = type[Exception] | tuple[type[Exception], ...]
PYARROW_ERRORS: Errors = (OSError, pa.ArrowException)  # from its stores; the Hub's client raises many packages' errors
_BLOCK_BYTES = 1 << 22
_REQUEST_BYTES = 8 << 20  # each request to a store takes a round trip, so one asks for this much of a file
_TEMPORARY = ".bert_jax_tmp"
_TIMEOUT_SECONDS = 120  # for a store that does not answer
# From gcsfs, from Google and tensorstore (abseil.io/docs/cpp/guides/status-codes), and from S3 (Aws::S3::S3Errors).
_DENIED = re.compile(
    r"^Forbidden\b|\b(PERMISSION_DENIED|UNAUTHENTICATED|ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH)\b"
)
# Errors that the same command meets again: nothing at the address, an impossible address, a bucket in another region
# (301), and a variable that forbids asking the Hub.
_LASTING = re.compile(
    r"\b(NO_SUCH_BUCKET|NO_SUCH_KEY|RESOURCE_NOT_FOUND|INVALID_ARGUMENT|HTTP status 301|HF_HUB_OFFLINE)\b"
)
# HTTP statuses of a request that is wrong in itself; 401 and 403 deny access, and after 408 and 429 it may succeed.
_LASTING_STATUS = {*range(400, 500)} - {401, 403, 408, 429}
# An expired token, not an address that contains this word.
_EXPIRED = re.compile(r"expired.?token|\b(token|credentials?)\b[^/]{0,60}\bexpired", re.IGNORECASE)
_WILDCARD = re.compile(r"[*?\[]")


@runtime_checkable
class BinaryFile(Protocol):
    """The common interface of Python's and pyarrow's open files."""

    def read(self, size: int = -1, /) -> bytes: ...
    def tell(self) -> int: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def close(self) -> object: ...


def is_remote(path: str | Path) -> bool:
    """Whether a string, or the Path made from one (which joins double slashes), is an address in an object store."""
    if isinstance(path, Path):
        return any(f"{part}//" in REMOTE for part in path.parts)
    return path.startswith(REMOTE)


def as_address(path: Path) -> str:
    """A path as text. If it was made from a remote address, and perhaps made absolute, this is the address."""
    start = next((index for index, part in enumerate(path.parts) if f"{part}//" in REMOTE), None)
    return str(path) if start is None else f"{path.parts[start]}//{'/'.join(path.parts[start + 1 :])}"


def open_store(address: str) -> tuple[fs.FileSystem, str]:
    """Returns the store of a remote address and the path in it. Raises UserError if the bucket is missing."""
    scheme, path = address[:5], address[5:]
    bucket = path.split("/", 1)[0]
    if not bucket:
        raise UserError(f"{address} names no bucket. Use {scheme}BUCKET/NAME")
    return _store(scheme, bucket), path


# Kept, because opening a bucket in S3 may ask for its region first.
@functools.lru_cache
def _store(scheme: str, bucket: str) -> fs.FileSystem:
    if scheme == "hf://":
        from huggingface_hub import HfFileSystem

        return fs.PyFileSystem(_HubHandler(HfFileSystem()))  # paths such as datasets/ORG/NAME@REVISION/PATH
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    options = f"retry_limit_seconds={_TIMEOUT_SECONDS}" if scheme == "gs://" else f"region={region}" if region else ""
    # Unlike the stores' constructors, from_uri reads AWS_ENDPOINT_URL and finds a bucket's region.
    return fs.FileSystem.from_uri(f"{scheme}{bucket}?{options}")[0]


def open_folder(address: str) -> tuple[fs.FileSystem, str]:
    """Returns the file system of a local folder or an address, and the path in it, without a slash at its end.

    Raises:
        UserError: the address cannot be parsed; and the errors of `failure`.
    """
    try:
        if is_remote(address) and "?" not in address:
            store, path = open_store(address)
        elif "://" in address:  # another scheme that pyarrow knows, such as hdfs://, or store options after a "?"
            store, path = fs.FileSystem.from_uri(address)
        else:
            store, path = fs.LocalFileSystem(), os.path.abspath(address)
    except (OSError, ValueError) as error:  # ValueError: pyarrow cannot parse the address
        raise failure(address, error) from None
    return store, path.rstrip("/")


def open_file(path: str) -> BinaryFile:
    """Opens a local or remote file for reading at any position.

    Opening and reading raise OSError with a number, which the errors of decompressors and parsers lack.
    """
    if is_remote(path):
        with _numbered_errors():
            store, inner = open_store(path)
            return _StoredFile(store.open_input_file(inner))
    return open(path, "rb")


def open_stream(path: str) -> BinaryFile:
    """Opens a local or remote file for reading once, from its beginning. Raises the errors of `open_file`."""
    file = open_file(path)
    return io.BufferedReader(cast(io.RawIOBase, file), _REQUEST_BYTES) if is_remote(path) else file


class _HubHandler(fs.FSSpecHandler):
    """The Hub as a pyarrow file system. Its files are read in ranges and never written."""

    def get_file_info(self, paths: list[str]) -> Any:
        with _numbered_errors(Exception):
            return super().get_file_info(paths)

    def get_file_info_selector(self, selector: fs.FileSelector) -> Any:
        with _numbered_errors(Exception):
            return super().get_file_info_selector(selector)

    def open_input_file(self, path: str) -> Any:
        with _numbered_errors(Exception):
            return pa.PythonFile(_StoredFile(self.fs.open(path, mode="rb"), Exception), mode="r")

    open_input_stream = open_input_file

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        raise OSError(errno.EROFS, "files on the Hub are only read here; upload with hf upload")

    def create_dir(self, path: str, recursive: bool) -> None:
        self.open_output_stream(path, None)


class _StoredFile(io.RawIOBase):
    """An open file in a store. Gives its errors, if they have one of these types, a number."""

    def __init__(self, file: Any, kinds: Errors = PYARROW_ERRORS) -> None:
        self._file, self._kinds = file, kinds

    def readable(self) -> bool:
        return True

    seekable = readable

    def read(self, size: int | None = -1, /) -> bytes:
        with _numbered_errors(self._kinds):
            return cast(bytes, self._file.read(None if size is None or size < 0 else size))

    def readinto(self, target: Any, /) -> int:
        with _numbered_errors(self._kinds):
            return cast(int, self._file.readinto(target))

    def seek(self, offset: int, whence: int = 0, /) -> int:
        with _numbered_errors(self._kinds):
            return cast(int, self._file.seek(offset, whence))

    def tell(self) -> int:
        return cast(int, self._file.tell())

    def close(self) -> None:
        self._file.close()
        super().close()


@contextlib.contextmanager
def _numbered_errors(kinds: Errors = PYARROW_ERRORS) -> Iterator[None]:
    """Turns errors of these types, unless they have a number, into OSError with ENOENT or EIO."""
    try:
        yield
    except kinds as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        number = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO
        raise OSError(number, str(error).strip() or type(error).__name__) from error


def failure(address: str, error: Exception) -> UserError | RunAgain:
    """Explains an error that a file system or store raised for an address.

    Returns:
        RunAgain if a store did not answer or was busy. UserError if the same command would fail again: nothing is at
        the address, permission is denied, the credentials are wrong, or the file is on a disk.
    """
    if isinstance(error, FileNotFoundError):
        return UserError(f"{address} does not exist. Check the address")
    problem = f"{address}: {first_line(error)}"
    if not is_remote(address):
        # A disk's error number tells the reason; a store only has its message.
        explained = explain_os_error(OSError(getattr(error, "errno", None), "", address))
        return UserError(explained or f"{problem}. Check the address and the free space")
    is_lasting = any(
        isinstance(cause, ValueError | NotImplementedError)
        or _http_status(cause) in _LASTING_STATUS
        or _LASTING.search(str(cause))
        for cause in with_causes(error)
        if not isinstance(cause, json.JSONDecodeError)  # also a ValueError, from an answer that was cut off
    )
    if is_lasting or is_denied(error):
        return UserError(f"{problem}. Check the address and the credentials")
    return RunAgain(f"{problem}. Check the address, the network and the credentials, and run the same command again")


def is_denied(error: BaseException | None) -> bool:
    """Whether a store denied permission. An expired token does not count, because it may have been renewed since."""
    return any(
        (isinstance(cause, PermissionError) or _http_status(cause) in (401, 403) or _DENIED.search(str(cause)))
        and not _EXPIRED.search(str(cause))
        for cause in with_causes(error)
    )


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, its cause, the cause's cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def _http_status(error: BaseException) -> int | None:
    """The HTTP status in an error of the Hugging Face Hub's client."""
    return getattr(getattr(error, "response", None), "status_code", None)


class Folder:
    """A local folder, or everything in a store under an address.

    All methods raise UserError if a file does not exist or the file system or store refuses, and RunAgain if the store
    does not answer (`failure`). File names are relative to the folder.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        store, path = open_folder(address)
        self._files = fs.SubTreeFileSystem(path, store)

    def names(self, within: str = "") -> set[str]:
        """The names of all files, optionally only below one folder."""
        return set(self.sizes(within))

    def sizes(self, within: str = "") -> dict[str, int]:
        """The size in bytes of every file by name, optionally only below one folder."""
        with self._explained(within):
            # A store has no empty folders, so an address with nothing below it counts as an empty folder. Files that
            # are still being written are left out.
            infos = self._files.get_file_info(fs.FileSelector(within, allow_not_found=True, recursive=True))
        return {info.path: info.size for info in infos if info.is_file and not info.path.endswith(_TEMPORARY)}

    def size(self, name: str) -> int:
        """A file's size in bytes."""
        with self._explained(name):
            info = self._files.get_file_info(name)
            if not info.is_file:
                raise FileNotFoundError
            return cast(int, info.size)

    def read(self, name: str) -> bytes:
        """A file's content."""
        return b"".join(self.blocks(name))

    def read_if_present(self, name: str) -> bytes | None:
        """A file's content, or None if the file does not exist."""
        # suppress is the inner one, so that it sees a missing file before _explained does.
        with self._explained(name), contextlib.suppress(FileNotFoundError), self._opened(name) as stream:
            return cast(bytes, stream.read())
        return None

    def blocks(self, name: str) -> Iterator[bytes]:
        """A file's content, block by block."""
        with self._explained(name), self._opened(name) as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block

    def verified_blocks(self, name: str, sha256: str | None, size: int | None = None) -> Iterator[bytes]:
        """Yields a file's blocks.

        Raises:
            UserError: after the last block, if the file's hash or size is wrong.
        """
        # Blocks are passed on before the hash is known; `write` removes a file whose blocks raise an error.
        digest, total = hashlib.sha256(), 0
        for block in self.blocks(name):
            digest.update(block)
            total += len(block)
            yield block
        problem = ""
        if size is not None and total != size:
            problem = f"it has {total} bytes, expected {size}"
        elif sha256 is not None and digest.hexdigest() != sha256:
            problem = f"its sha256 is {digest.hexdigest()[:12]}..., expected {sha256[:12]}..."
        if problem:
            raise UserError(f"damaged {self.address}/{name}: {problem}; copy or build it again")

    def write(self, name: str, content: bytes | Iterable[bytes]) -> None:
        """Writes a file that appears complete or not at all, from bytes or from blocks; creates its folders."""
        with self._explained(name):
            # A store has no folders, shows only complete objects, and copies when it renames. But pyarrow also
            # completes an object whose blocks end with an error, so only bytes are written under the name itself.
            is_object = self._files.base_fs.type_name in ("s3", "gcs")
            at_once = is_object and isinstance(content, bytes)
            unfinished = name if at_once else f"{name}.{os.urandom(4).hex()}{_TEMPORARY}"
            if not is_object:
                self._files.base_fs.create_dir(os.path.dirname(self._files.base_path + name), recursive=True)
            stream = self._files.open_output_stream(unfinished, compression=None)
            try:
                with stream:
                    for block in (content,) if isinstance(content, bytes) else content:
                        stream.write(block)
            except BaseException:  # closing the stream has left a file with the blocks written so far
                with contextlib.suppress(OSError):
                    self._files.delete_file(unfinished)
                raise
            if not at_once:
                self._files.move(unfinished, name)

    def remove(self, name: str) -> None:
        """Removes a file."""
        with self._explained(name):
            self._files.delete_file(name)

    def clear(self) -> None:
        """Removes the folder with everything in it, if it exists."""
        with self._explained(""), contextlib.suppress(FileNotFoundError):
            self._files.base_fs.delete_dir(self._files.base_path)

    def _opened(self, name: str) -> Any:
        return self._files.open_input_stream(name, compression=None)

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except PYARROW_ERRORS as error:
            raise failure(f"{self.address}/{name}", error) from None


def first_line(error: BaseException) -> str:
    """An error's message, or its type if it has none, as one line of at most 300 characters."""
    text = error.strerror if isinstance(error, OSError) and error.strerror and not error.filename else str(error)
    return (text.strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")


class FoundFile(NamedTuple):
    """A file or folder that matches a pattern."""

    path: str
    bytes: int
    is_folder: bool


def find_files(pattern: str) -> list[FoundFile]:
    """Finds the files and folders that match a glob, sorted. `**` matches any number of folders.

    If a local file has the pattern as its name, perhaps with a bracket in it, the pattern means this file.

    Raises:
        UserError: the pattern searches a local folder that cannot be listed; and for a store the errors of `failure`.
    """
    if is_remote(pattern):
        try:
            return _find_remote(pattern)
        except PYARROW_ERRORS as error:
            raise failure(pattern, error) from None
    if pattern and os.path.exists(pattern):
        paths = [pattern]
    else:
        # glob skips folders without permission, so they are checked beforehand: from the first wildcard on, the folder
        # before a part must be searchable and, if the part is a wildcard, listable.
        parts = pattern.split("/")
        for index in range(_first_wildcard(parts), len(parts)):
            mode = os.R_OK | os.X_OK if _WILDCARD.search(parts[index]) else os.X_OK
            before = "/".join(parts[: index + (parts[index] == "**")])
            for folder in glob.glob(before + "/", recursive=True) if before or pattern.startswith("/") else ["."]:
                if not os.access(folder, mode):
                    raise UserError(
                        f"--input {pattern!r} searches {folder}, which cannot be read. Correct its mode, or the pattern"
                    )
        paths = sorted(glob.glob(pattern, recursive=True))
    files = []
    for path in paths:
        is_folder, size = os.path.isdir(path), 0
        with contextlib.suppress(FileNotFoundError):  # a broken link, which is reported when it is read
            size = 0 if is_folder else os.stat(path).st_size
        files.append(FoundFile(path, size, is_folder))
    return files


def _find_remote(pattern: str) -> list[FoundFile]:
    from fsspec.utils import glob_translate

    parts = pattern[5:].rstrip("/").split("/")
    first = _first_wildcard(parts)
    if not first:
        raise UserError(f"{pattern}: the bucket may not contain wildcards. Name it")
    store, _ = open_store(pattern)
    # Without a wildcard, the name itself is looked up. With one, everything below the last folder before it is listed,
    # recursively only if the pattern has more levels.
    if first == len(parts):
        infos = [store.get_file_info("/".join(parts))]
    else:
        recursive = first < len(parts) - 1 or parts[first] == "**"
        selector = fs.FileSelector("/".join(parts[:first]), allow_not_found=True, recursive=recursive)
        try:
            regex = re.compile(glob_translate("/".join(parts)))
        except ValueError as error:
            raise UserError(f"{pattern} is no valid pattern: {error}. Write ** between two slashes") from None
        infos = [info for info in store.get_file_info(selector) if regex.fullmatch(info.path)]
    present = (info for info in infos if info.type != fs.FileType.NotFound)
    return sorted(
        FoundFile(pattern[:5] + info.path, info.size or 0, info.type == fs.FileType.Directory) for info in present
    )


def _first_wildcard(parts: list[str]) -> int:
    return next((index for index, part in enumerate(parts) if _WILDCARD.search(part)), len(parts))


def is_special(path: str) -> bool:
    """Whether a path is a pipe, device or socket, which may never end and cannot be read a second time."""
    return not is_remote(path) and os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
