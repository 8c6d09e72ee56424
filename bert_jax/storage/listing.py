"""Finding files by glob patterns, on disk and in object stores."""

import glob
import os
import re
from typing import NamedTuple

import pyarrow as pa

from bert_jax.command import UserError
from bert_jax.storage.remote import failure, is_remote, open_store

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
        except (OSError, pa.ArrowException) as error:
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
    from pyarrow import fs

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
