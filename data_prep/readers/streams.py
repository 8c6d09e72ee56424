"""The bytes of a stored file, decompressed: .gz, .xz, .zst or plain, in blocks."""

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import PurePath

from bert_jax.command import explain_os_error
from bert_jax.compressed import DAMAGE, decompressed
from bert_jax.compressed import SUFFIXES as COMPRESSED
from data_prep.readers.places import Stream, first_line, is_remote, open_stream
from data_prep.readers.refusal import Refusal

# Read sizes: large enough that the cost of a call vanishes, small enough to count for nothing in memory.
BLOCK_BYTES = 1 << 16
_READ_AHEAD = 1 << 17  # a decompressor has at most 64 KiB that it was given and has not made anything of
NOT_READ = (".bz2", ".zip", ".7z", ".rar", ".lz4", ".br", ".tar", ".tgz")

OnRead = Callable[[int], None]


def nothing(size: int) -> None:
    """An OnRead for whom progress does not matter."""


def suffixes(path: str) -> tuple[str, str]:
    """What a file holds and how it is compressed, by its name: (".jsonl", ".gz"), (".txt", "")."""
    name = PurePath(path)
    compression = name.suffix if name.suffix in COMPRESSED else ""
    return PurePath(name.stem if compression else name.name).suffix, compression


def blocks(path: str, on_read: OnRead = nothing) -> Iterator[bytes]:
    """A file's bytes, decompressed, a block at a time; `on_read` is told how many stored bytes each one took.

    Raises Refusal when the file is missing, damaged, or of a kind that is not read, in the middle as at the beginning;
    of a damaged one after all that can be decompressed, whatever the size of blocks.
    """
    compression = suffixes(path)[1]
    if PurePath(path).suffix in NOT_READ:
        kind = PurePath(path).suffix
        raise Refusal("unreadable_file", path, f"{kind} is not read", "Give it plain, or as .gz, .xz or .zst")
    position = given = 0  # of the bytes as stored, and as decompressed
    try:
        with (
            contextlib.closing(open_stream(path)) as stored,
            contextlib.closing(_opened(stored, compression)) as opened,
        ):
            while block := opened.read(BLOCK_BYTES):
                yield block
                given += len(block)
                on_read(stored.tell() - position)
                position = stored.tell()
            on_read(stored.tell() - position)
    except FileNotFoundError:
        raise Refusal("unreadable_file", path, "no such file", "Check --input") from None
    except IsADirectoryError:
        advice = f"Name its files, for example '{path}/*.txt'"
        raise Refusal("folder", path, "a folder where a file was wanted", advice) from None
    except DAMAGE as error:
        yield _up_to_damage(path, compression, position, given)
        raise damaged(path, "truncated" if isinstance(error, EOFError) else first_line(error)) from None
    except OSError as error:
        # pyarrow says so when a .zst is damaged, and when a store fails.
        if compression == ".zst" and not is_remote(path) and error.errno is None:
            yield _up_to_damage(path, compression, position, given)
            raise damaged(path, first_line(error)) from None
        raise unreadable(path, error) from None


def damaged(path: str, what: str) -> Refusal:
    return Refusal("damaged_file", path, f"damaged file ({what[:1].lower()}{what[1:]})", "Fetch or make it again")


def unreadable(path: str, error: OSError) -> Refusal:
    what = explain_os_error(error) or first_line(error)
    return Refusal("unreadable_file", path, f"cannot be read ({what.rstrip('.')})", "Mend that")


def _opened(stored: Stream, compression: str) -> Stream:
    return decompressed(stored, compression) if compression else stored


def _up_to_damage(path: str, compression: str, position: int, given: int) -> bytes:
    """What stands between the last block and the damage.

    A decompressor that meets damage drops what it made in that call, so the file is read again, and of what is left the
    decompressor is given, and asked for, single bytes.
    """
    rest = bytearray()
    with (
        contextlib.suppress(*DAMAGE, OSError),
        contextlib.closing(open_stream(path)) as stored,
        contextlib.closing(decompressed(_Drops(stored, position - _READ_AHEAD), compression, 1)) as opened,
    ):
        while given and (block := opened.read(min(given, BLOCK_BYTES))):
            given -= len(block)
        while byte := opened.read(1):
            rest += byte
    return bytes(rest)


class _Drops(io.RawIOBase):
    """A stored file that from a place on gives single bytes."""

    def __init__(self, stored: Stream, begin: int) -> None:
        self._stored = stored
        self._left = begin  # before that place

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        content = self._stored.read(max(1, min(size, self._left)))
        self._left -= len(content)
        return content
