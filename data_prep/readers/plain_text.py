"""Text files: documents separated by blank lines, or one document per file.

Blocks of bytes are split at blank lines, so the cost is per document and not per line.
"""

import re
from collections.abc import Iterator

from bert_jax.storage.compression import OnRead, ignore_progress
from data_prep.readers.file_blocks import file_blocks
from data_prep.readers.refusal import Items, Refusal, check

# A document is kept in memory, so one that never ends (a file without blank lines) is refused.
MAX_DOCUMENT_BYTES = 1 << 26
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# The characters for which str.isspace() is true, in UTF-8, without the line feed.
_SPACE = rb"[\t\v\f\r\x1c-\x1f ]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
_BLANK_LINES = re.compile(rb"\n(?:(?:" + _SPACE + rb")*+\n)+")
_BLANK = re.compile(rb"(?:\n|" + _SPACE + rb")*+")


def whole_lines(path: str, on_read: OnRead = ignore_progress) -> Iterator[bytes | None]:
    """A file in pieces that end with a line feed (added to the last one), without byte-order mark.

    None replaces a line of more than MAX_DOCUMENT_BYTES. Raises Refusal as `file_blocks` does.
    """
    parts: list[bytes] = []
    size, too_long, mark = 0, False, BYTE_ORDER_MARK
    for block in file_blocks(path, on_read):
        end = block.rfind(b"\n") + 1
        if end:
            if too_long:
                yield None
                piece, too_long = block[block.find(b"\n") + 1 : end], False
            else:
                piece = b"".join((*parts, block[:end])).removeprefix(mark)
            mark = b""
            if piece:
                yield piece
            parts, size = [], 0
        if not too_long:
            parts.append(block[end:])
            size += len(block) - end
            if size > MAX_DOCUMENT_BYTES:
                parts, size, too_long = [], 0, True
    if too_long:
        yield None
    elif rest := b"".join(parts).removeprefix(mark):
        yield rest + b"\n"


class _Document:
    """A document whose end has not been read yet."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pieces: list[bytes] = []
        self._size = 0
        self._line = 1

    def add(self, piece: bytes | None, line: int) -> None:
        """Adds lines, the first of which is line `line` of the file, or None for a line that is too long to be kept.

        A document that is too long is not kept either.
        """
        if not self._size:
            self._line = line
        self._size += MAX_DOCUMENT_BYTES + 1 if piece is None else len(piece)
        if self._size > MAX_DOCUMENT_BYTES:
            self._pieces = []
        elif piece:
            self._pieces.append(piece)

    def end(self) -> Items:
        """Yields the document, if there is one, without surrounding line ends, and prepares for the next one."""
        text, size = b"".join(self._pieces), self._size
        self._pieces, self._size = [], 0
        if size > MAX_DOCUMENT_BYTES:
            yield too_long(f"{self._path}, line {self._line}")
        elif text := _line_feeds(text).strip(b"\n"):
            yield check(text, self._path, self._line)


def text_documents(path: str, on_read: OnRead = ignore_progress) -> Items:
    """The documents of a text file, separated by blank lines, one at a time.

    Lines lose their line end (LF or CRLF) and nothing else; lines of only white space count as blank. Memory is that
    of the longest document. A truncated file raises a Refusal, which stands for the unfinished document too.
    """
    document = _Document(path)
    line = 1  # on which the next piece begins
    for piece in whole_lines(path, on_read):
        if piece is None:
            document.add(None, line)
            line += 1
            continue
        # With a line feed in front, the expression finds a blank first line like any other.
        data, begin, feeds, here = b"\n" + piece, 1, 0, line
        for blank in _BLANK_LINES.finditer(data):
            document.add(data[begin : blank.start()], here)
            yield from document.end()
            feeds += data.count(b"\n", begin, blank.end())
            begin, here = blank.end(), line + feeds
        document.add(data[begin:], here)
        line += feeds + data.count(b"\n", begin)
    yield from document.end()


def file_document(path: str, on_read: OnRead = ignore_progress) -> Items:
    """A text file as one document with its blank lines; nothing if it holds only white space."""
    document = _Document(path)
    for block in file_blocks(path, on_read):
        document.add(block, 1)
    for item in document.end():
        if isinstance(item, bytes):
            item = item.removeprefix(BYTE_ORDER_MARK)
            if _BLANK.fullmatch(item):
                return
        yield item


def too_long(where: str) -> Refusal:
    advice = "Separate the documents of the file by blank lines"
    return Refusal("document_too_long", where, f"a document of more than {MAX_DOCUMENT_BYTES >> 20} MiB", advice)


def _line_feeds(text: bytes) -> bytes:
    return text.removesuffix(b"\n").removesuffix(b"\r").replace(b"\r\n", b"\n") if b"\r" in text else text
