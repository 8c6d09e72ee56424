"""The content of .bz2, .gz, .xz and .zst files as streams of bytes. Imports no jax."""

import bz2
import contextlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

import pyarrow as pa

from bert_jax.storage.remote import BinaryFile, first_line, open_stream

SUFFIXES = (".gz", ".xz", ".zst", ".bz2")
# Large enough that the cost of a call vanishes, small enough that memory does not matter.
BLOCK_BYTES = 1 << 16
_INPUT_BYTES = 1 << 16
_BUFFER_BYTES = 1 << 17
_READ_AHEAD = 2 * _INPUT_BYTES  # a decompressor holds at most one input that it has not decompressed yet

OnRead = Callable[[int], None]


class DamagedFile(Exception):
    """A compressed file is corrupt or truncated. The message says which."""


def ignore_progress(size: int) -> None:
    """An OnRead that does nothing."""


def suffixes(path: str) -> tuple[str, str]:
    """The suffixes of a file's content and of its compression: (".jsonl", ".gz"), (".txt", "")."""
    name = PurePath(path)
    compression = name.suffix if name.suffix in SUFFIXES else ""
    return PurePath(name.stem if compression else name.name).suffix, compression


def decompressed(stored: BinaryFile, suffix: str, buffer_bytes: int = _BUFFER_BYTES) -> io.BufferedReader:
    """The content of an open file with one of SUFFIXES, which is closed with it. Reading raises DamagedFile."""
    source = pa.CompressedInputStream(stored, "zstd") if suffix == ".zst" else _Streams(stored, suffix)
    return io.BufferedReader(_Decompressed(stored, source.read), buffer_bytes)


def read_blocks(path: str, on_read: OnRead = ignore_progress) -> Iterator[bytes]:
    """The decompressed content of a local or remote file; `on_read` gets the number of stored bytes each block took.

    Raises OSError as `open_file` does, and DamagedFile once everything that can be decompressed has been yielded.
    """
    compression = suffixes(path)[1]
    stored_bytes = content_bytes = 0  # read so far
    try:
        with (
            contextlib.closing(open_stream(path)) as stored,
            contextlib.closing(decompressed(stored, compression) if compression else stored) as opened,
        ):
            while block := opened.read(BLOCK_BYTES):
                yield block
                content_bytes += len(block)
                on_read(stored.tell() - stored_bytes)
                stored_bytes = stored.tell()
            on_read(stored.tell() - stored_bytes)
    except DamagedFile:
        yield _rest_before_damage(path, compression, stored_bytes, content_bytes)
        raise


class _Decompressed(io.RawIOBase):
    """A stream whose `read` decompresses a stored file. Turns every decompressor's errors into DamagedFile."""

    def __init__(self, stored: BinaryFile, read: Callable[[int], bytes]) -> None:
        self._stored = stored
        self._read = read

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any, /) -> int:
        try:
            piece = self._read(len(target))
        except (lzma.LZMAError, zlib.error) as error:
            raise DamagedFile(first_line(error)) from error
        except OSError as error:
            if error.errno is None:  # of the decompressor: the errors of `open_file` have a number
                raise DamagedFile(first_line(error)) from error
            raise
        target[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._stored.close()
        super().close()


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    ".bz2": bz2.BZ2Decompressor,
}


class _Streams:
    """Decompresses the concatenated streams of a .gz, .xz or .bz2 file.

    Python's LZMAFile and BZ2File are no replacement: they end silently where a stream after the first one is damaged.
    """

    def __init__(self, stored: BinaryFile, suffix: str) -> None:
        self._stored = stored
        self._suffix = suffix
        self._input = b""  # read, but not yet passed to a decompressor
        self._decompressor: Any = None  # of the current stream
        self._begun = False

    def read(self, size: int) -> bytes:
        while self._decompressor is not None or self._begin_stream():
            piece: bytes = self._decompressor.decompress(self._input, size)
            # zlib returns the input that it did not use; lzma and bz2 keep it.
            self._input = getattr(self._decompressor, "unconsumed_tail", b"")
            if self._decompressor.eof:
                self._input, self._decompressor = self._decompressor.unused_data, None
            elif not piece and not self._input:
                self._input = self._stored.read(_INPUT_BYTES)
                if not self._input:
                    raise DamagedFile("truncated")
            if piece:
                return piece
        return b""

    def _begin_stream(self) -> bool:
        """Whether another stream follows. NULs may pad the space between streams, in .xz in multiples of four."""
        padding = 0
        while True:
            self._input = self._input or self._stored.read(_INPUT_BYTES)
            if not self._begun or self._suffix == ".bz2" or not self._input.startswith(b"\0"):
                break
            rest = self._input.lstrip(b"\0")
            padding += len(self._input) - len(rest)
            self._input = rest
        if self._suffix == ".xz" and padding % 4:
            raise DamagedFile(f"{padding} NULs after a stream, which is not a multiple of 4")
        if not self._input and (self._begun or self._suffix == ".gz"):
            return False
        self._decompressor = _DECOMPRESSORS[self._suffix]()
        self._begun = True
        return True


def _rest_before_damage(path: str, compression: str, stored_bytes: int, content_bytes: int) -> bytes:
    """The content between the last block and the damage.

    A decompressor that meets damage drops what it decompressed in that call. So the file is read again, and from just
    before the damage on the decompressor gets, and returns, one byte at a time.
    """
    rest = bytearray()
    with (
        contextlib.suppress(DamagedFile),
        contextlib.closing(open_stream(path)) as stored,
        contextlib.closing(decompressed(_BytewiseTail(stored, stored_bytes - _READ_AHEAD), compression, 1)) as opened,
    ):
        while content_bytes and (block := opened.read(min(content_bytes, BLOCK_BYTES))):
            content_bytes -= len(block)
        while byte := opened.read(1):
            rest += byte
    return bytes(rest)


class _BytewiseTail(io.RawIOBase):
    """A file that, from a position on, returns one byte a read."""

    def __init__(self, stored: BinaryFile, position: int) -> None:
        self._stored = stored
        self._left = position

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        content = self._stored.read(max(1, min(size, self._left)))
        self._left -= len(content)
        return content
