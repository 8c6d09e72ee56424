"""Files and folders on disk, in object stores (gs://, s3://) and on the Hugging Face Hub (hf://) behind one interface.

Start with `Folder` and `open_file`; `failure` turns the errors of a store into one line for the user. `find_files`,
at the end, searches by glob patterns.

Object stores are read and written by pyarrow, which every installation has: fsspec and etils need another package for
each store. Credentials are those of each store's own tools (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL, ...;
GOOGLE_APPLICATION_CREDENTIALS, gcloud auth application-default login). For the Hub, huggingface_hub finds the token
(HF_TOKEN, hf auth login) and the endpoint (HF_ENDPOINT).
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

REMOTE = ("gs://", "s3://", "hf://")
Errors: TypeAlias = type[Exception] | tuple[type[Exception], ...]
PYARROW_ERRORS: Errors = (OSError, pa.ArrowException)  # of its stores; the Hub's client has errors of many packages
_BLOCK_BYTES = 1 << 22
_REQUEST_BYTES = 8 << 20  # each request to a store takes a round trip, so one asks for this much of a file
_TEMPORARY = ".bert_jax_tmp"
_DIGITS = 12  # of a hash in a message
_TIMEOUT_SECONDS = 120  # for a store that does not answer
# By gcsfs, by Google and tensorstore (abseil.io/docs/cpp/guides/status-codes), and by S3 (Aws::S3::S3Errors).
_DENIED = re.compile(
    r"^Forbidden\b|\b(PERMISSION_DENIED|UNAUTHENTICATED|ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH)\b"
)
# What the same command meets again: nothing at the address, an address that cannot exist, a bucket in another region
# (301), and a variable by which the Hub must not be asked.
_LASTING = re.compile(
    r"\b(NO_SUCH_BUCKET|NO_SUCH_KEY|RESOURCE_NOT_FOUND|INVALID_ARGUMENT|HTTP status 301|HF_HUB_OFFLINE)\b"
)

# HTTP statuses of a request that is wrong in itself; 401 and 403 are denied, and after 408 and 429 it may succeed.
_LASTING_STATUS = {*range(400, 500)} - {401, 403, 408, 429}
# Of a token, not of an address with this word in it.
_EXPIRED = re.compile(r"expired.?token|\b(token|credentials?)\b[^/]{0,60}\bexpired", re.IGNORECASE)


@runtime_checkable
class BinaryFile(Protocol):
    """The common interface of Python's and pyarrow's open files."""

    def read(self, size: int = -1, /) -> bytes: ...
    def tell(self) -> int: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def close(self) -> object: ...


def is_remote(path: str | Path) -> bool:
    """Whether a string, or the Path made of one (which joins double slashes), is an address in an object store."""
    if isinstance(path, Path):
        return any(f"{part}//" in REMOTE for part in path.parts)
    return path.startswith(REMOTE)


def address_of(path: Path) -> str:
    """A path as text: of one that was made of a remote address, and then perhaps made absolute, that address."""
    start = next((number for number, part in enumerate(path.parts) if f"{part}//" in REMOTE), None)
    return str(path) if start is None else f"{path.parts[start]}//{'/'.join(path.parts[start + 1 :])}"


def open_store(address: str) -> tuple[fs.FileSystem, str]:
    """Returns the store of a remote address and the path in it. Raises UserError if it has no bucket."""
    scheme, path = address[:5], address[5:]
    bucket = path.split("/", 1)[0]
    if not bucket:
        raise UserError(f"{address} names no bucket. Use {scheme}BUCKET/NAME")
    return _store(scheme, bucket), path


@functools.lru_cache
def _store(scheme: str, bucket: str) -> fs.FileSystem:
    if scheme == "hf://":
        from huggingface_hub import HfFileSystem

        return fs.PyFileSystem(_HubHandler(HfFileSystem()))  # paths such as datasets/ORG/NAME@REVISION/PATH
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    options = f"retry_limit_seconds={_TIMEOUT_SECONDS}" if scheme == "gs://" else f"region={region}" if region else ""
    # Unlike the constructors of its stores, from_uri reads AWS_ENDPOINT_URL and finds the region of a bucket.
    return fs.FileSystem.from_uri(f"{scheme}{bucket}?{options}")[0]


def open_folder(address: str) -> tuple[fs.FileSystem, str]:
    """Returns the file system of a local folder or of an address, and the path in it, without a slash at its end.

    Raises UserError for an address that cannot be parsed, and the errors of `failure`.
    """
    try:
        if is_remote(address) and "?" not in address:
            store, path = open_store(address)
        elif "://" in address:  # any other that pyarrow knows, as hdfs://, and options of a store after a "?"
            store, path = fs.FileSystem.from_uri(address)
        else:
            store, path = fs.LocalFileSystem(), os.path.abspath(address)
    except (OSError, ValueError) as error:  # ValueError: pyarrow's error for an address that cannot be parsed
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
    """Opens a local or remote file for reading once, from its beginning. Raises as `open_file` does."""
    file = open_file(path)
    return io.BufferedReader(cast(io.RawIOBase, file), _REQUEST_BYTES) if is_remote(path) else file


class _HubHandler(fs.FSSpecHandler):
    """The Hub as a store of pyarrow, whose files are read in ranges and never written."""

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
    """An open file of a store, whose errors of these types have numbers."""

    def __init__(self, file: Any, kinds: Errors = PYARROW_ERRORS) -> None:
        self._file, self._kinds = file, kinds

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

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
    """Gives errors of these types that have no number one: ENOENT or EIO."""
    try:
        yield
    except kinds as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        number = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO
        raise OSError(number, str(error).strip() or type(error).__name__) from error


def failure(address: str, error: Exception) -> UserError | RunAgain:
    """The error of a command for one of a file system or store, which reading or writing an address raised.

    It is RunAgain where a store did not answer or was busy. It is UserError where the same command would fail again:
    nothing is at the address, permission is denied, the credentials are wrong, or the file is on a disk.
    """
    if isinstance(error, FileNotFoundError):
        return UserError(f"{address} does not exist. Check the address")
    problem = f"{address}: {first_line(error)}"
    if not is_remote(address):
        # On a disk the error number tells the reason; a store only has its message.
        explained = explain_os_error(OSError(getattr(error, "errno", None), "", address))
        return UserError(explained or f"{problem}. Check the address and the free space")
    if is_denied(error) or _is_lasting(error):
        return UserError(f"{problem}. Check the address and the credentials")
    return RunAgain(f"{problem}. Check the address, the network and the credentials, and run the same command again")


def is_denied(error: BaseException | None) -> bool:
    """Whether a store denied permission, and not because a token has expired, which may have been renewed since."""
    return any(
        (isinstance(cause, PermissionError) or _http_status(cause) in (401, 403) or _DENIED.search(str(cause)))
        and not _EXPIRED.search(str(cause))
        for cause in _with_causes(error)
    )


def _is_lasting(error: BaseException) -> bool:
    """Whether the same command meets this error again, unless an address or a setting changes."""
    return any(
        isinstance(cause, ValueError | NotImplementedError)
        or _http_status(cause) in _LASTING_STATUS
        or _LASTING.search(str(cause))
        for cause in _with_causes(error)
        if not isinstance(cause, json.JSONDecodeError)  # a ValueError too, of an answer that was cut off
    )


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _http_status(error: BaseException) -> int | None:
    """The status of the answer by HTTP that an error of the Hugging Face Hub is about."""
    return getattr(getattr(error, "response", None), "status_code", None)


class Folder:
    """A local folder, or everything in a store under an address.

    Every method raises UserError if a file does not exist, or if the file system or store refuses, and RunAgain if the
    store does not answer (`failure`).
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        store, path = open_folder(address)
        self._files = fs.SubTreeFileSystem(path, store)

    def names(self, within: str = "") -> set[str]:
        """The names of all files, or of those below one folder, relative to this one."""
        return {info.path for info in self._found(within)}

    def sizes(self, within: str = "") -> dict[str, int]:
        """The sizes in bytes of all files, or of those below one folder, by their names relative to this one."""
        return {info.path: cast(int, info.size) for info in self._found(within)}

    def size(self, name: str) -> int:
        """The size of a file in bytes."""
        with self._explained(name):
            info = self._files.get_file_info(name)
            if not info.is_file:
                raise FileNotFoundError
            return cast(int, info.size)

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return b"".join(self.blocks(name))

    def read_if_present(self, name: str) -> bytes | None:
        """The content of a file, or None if it does not exist."""
        with self._explained(name), contextlib.suppress(FileNotFoundError), self._opened(name) as stream:
            return cast(bytes, stream.read())
        return None

    def blocks(self, name: str) -> Iterator[bytes]:
        """The content of a file, block by block."""
        with self._explained(name), self._opened(name) as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block

    def verified_blocks(self, name: str, sha256: str | None, size: int | None = None) -> Iterator[bytes]:
        """As `blocks`; raises UserError after the last block if the hash or the total size of the file is wrong."""
        digest, total, origin = hashlib.sha256(), 0, f"{self.address}/{name}"
        for block in self.blocks(name):
            digest.update(block)
            total += len(block)
            yield block
        if size is not None and total != size:
            raise UserError(f"damaged {origin}: it has {total} bytes, expected {size}; copy or build it again")
        if sha256 is not None and digest.hexdigest() != sha256:
            found, expected = digest.hexdigest()[:_DIGITS], sha256[:_DIGITS]
            raise UserError(
                f"damaged {origin}: its sha256 is {found}..., expected {expected}...; copy or build it again"
            )

    def write(self, name: str, content: bytes | Iterable[bytes]) -> None:
        """Writes a file that appears complete or not at all, given at once or in blocks; creates its folders."""
        with self._explained(name):
            # A store has no folders, and shows an object only once it is complete. There a rename would be a copy.
            is_object = self._files.base_fs.type_name in ("s3", "gcs")
            unfinished = name if is_object else f"{name}.{os.urandom(4).hex()}{_TEMPORARY}"
            if not is_object:
                self._files.base_fs.create_dir(os.path.dirname(self._files.base_path + name), recursive=True)
            stream = self._files.open_output_stream(unfinished, compression=None)
            try:
                with stream:
                    for block in (content,) if isinstance(content, bytes) else content:
                        stream.write(block)
            except BaseException:  # closing the stream has made a file of what was written
                with contextlib.suppress(OSError):
                    self._files.delete_file(unfinished)
                raise
            if not is_object:
                self._files.move(unfinished, name)

    def remove(self, name: str) -> None:
        """Removes a file."""
        with self._explained(name):
            self._files.delete_file(name)

    def clear(self) -> None:
        """Removes the folder with everything in it, if it exists."""
        with self._explained(""), contextlib.suppress(FileNotFoundError):
            self._files.base_fs.delete_dir(self._files.base_path)

    def _found(self, within: str) -> list[Any]:
        with self._explained(within):
            found: list[Any] = self._files.get_file_info(fs.FileSelector(within, allow_not_found=True, recursive=True))
        return [info for info in found if info.is_file and not info.path.endswith(_TEMPORARY)]

    def _opened(self, name: str) -> Any:
        return self._files.open_input_stream(name, compression=None)

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except PYARROW_ERRORS as error:
            raise failure(f"{self.address}/{name}", error) from None


def first_line(error: BaseException) -> str:
    """The message of an error, or its type if it has none, as one line of at most 300 characters."""
    text = error.strerror if isinstance(error, OSError) and error.strerror and not error.filename else str(error)
    return (text.strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")


# Finding files by glob patterns, on disk and in object stores.

_WILDCARD = re.compile(r"[*?\[]")


class FoundFile(NamedTuple):
    """A file or folder that a pattern matches."""

    path: str
    bytes: int
    is_folder: bool


def find_files(pattern: str) -> list[FoundFile]:
    """The files and folders that a glob matches, sorted; `**` matches any number of folders.

    A pattern that is the name of a file, perhaps with a bracket in it, means that file. Raises UserError for a local
    folder that the pattern searches and that cannot be listed, and the errors of `failure` for a store.
    """
    if is_remote(pattern):
        try:
            return _find_remote(pattern)
        except PYARROW_ERRORS as error:
            raise failure(pattern, error) from None
    if pattern and os.path.exists(pattern):
        return [_found_local(pattern)]
    _check_folders(pattern)
    return [_found_local(path) for path in sorted(glob.glob(pattern, recursive=True))]


def is_special(path: str) -> bool:
    """Whether a path is a pipe, device or socket, which may never end and cannot be read a second time."""
    return not is_remote(path) and os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _check_folders(pattern: str) -> None:
    """Raises UserError for a folder that the pattern searches and that may not be read; glob skips it silently."""
    parts = pattern.split("/")
    for index in range(_first_wildcard(parts), len(parts)):
        mode = os.R_OK | os.X_OK if _WILDCARD.search(parts[index]) else os.X_OK
        before = "/".join(parts[: index + (parts[index] == "**")])
        for folder in glob.glob(before + "/", recursive=True) if before or pattern.startswith("/") else ["."]:
            if not os.access(folder, mode):
                raise UserError(
                    f"--input {pattern!r} searches {folder}, which cannot be read. Correct its mode, or the pattern"
                )


def _first_wildcard(parts: list[str]) -> int:
    return next((index for index, part in enumerate(parts) if _WILDCARD.search(part)), len(parts))


def _found_local(path: str) -> FoundFile:
    is_folder = os.path.isdir(path)
    try:
        return FoundFile(path, 0 if is_folder else os.stat(path).st_size, is_folder)
    except FileNotFoundError:  # a broken link, which is reported when it is read
        return FoundFile(path, 0, False)


def _find_remote(pattern: str) -> list[FoundFile]:
    from fsspec.utils import glob_translate

    parts = pattern[5:].rstrip("/").split("/")
    first = _first_wildcard(parts)
    if not first:
        raise UserError(f"{pattern}: the bucket may not contain wildcards. Name it")
    store, _ = open_store(pattern)
    if first == len(parts):
        infos = [store.get_file_info("/".join(parts))]
    else:
        recursive = first < len(parts) - 1 or parts[first] == "**"
        selector = fs.FileSelector("/".join(parts[:first]), allow_not_found=True, recursive=recursive)
        try:
            wanted = re.compile(glob_translate("/".join(parts)))
        except ValueError as error:
            raise UserError(f"{pattern} is no valid pattern: {error}. Write ** between two slashes") from None
        infos = [info for info in store.get_file_info(selector) if wanted.fullmatch(info.path)]
    present = (info for info in infos if info.type != fs.FileType.NotFound)
    return sorted(
        FoundFile(pattern[:5] + info.path, info.size or 0, info.type == fs.FileType.Directory) for info in present
    )
