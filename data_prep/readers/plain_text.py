"""Text files: documents separated by blank lines or by another line, or one document per file."""

import re
from collections.abc import Callable, Iterator

from bert_jax.storage.compression import OnRead, ignore_progress
from data_prep.readers import input_format
from data_prep.readers.file_blocks import file_blocks, split_head
from data_prep.readers.refusal import Items, Refusal, check

# A document is kept in memory, so one that never ends (a file without blank lines) is refused.
MAX_DOCUMENT_BYTES = 1 << 26
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# The characters for which str.isspace() is true, in UTF-8.
_SPACE = rb"[\t-\r\x1c-\x1f ]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
_BLANK = re.compile(rb"(?:" + _SPACE + rb")*+")

Ends = Callable[[bytes], object]  # whether a line ends the document before it


def numbered_lines(path: str, on_read: OnRead = ignore_progress) -> Iterator[tuple[int, bytes | None]]:
    """The numbers, from 1, and the lines of a file, without line ends (LF or CRLF) and byte-order mark.

    None replaces a line of more than MAX_DOCUMENT_BYTES. Raises Refusal as `file_blocks` does.
    """
    return enumerate(_lines(file_blocks(path, on_read)), start=1)


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes | None]:
    begun: list[bytes] = []  # the pieces of a line whose end has not been read yet
    size, mark = 0, BYTE_ORDER_MARK
    for block in blocks:
        first, *others = block.split(b"\n")
        if others:
            line = b"".join((*begun, first)).removeprefix(mark)
            yield None if size > MAX_DOCUMENT_BYTES else line.removesuffix(b"\r")
            begun, size, mark = [], 0, b""
            first = others.pop()
            for line in others:
                yield line.removesuffix(b"\r")
        size += len(first)
        begun.append(first)
        if size > MAX_DOCUMENT_BYTES:
            begun = []
    if size > MAX_DOCUMENT_BYTES:
        yield None
    elif rest := b"".join(begun).removeprefix(mark):
        yield rest.removesuffix(b"\r")


class _Document:
    """A document whose end has not been read yet."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._text = bytearray()
        self._too_long = False
        self._line = 0  # the number of its first line

    def add(self, number: int, line: bytes | None) -> None:
        """Adds a line. The text of a document that is too long is dropped."""
        self._line = self._line or number
        self._too_long |= line is None or len(self._text) + len(line) > MAX_DOCUMENT_BYTES
        if self._too_long:
            self._text.clear()
        elif line is not None:
            self._text += line + b"\n"

    def end(self) -> Items:
        """Yields the document, unless it is blank, and prepares for the next one."""
        raw, line = bytes(self._text), self._line
        text = raw.strip(b"\n")
        line += len(raw) - len(raw.lstrip(b"\n"))  # blank lines before it are no part of it
        if self._too_long:
            yield too_long(f"{self._path}, line {line}", in_lines=True)
        elif not _BLANK.fullmatch(text):
            yield check(text, self._path, line)
        self._text.clear()
        self._too_long, self._line = False, 0


def ends(document: str = "blank_line", separator: str = "") -> Ends:
    """The rule of a Reading for the lines that separate documents. White space around a separator does not matter."""
    if document == "file":
        return lambda line: False
    if separator:
        wanted = separator.strip().encode()
        return lambda line: line.strip() == wanted
    return _BLANK.fullmatch


def text_documents(
    path: str, on_read: OnRead = ignore_progress, ends: Ends = _BLANK.fullmatch, any_content: bool = False
) -> Items:
    """The documents of a text file, one at a time, without the lines that separate them.

    Lines lose their line end (LF or CRLF) and nothing else; lines of only white space count as blank. Memory is that
    of the longest document. A truncated file raises Refusal, which stands for the unfinished document too. So does a
    file whose first bytes are those of another format, unless any_content.
    """
    blocks = file_blocks(path, on_read)
    if not any_content:
        head, blocks = split_head(blocks, input_format.HEAD_BYTES)
        input_format.check_head(path, head, "text")
    document = _Document(path)
    for number, line in enumerate(_lines(blocks), start=1):
        if line is None or not ends(line):
            document.add(number, line)
        else:
            yield from document.end()
    yield from document.end()


def too_long(where: str, in_lines: bool = False) -> Refusal:
    """The refusal of a long document; in_lines: of a file in which lines separate documents."""
    advice = "Divide it into several"
    if in_lines:
        advice = "Separate the documents of the file by blank lines, or name the line that does (--document_separator)"
    return Refusal("document_too_long", where, f"a document of more than {MAX_DOCUMENT_BYTES >> 20} MiB", advice)
