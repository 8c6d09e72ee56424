"""Text files: documents parted by blank lines, or a file a document.

Blocks are cut at blank lines as bytes, so that the work is by document and not by line.
"""

import re
from collections.abc import Iterator

from bert_jax.storage.compression import OnRead, ignore_progress
from data_prep.readers.file_blocks import file_blocks
from data_prep.readers.refusal import Items, Refusal, check

# A document is held whole, so one that never ends (a file without blank lines) is refused.
MAX_DOCUMENT_BYTES = 1 << 26
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# The characters that str.isspace() knows, in UTF-8, but the line feed.
_SPACE = rb"[\t\v\f\r\x1c-\x1f ]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
_BLANK_LINES = re.compile(rb"\n(?:(?:" + _SPACE + rb")*+\n)+")
_BLANK = re.compile(rb"(?:\n|" + _SPACE + rb")*+")


def whole_lines(path: str, on_read: OnRead = ignore_progress) -> Iterator[bytes | None]:
    """A file in pieces that end with a line feed (the last is given one), without byte-order mark.

    None stands for a line of more than MAX_DOCUMENT_BYTES. Raises Refusal as `file_blocks` does.
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
    """A document whose end has not come yet."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pieces: list[bytes] = []
        self._size = 0
        self._line = 1

    def add(self, piece: bytes, line: int) -> None:
        """Takes lines in, the first of which is line `line` of the file; what is too long is not kept."""
        if not self._size:
            self._line = line
        self._size += len(piece)
        if self._size > MAX_DOCUMENT_BYTES:
            self._pieces = []
        elif piece:
            self._pieces.append(piece)

    def overflow(self, line: int) -> None:
        """Takes note of a line that is too long to be kept."""
        if not self._size:
            self._line = line
        self._pieces, self._size = [], MAX_DOCUMENT_BYTES + 1

    def end(self) -> Items:
        """The document, if there is one, without line ends around it; another may then begin."""
        text, size = b"".join(self._pieces), self._size
        self._pieces, self._size = [], 0
        if size > MAX_DOCUMENT_BYTES:
            yield too_long(f"{self._path}, line {self._line}")
        elif text := _line_feeds(text).strip(b"\n"):
            yield check(text, self._path, self._line)


def text_documents(path: str, on_read: OnRead = ignore_progress) -> Items:
    """The documents of a text file, one at a time; blank lines part them.

    Lines lose their line end (LF or CRLF) and nothing else; lines of white space only count as blank. Memory is that
    of the longest document. A file that breaks off ends with a Refusal; the unfinished document is part of that.
    """
    document = _Document(path)
    line = 1  # of the file, where the next piece begins
    try:
        for piece in whole_lines(path, on_read):
            if piece is None:
                document.overflow(line)
                line += 1
                continue
            # A line feed in front, so that the first line is seen to be blank like any other.
            data, begin, feeds, here = b"\n" + piece, 1, 0, line
            for blank in _BLANK_LINES.finditer(data):
                document.add(data[begin : blank.start()], here)
                yield from document.end()
                feeds += data.count(b"\n", begin, blank.end())
                begin, here = blank.end(), line + feeds
            document.add(data[begin:], here)
            line += feeds + data.count(b"\n", begin)
    except Refusal as refusal:
        yield refusal
        return
    yield from document.end()


def file_document(path: str, on_read: OnRead = ignore_progress) -> Items:
    """A text file as one document, blank lines and all; nothing when it holds white space only."""
    document = _Document(path)
    try:
        for block in file_blocks(path, on_read):
            document.add(block, 1)
    except Refusal as refusal:
        yield refusal
        return
    for item in document.end():
        if isinstance(item, bytes):
            item = item.removeprefix(BYTE_ORDER_MARK)
            if _BLANK.fullmatch(item):
                return
        yield item


def too_long(where: str) -> Refusal:
    advice = "Part the documents of the file by blank lines"
    return Refusal("document_too_long", where, f"a document of more than {MAX_DOCUMENT_BYTES >> 20} MiB", advice)


def _line_feeds(text: bytes) -> bytes:
    return text.removesuffix(b"\n").removesuffix(b"\r").replace(b"\r\n", b"\n") if b"\r" in text else text
