"""Divides a file into ranges that workers read on their own, and finds a range's documents.

A range is from one byte of the stored file to another. Its documents begin at the first border that lies behind the
range's first byte, and end at the first border that lies behind its last byte. Both neighbours find the same borders,
so every document is in exactly one range, whatever reads it. Borders are:

    text                 the end of an empty line, or of the line that separates documents
    JSON lines           the end of a line
    text or JSON lines   in .gz by bgzip: as above, from the first block on that begins in the range
    WARC in .gz          the beginning of a member that holds a record
    Parquet              the beginning of a row group

Files of other formats and compressions, and with --document file, are one range.
"""

import contextlib
import re
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from bert_jax.storage.files import BLOCK_BYTES, DamagedFile, suffixes
from bert_jax.storage.remote import first_line, open_file
from data_prep.readers.text import refusals

RANGE_BYTES = 32 << 20
_REQUEST_BYTES = 4 << 20
_LONGEST_BORDER = 128  # bytes; a longer one is no border
_LINE_END = re.compile(rb"\n")
_EMPTY_LINE = re.compile(rb"(?<=\n)[ \t\r]{0,64}\n")
# RFC 1952, with the extra field of the BGZF format (SAM specification, 4.1), which holds the block's size - 1.
_BGZIP = re.compile(rb"\x1f\x8b\x08\x04.{6}\x06\0BC\x02\0(..)", re.DOTALL)
_BGZIP_HEAD, _BGZIP_LONGEST = 18, 1 << 16
_GZIP = 16 + zlib.MAX_WBITS
_MEMBER = re.compile(rb"\x1f\x8b\x08[\0-\x1f]")
_MEMBER_HEAD = 4096  # stored bytes that are enough to decompress the first bytes of a record


class Range(NamedTuple):
    """Some bytes of a stored file."""

    begin: int
    end: int
    size: int  # of the whole file

    @property
    def is_whole(self) -> bool:
        return (self.begin, self.end) == (0, self.size)


def divide(path: str, size: int, format: str, whole_documents: bool) -> list[Range]:
    """Divides a file into ranges.

    Args:
        format: Of the content, as in readers/text.py.
        whole_documents: Whether each file is one document.
    """
    compression = suffixes(path)[1]
    is_lines = format in ("text", "jsonl") and not whole_documents
    splits = (not compression and (is_lines or format == "parquet")) or (
        compression == ".gz" and (format == "warc" or (is_lines and size > RANGE_BYTES and is_bgzip(path)))
    )
    count = max(size // RANGE_BYTES, 1) if splits else 1
    return [Range(size * index // count, size * (index + 1) // count, size) for index in range(count)]


def is_bgzip(path: str) -> bool:
    with refusals(path), contextlib.closing(open_file(path)) as file:
        return _BGZIP.match(file.read(_BGZIP_HEAD)) is not None


def content(path: str, span: Range, format: str, separator: str) -> Iterator[bytes]:
    """Yields the content of the documents in a range of text, JSON lines or WARC, block by block.

    Args:
        separator: The line between documents of text; "" for an empty one.

    Raises:
        Refusal: As `text.file_blocks`.
    """
    blocks = _member_blocks(path, span) if format == "warc" else _line_blocks(path, span, format, separator)
    return filter(None, blocks)  # to readers, an empty block is the end


def _line_blocks(path: str, span: Range, format: str, separator: str) -> Iterator[bytes]:
    border = _LINE_END if format == "jsonl" else _EMPTY_LINE
    if separator:
        border = re.compile(rb"(?<=\n)[ \t]{0,16}" + re.escape(separator.strip().encode()) + rb"[ \t\r]{0,16}\n")
    stored = _inflated if suffixes(path)[1] else _stored
    with refusals(path):
        inside, after = stored(path, span.begin, span.end), stored(path, span.end, span.size)
        if span.begin:
            yield b"\n"  # so that no reader takes the first line for the beginning of the file
        yield from _between(inside, after, border, span.begin == 0)


def _between(
    inside: Iterator[bytes], after: Iterator[bytes], border: re.Pattern[bytes], is_begun: bool
) -> Iterator[bytes]:
    """Yields the content between the first border in inside + after, and the first one in `after` alone.

    Args:
        is_begun: Whether the content begins with `inside` instead.
    """
    before = b""  # the last bytes, in which a border may begin
    for block in inside:
        if not is_begun and (match := border.search(before + block)):
            is_begun, block = True, block[match.end() - len(before) :]
        if is_begun:
            yield block
        else:
            before = (before + block)[-_LONGEST_BORDER:]
    behind = b""  # as `before`, in `after` alone
    for block in after:
        # A border that begins in the range and ends behind it is the range's first one, but not the next range's.
        begin = end = None
        if not is_begun and (match := border.search(before + block)):
            is_begun, begin = True, match.end() - len(before)
        if match := border.search(behind + block):
            end = match.end() - len(behind)
        if is_begun:
            yield block[begin:end]
        if end is not None:
            return
        before, behind = (before + block)[-_LONGEST_BORDER:], (behind + block)[-_LONGEST_BORDER:]


def _stored(path: str, begin: int, end: int) -> Iterator[bytes]:
    """Yields the stored bytes of a range. The file is opened when the first block is asked for."""
    if begin >= end:
        return
    with contextlib.closing(open_file(path)) as file:
        file.seek(begin)
        while begin < end and (request := file.read(min(_REQUEST_BYTES, end - begin))):
            begin += len(request)
            for start in range(0, len(request), BLOCK_BYTES):
                yield request[start : start + BLOCK_BYTES]


def _inflated(path: str, begin: int, end: int) -> Iterator[bytes]:
    """Yields the content of the bgzip blocks that begin in a range."""
    buffer, position, is_begun = b"", begin, begin == 0  # `position` in the file of the buffer's first byte
    for block in _stored(path, begin, end + _BGZIP_LONGEST):  # the last block may end behind the range
        buffer += block
        if not is_begun:
            match = _BGZIP.search(buffer)
            cut = match.start() if match else max(len(buffer) - _BGZIP_HEAD, 0)
            buffer, position, is_begun = buffer[cut:], position + cut, match is not None
        while is_begun and position < end and (head := _BGZIP.match(buffer)):
            size = int.from_bytes(head[1], "little") + 1
            if size > len(buffer):
                break
            yield from _decompressed(zlib.decompressobj(_GZIP), buffer[:size])
            buffer, position = buffer[size:], position + size
    if is_begun and buffer and position < end:
        yield from _decompressed(zlib.decompressobj(_GZIP), buffer)
        raise DamagedFile("truncated")
    if is_begun and buffer and not _BGZIP.match(buffer):  # the next range would search for a block behind it
        raise DamagedFile("a bgzip block is damaged, or the file is truncated")


def _member_blocks(path: str, span: Range) -> Iterator[bytes]:
    """Yields the content of the gzip members that begin in a range, from the first one that begins with a record on."""
    with refusals(path):
        stored = _stored(path, span.begin, span.size)
        buffer, position, is_begun = b"", span.begin, span.begin == 0
        decompressor: Any = None  # of the current member
        while True:
            # Between members, enough is read to recognize the next one.
            while len(buffer) < (_MEMBER_HEAD if decompressor is None else 1) and (block := next(stored, b"")):
                buffer += block
            if not buffer:
                if decompressor is not None:
                    raise DamagedFile("truncated")
                return
            if decompressor is None:
                cut = 0 if is_begun else _next_record(buffer)
                buffer, position, is_begun = buffer[cut:], position + cut, is_begun or _is_record(buffer[cut:])
                # A member that continues a record belongs to the range in which the record begins.
                if position >= span.end and (not is_begun or _is_record(buffer)):
                    return
                if not is_begun:
                    continue
                decompressor = zlib.decompressobj(_GZIP)
            yield from _decompressed(decompressor, buffer)
            position += len(buffer) - len(decompressor.unused_data)
            buffer = decompressor.unused_data
            decompressor = None if decompressor.eof else decompressor


def _next_record(buffer: bytes) -> int:
    """Returns where the first member with a record begins, or else how many bytes hold none."""
    for match in _MEMBER.finditer(buffer):
        if _is_record(buffer[match.start() :]):
            return match.start()
    return max(len(buffer) - _MEMBER_HEAD, 1)


def _is_record(buffer: bytes) -> bool:
    try:
        return zlib.decompressobj(_GZIP).decompress(buffer[:_MEMBER_HEAD], 5) == b"WARC/"
    except zlib.error:
        return False


def _decompressed(decompressor: Any, stored: bytes) -> Iterator[bytes]:
    """Yields the content of stored bytes, or all of it that comes before damage. Raises DamagedFile behind it."""
    before = decompressor.copy()
    try:
        content = decompressor.decompress(stored)
    except zlib.error as error:
        # A decompressor drops the content that comes before the damage in the same call.
        with contextlib.suppress(zlib.error):
            for byte in stored:
                yield before.decompress(bytes([byte]))
        raise DamagedFile(first_line(error)) from error
    yield content
