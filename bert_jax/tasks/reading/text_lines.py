"""Reads the lines of a plain or compressed text file, and detects the kind of a file from its name."""

from collections.abc import Iterator
from pathlib import Path

from bert_jax.command import UserError
from bert_jax.storage.compression import SUFFIXES as COMPRESSED
from bert_jax.storage.compression import DamagedFile, decompressed

TFDS = "tfds:"


def plain_name(path: Path) -> str:
    """A file's name without the ending of its compression."""
    return path.name.removesuffix(path.suffix) if path.suffix in COMPRESSED else path.name


def kind_of_file(path: Path) -> str:
    """`conllu`, `conll`, `squad` (.json) or `table`, by the ending of plain_name."""
    name = plain_name(path)
    if name.endswith(".conllu"):
        return "conllu"
    if name.endswith(".json"):
        return "squad"
    return "conll" if name.endswith((".conll", ".iob", ".iob2", ".bio")) else "table"


def check_file(path: Path) -> None:
    """Raises UserError for a missing file and for a folder."""
    if not path.exists():
        raise UserError(f"no such file: {path}. Check its name and folder")
    if path.is_dir():
        raise UserError(f"{path} is a folder; expected a file. Name a file in it")


def decoded_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The numbers, from 1, and the lines of a text file, with their line ends.

    Only a line feed ends a line (texts hold U+2028 and the like); a byte-order mark is dropped. Raises UserError
    for a missing file, a folder, a damaged compressed file, and bytes that are not UTF-8.
    """
    check_file(path)
    number = 0
    try:
        with path.open("rb") as stored:
            stream = decompressed(stored, path.suffix) if path.suffix in COMPRESSED else stored
            for number, line in enumerate(stream, start=1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} line {number} is not UTF-8 ({error.reason}). Convert the file to UTF-8") from error
    except DamagedFile as error:
        raise UserError(f"{path} is cut short or damaged after line {number}: {error}. Download it again") from error


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """decoded_lines without the line ends."""
    for number, line in decoded_lines(path):
        yield number, line.rstrip("\r\n")
