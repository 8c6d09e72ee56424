"""The bytes of a stored file, decompressed: .gz, .xz, .zst or plain, in blocks."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import PurePath

from bert_jax.command import explain_os_error
from bert_jax.compressed import DAMAGE, decompressed
from bert_jax.compressed import SUFFIXES as COMPRESSED
from data_prep.readers.places import Stream, first_line, is_remote, open_stream
from data_prep.readers.refusal import Refusal

# Read sizes: large enough that the cost of a call vanishes, small enough to count for nothing in memory.
BLOCK_BYTES = 1 << 20
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

    Raises Refusal when the file is missing, damaged, or of a kind that is not read, in the middle as at the beginning.
    """
    compression = suffixes(path)[1]
    if PurePath(path).suffix in NOT_READ:
        kind = PurePath(path).suffix
        raise Refusal("unreadable_file", path, f"{kind} is not read", "Give it plain, or as .gz, .xz or .zst")
    try:
        with contextlib.closing(open_stream(path)) as stored:
            position = 0
            with contextlib.closing(_opened(stored, compression)) as opened:
                while block := opened.read(BLOCK_BYTES):
                    yield block
                    on_read(stored.tell() - position)
                    position = stored.tell()
                on_read(stored.tell() - position)
    except FileNotFoundError:
        raise Refusal("unreadable_file", path, "no such file", "Check --input") from None
    except IsADirectoryError:
        advice = f"Name its files, for example '{path}/*.txt'"
        raise Refusal("folder", path, "a folder where a file was wanted", advice) from None
    except DAMAGE as error:
        raise damaged(path, "truncated" if isinstance(error, EOFError) else first_line(error)) from None
    except OSError as error:
        # pyarrow says so when a .zst is damaged, and when a store fails.
        if compression == ".zst" and not is_remote(path) and error.errno is None:
            raise damaged(path, first_line(error)) from None
        raise unreadable(path, error) from None


def damaged(path: str, what: str) -> Refusal:
    return Refusal("damaged_file", path, f"damaged file ({what[:1].lower()}{what[1:]})", "Fetch or make it again")


def unreadable(path: str, error: OSError) -> Refusal:
    what = explain_os_error(error) or first_line(error)
    return Refusal("unreadable_file", path, f"cannot be read ({what.rstrip('.')})", "Mend that")


def _opened(stored: Stream, compression: str) -> Stream:
    return decompressed(stored, compression) if compression else stored
