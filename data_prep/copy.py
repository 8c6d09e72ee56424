"""Copies an output to or from an object store: every byte is verified, and the manifest is written last."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bert_jax.data.manifest import MANIFEST, PARTS
from bert_jax.errors import UserError
from bert_jax.storage.files import MARKER, write_atomic
from data_prep import formats

# SHA256SUMS: the hash of every file of an output, in the format of `sha256sum -c SHA256SUMS`.


SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")


def write_with_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Writes the files that the format of the shards adds, then SHA256SUMS, and manifest.json last."""
    formats.finish(directory, manifest)
    content = json.dumps(manifest, indent=1).encode() + b"\n"
    write_atomic(directory / SUMS, render(directory, manifest, content))
    write_atomic(directory / MANIFEST, content)


def render(directory: Path, manifest: Mapping[str, Any], content: bytes) -> bytes:
    """The contents of SHA256SUMS for an output that is complete except for manifest.json, which will hold `content`.

    The hashes of the shards are taken from the manifest; the other files, which are few, are read.
    """
    digests = {shard["name"]: shard["sha256"] for shard in manifest["shards"]}
    digests[MANIFEST] = hashlib.sha256(content).hexdigest()
    for name in files(directory) - set(digests):
        digests[name] = sha256(directory / name)
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests)).encode()


def read(directory: Path) -> dict[str, str]:
    """The hashes that an output lists, by name. Raises UserError for a list that is missing or damaged."""
    path = directory / SUMS
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"missing {path}; copy the folder again, or build it again") from None
    return parse(content, str(path))


def parse(content: bytes, place: str) -> dict[str, str]:
    """The hashes in a SHA256SUMS file, by name. Raises UserError that names `place` for a damaged file."""
    try:
        lines = content.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"damaged {place}: it is not text; copy the folder again, or build it again") from None
    matches = [_LINE.fullmatch(line) for line in lines]
    if None in matches:
        number = matches.index(None) + 1
        raise UserError(
            f"damaged {place}: line {number} is not a hash and a name; copy the folder again, or build it again"
        )
    names = {match[2]: match[1] for match in matches if match}
    if outside := [name for name in names if name.startswith("/") or ".." in name.split("/")]:
        raise UserError(f"damaged {place}: {outside[0]} is outside of the folder; copy it again from the original")
    return names


def must_list(listed: Mapping[str, str], names: Iterable[str], place: str) -> None:
    """Raises UserError that names `place` for the first name that is not listed."""
    for name in names:
        if name not in listed:
            raise UserError(f"damaged {place}: it does not list {name}; copy the folder again")


def damage(directory: Path, listed: Mapping[str, str], on_read: Callable[[int], None]) -> dict[str, str]:
    """The problems of the files of an output, by name. Reads every byte, and calls `on_read` with the number read.

    Files that are not listed are a problem inside of folders (train, eval, ...), where a reader might take them for
    shards; next to the manifest they may be a user's notes.
    """
    found = files(directory)
    problems: dict[str, str] = {}
    for name, digest in listed.items():
        if name not in found:
            problems[name] = f"it is missing, and {SUMS} lists it"
        else:
            if sha256(directory / name) != digest:
                problems[name] = f"its sha256 is not that of {SUMS}"
            on_read((directory / name).stat().st_size)
    problems |= dict.fromkeys(_strays(directory, listed), f"{SUMS} does not list it")
    if MANIFEST not in listed:
        problems.setdefault(SUMS, f"it does not list {MANIFEST}")
    return problems


def files(directory: Path) -> set[str]:
    """The files that SHA256SUMS lists: all except itself and those of an unfinished job."""
    return {name for name, path in _paths(directory) if path.is_file()}


def _strays(directory: Path, listed: Mapping[str, str]) -> list[str]:
    """What an output holds that is not listed: pipes, links, and files other than those next to the manifest.

    Empty folders count too, except train and eval, since a part may have no rows.
    """

    def known(name: str, path: Path) -> bool:
        if path.is_dir() and not path.is_symlink():
            return name in PARTS or bool(os.listdir(path))
        return name in listed or ("/" not in name and path.is_file() and not path.is_symlink())

    return sorted(name for name, path in _paths(directory) if not known(name, path))


def _paths(directory: Path) -> Iterator[tuple[str, Path]]:
    """Everything in an output, by name, except SHA256SUMS and the files of an unfinished job."""
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if name not in (SUMS, MARKER) and name.split("/")[0] != "job":
            yield name, path


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
