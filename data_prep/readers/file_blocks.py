"""The decompressed bytes of an input file, with everything that is wrong with it as a Refusal."""

import contextlib
from collections.abc import Iterator

from bert_jax.command import RunAgain, explain_os_error
from bert_jax.storage.compression import DamagedFile, OnRead, ignore_progress, read_blocks
from bert_jax.storage.remote import failure, first_line, is_remote
from data_prep.readers.refusal import Refusal


def file_blocks(path: str, on_read: OnRead = ignore_progress) -> Iterator[bytes]:
    """A file's bytes, decompressed, block by block; `on_read` gets the number of stored bytes each block took.

    Raises Refusal if the file does not exist, cannot be read or is damaged; of a damaged file, everything before the
    damage is yielded first. Raises RunAgain if a store does not answer.
    """
    with refusals(path):
        yield from read_blocks(path, on_read)


def split_head(blocks: Iterator[bytes], size: int) -> tuple[bytes, Iterator[bytes]]:
    """At least `size` first bytes of a stream, or all of it, and the same stream from its beginning.

    What its blocks raise is raised where the returned stream comes to it.
    """
    head: list[bytes] = []
    error: Refusal | None = None
    try:
        while size > 0 and (block := next(blocks, b"")):
            head.append(block)
            size -= len(block)
    except Refusal as refusal:
        error = refusal

    def whole() -> Iterator[bytes]:
        yield from head
        if error is not None:
            raise error
        yield from blocks

    return b"".join(head), whole()


@contextlib.contextmanager
def refusals(path: str) -> Iterator[None]:
    """Raises what is wrong with a file as Refusal. A store that does not answer tells nothing of it: RunAgain."""
    try:
        yield
    except FileNotFoundError:
        raise Refusal("unreadable_file", path, "no such file", "Check --input") from None
    except IsADirectoryError:
        raise folder(path) from None
    except DamagedFile as error:
        raise damaged(path, error) from None
    except OSError as error:
        if isinstance(stopping := failure(path, error), RunAgain):
            raise stopping from None
        problem = (None if is_remote(path) else explain_os_error(error)) or first_line(error)
        what = f"cannot be read ({problem.rstrip('.')})"
        raise Refusal("unreadable_file", path, what, "Correct that") from None


def folder(path: str) -> Refusal:
    return Refusal("folder", path, "expected a file, got a folder", f"Name its files, for example '{path}/*.txt'")


def damaged(path: str, error: Exception) -> Refusal:
    problem = first_line(error)
    what = f"damaged file ({problem[:1].lower()}{problem[1:]})"
    return Refusal("damaged_file", path, what, "Download or create it again")
