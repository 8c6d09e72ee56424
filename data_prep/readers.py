"""Text in: files by glob, and their documents one at a time, however large the file, compressed or not.

A blank line parts documents; the lines of a document stay separated by a newline.
"""

import glob
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

from bert_jax.command import UserError

# Read sizes: large enough that the cost of a call vanishes, small enough to count for nothing in memory.
BUFFER_BYTES = 1 << 20
# A document is held whole, so one that never ends (a file without blank lines) is refused.
MAX_DOCUMENT_CHARACTERS = 1 << 28


def expand(pattern: str) -> list[Path]:
    """The sorted files of a glob, or of several parted by commas (`books/*.txt.xz,more/**/*.txt`).

    Each file comes once, whichever patterns and links name it. Raises UserError when a pattern matches nothing.
    """
    found: dict[Path, Path] = {}  # by what is at the end of links and dots
    parts = [part.strip() for part in pattern.split(",") if part.strip()]
    # A name with a comma in it is a name first, and several patterns only if there is no such file.
    for part in parts if len(parts) > 1 and not _matches(pattern) else [pattern.strip()]:
        matches = _matches(part)
        files = {Path(match) for match in matches if not Path(match).is_dir()}
        if not files and matches:
            raise UserError(f"--input {part} is a folder. Name its files, for example '{part.rstrip('/')}/*.txt'")
        if not files:
            raise UserError(f"--input {part!r} matches no file. Check the path, and quote the pattern")
        for file in sorted(files):
            found.setdefault(file.resolve(), file)
    return sorted(found.values())


def _matches(pattern: str) -> list[str]:
    """What a pattern names; what is a name as it stands, perhaps with a bracket in it, is not taken as a pattern."""
    return [pattern] if pattern and os.path.exists(pattern) else glob.glob(pattern, recursive=True)


def documents(path: str | Path, on_read: Callable[[int], None] = lambda size: None) -> Iterator[str]:
    """The documents of a text file (.txt or any other name; also .gz, .xz), one at a time.

    Lines lose their line end (LF or CRLF) and nothing else; lines of white space only count as blank. Memory is
    that of the longest document. `on_read` is told now and then how many more bytes of the file, as it lies on the
    disk, were read. Raises UserError for a missing or truncated file, a folder, and text that is not UTF-8.
    """
    lines: list[str] = []
    characters = 0
    for line in text_lines(path, on_read):
        if line and not line.isspace():
            lines.append(line)
            characters += len(line)
            if characters > MAX_DOCUMENT_CHARACTERS:
                raise UserError(
                    f"{path}: a document of more than {MAX_DOCUMENT_CHARACTERS} characters. "
                    "Part the documents of the file by blank lines"
                )
        elif lines:
            yield "\n".join(lines)
            lines, characters = [], 0
    if lines:
        yield "\n".join(lines)


def text_lines(path: str | Path, on_read: Callable[[int], None] = lambda size: None) -> Iterator[str]:
    """The lines of a plain, .gz or .xz text file, without line ends (LF, CRLF) and byte-order mark.

    Raises UserError as `documents` does.
    """
    path = Path(path)
    number = 0
    try:
        with _open(path) as stored:
            for number, raw in enumerate(_raw_lines(stored, path, on_read), start=1):
                line = raw.decode("utf-8")
                yield line.removeprefix("\ufeff") if number == 1 else line
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}, line {number}: not UTF-8 (byte 0x{error.object[error.start]:02x} in column {error.start + 1})"
            ". Convert the file, for example with iconv -t UTF-8"
        ) from None
    except FileNotFoundError:
        raise UserError(f"no such file: {path}. Check --input") from None
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        reason = "truncated" if isinstance(error, EOFError) else str(error).lower()
        raise UserError(
            f"{path}: damaged compressed file ({reason}) after line {number}. Fetch or compress it again"
        ) from None


def _open(path: Path) -> IO[bytes]:
    if path.is_dir():
        raise UserError(f"{path} is a folder where a text file was wanted. Name its files, for example '{path}/*.txt'")
    if path.suffix in (".zst", ".bz2", ".zip", ".jsonl", ".parquet"):
        raise UserError(f"{path}: {path.suffix} is not read. Give plain text, or text compressed as .gz or .xz")
    return open(path, "rb")


def _raw_lines(stored: IO[bytes], path: Path, on_read: Callable[[int], None]) -> Iterator[bytes]:
    """Lines parted by LF alone, as bytes: so a decoding error knows its line."""
    text: IO[bytes] = stored
    if path.suffix == ".xz":
        text = lzma.LZMAFile(stored)  # noqa: SIM115 (the caller closes what it wraps)
    elif path.suffix == ".gz":
        text = cast(IO[bytes], gzip.GzipFile(fileobj=stored))
    rest = b""
    position = 0
    while block := text.read(BUFFER_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
        if len(rest) > MAX_DOCUMENT_CHARACTERS:
            raise UserError(f"{path}: a line of more than {MAX_DOCUMENT_CHARACTERS} bytes. Is this a text file?")
        on_read(stored.tell() - position)
        position = stored.tell()
    if rest:
        yield rest.removesuffix(b"\r")
