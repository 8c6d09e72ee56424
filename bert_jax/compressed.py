"""What .gz, .xz and .zst files hold, as streams of bytes. Imports no jax."""

import io
import lzma
import zlib
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

SUFFIXES = (".gz", ".xz", ".zst")
# What reading a damaged file raises; of a .zst, pyarrow raises an OSError without errno.
DAMAGE = (EOFError, lzma.LZMAError, zlib.error)
_READ_BYTES = 1 << 16
_BUFFER_BYTES = 1 << 17


@runtime_checkable
class Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...
    def close(self) -> object: ...


def decompressed(stored: Readable, suffix: str, buffer_bytes: int = _BUFFER_BYTES) -> io.BufferedReader:
    """What a stored file of one of SUFFIXES holds. Closes it when closed.

    Reading raises what DAMAGE says, EOFError for a file that is cut short.
    """
    if suffix == ".zst":
        return io.BufferedReader(pa.CompressedInputStream(stored, "zstd"), buffer_bytes)
    return io.BufferedReader(_Decompressed(stored, suffix), buffer_bytes)


class _Decompressed(io.RawIOBase):
    """The streams of a .gz or .xz, one after another. Python's LZMAFile ends silently where a later one is damaged."""

    def __init__(self, stored: Readable, suffix: str) -> None:
        self._stored = stored
        self._suffix = suffix
        self._input = b""  # read and not yet given to a decompressor
        self._stream: Any = None  # the decompressor of the stream that is being read
        self._begun = False

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any, /) -> int:
        while self._stream is not None or self._begin():
            piece = self._stream.decompress(self._input, len(target))
            self._input = getattr(self._stream, "unconsumed_tail", b"")  # that of lzma stays in the decompressor
            if self._stream.eof:
                self._input, self._stream = self._stream.unused_data, None
            elif not piece and not self._input:
                self._input = self._stored.read(_READ_BYTES)
                if not self._input:
                    raise EOFError("it ends before its end-of-stream marker")
            if piece:
                target[: len(piece)] = piece
                return len(piece)
        return 0

    def _begin(self) -> bool:
        """Whether one more stream follows. Between streams and after the last NULs may stand, in .xz in fours."""
        padding = 0
        while True:
            self._input = self._input or self._stored.read(_READ_BYTES)
            if not self._begun or not self._input.startswith(b"\0"):
                break
            rest = self._input.lstrip(b"\0")
            padding += len(self._input) - len(rest)
            self._input = rest
        xz = self._suffix == ".xz"
        if xz and padding % 4:
            raise lzma.LZMAError(f"{padding} NULs after a stream, which is no multiple of 4")
        if not self._input and (self._begun or not xz):
            return False
        self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ) if xz else zlib.decompressobj(16 + zlib.MAX_WBITS)
        self._begun = True
        return True

    def close(self) -> None:
        self._stored.close()
        super().close()
