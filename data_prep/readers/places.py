"""Where text lies: local paths, gs:// and s3://, listed by glob and opened as streams of bytes.

Object stores are read by pyarrow, with the credentials that each store's own tools use (AWS_ACCESS_KEY_ID,
AWS_PROFILE, AWS_ENDPOINT_URL, ...; GOOGLE_APPLICATION_CREDENTIALS, gcloud auth application-default login).
"""

import fnmatch
import glob
import io
import os
import re
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import pyarrow as pa

from bert_jax.command import UserError
from bert_jax.stores import first_line, is_remote, open_store

_REQUEST_BYTES = 8 << 20  # of a stored file, asked for at once
_WILD = re.compile(r"[*?\[]")


@runtime_checkable
class Stream(Protocol):
    """What Python's and pyarrow's files have in common."""

    def read(self, size: int = -1, /) -> bytes: ...
    def tell(self) -> int: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def close(self) -> object: ...


class Found(NamedTuple):
    """What a pattern named."""

    path: str
    bytes: int
    folder: bool


def matches(pattern: str) -> list[Found]:
    """The files and folders that a glob names, sorted; `**` stands for any folders.

    What is a name as it stands, perhaps with a bracket in it, is not taken as a pattern. Raises UserError when a
    store, or a folder on the way of the pattern, cannot be listed.
    """
    if is_remote(pattern):
        try:
            return _remote_matches(pattern)
        except (OSError, pa.ArrowInvalid) as error:  # ArrowInvalid: what can be no address
            raise UserError(f"{pattern}: {first_line(error)}. Check the address and the credentials") from None
    if pattern and os.path.exists(pattern):
        return [_local(pattern)]
    _check_folders(pattern)
    return [_local(path) for path in sorted(glob.glob(pattern, recursive=True))]


def _check_folders(pattern: str) -> None:
    """Raises UserError for a folder that a glob would look into and may not: glob itself passes over it, silently."""
    parts = pattern.split("/")
    first_wild = next((place for place, part in enumerate(parts) if _WILD.search(part)), len(parts))
    for place in range(first_wild, len(parts)):
        mode = os.R_OK | os.X_OK if _WILD.search(parts[place]) else os.X_OK
        before = "/".join(parts[: place + (parts[place] == "**")])
        for folder in glob.glob(before + "/", recursive=True) if before or pattern.startswith("/") else ["."]:
            if not os.access(folder, mode):
                raise UserError(
                    f"{folder}, which --input {pattern!r} looks into, cannot be read. Mend that, or name others"
                )


def _local(path: str) -> Found:
    folder = os.path.isdir(path)
    try:
        return Found(path, 0 if folder else os.stat(path).st_size, folder)
    except FileNotFoundError:  # a link to nowhere: told when it is read
        return Found(path, 0, False)


def _remote_matches(pattern: str) -> list[Found]:
    from pyarrow import fs

    scheme = pattern[:5]
    store, path = open_store(pattern)
    path = path.rstrip("/")
    info = store.get_file_info(path) if not _WILD.search(path) else None
    if info is not None:
        present = [] if info.type == fs.FileType.NotFound else [info]
    else:
        parts = path.split("/")
        first_wild = next(place for place, part in enumerate(parts) if _WILD.search(part))
        if not first_wild:
            raise UserError(f"{pattern}: name the bucket; only what is in it can be a pattern")
        recursive = first_wild < len(parts) - 1 or parts[first_wild] == "**"
        base = "/".join(parts[:first_wild])
        listed = store.get_file_info(fs.FileSelector(base, allow_not_found=True, recursive=recursive))
        wanted = glob_expression(path)
        present = [info for info in listed if wanted.fullmatch(info.path)]
    found = (Found(scheme + info.path, info.size or 0, info.type == fs.FileType.Directory) for info in present)
    return sorted(found)


def glob_expression(pattern: str) -> re.Pattern[str]:
    """A glob over paths as a regular expression: * and ? stay within a folder, ** is any number of folders."""
    parts = pattern.split("/")
    expression = ""
    for place, part in enumerate(parts):
        last = place == len(parts) - 1
        if part == "**":
            expression += ".*" if last else "(?:[^/]+/)*"
        else:
            inner = fnmatch.translate(part).removeprefix("(?s:").removesuffix(r")\Z")
            expression += inner.replace(".*", "[^/]*") if "*" in part else inner
            expression += "" if last else "/"
    return re.compile(expression)


def is_special(path: str) -> bool:
    """Whether a path leads to a pipe, a device or a socket: one that ends late or never, and cannot be read again."""
    return not is_remote(path) and os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def open_stream(path: str) -> Stream:
    """A stored file as a stream of bytes, read once from its beginning. Raises OSError."""
    if is_remote(path):
        store, inner = open_store(path)
        stream = store.open_input_stream(inner, compression=None, buffer_size=_REQUEST_BYTES)
        return io.BufferedReader(_Counted(stream))
    return open(path, "rb")


class _Counted(io.RawIOBase):
    """A stream of pyarrow, of which it can be told how far it is read."""

    def __init__(self, stream: pa.NativeFile) -> None:
        self._stream = stream
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any, /) -> int:
        content = self._stream.read(len(target))
        target[: len(content)] = content
        self._position += len(content)
        return len(content)

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        self._stream.close()
        super().close()


def open_file(path: str) -> Stream:
    """A stored file to be read at any place. Raises OSError."""
    if is_remote(path):
        store, inner = open_store(path)
        return cast(Stream, store.open_input_file(inner))
    return open(path, "rb")
