"""Files and folders on disk that are either complete or absent, whenever the process stops (law 7).

Read `write_atomic`, `atomic_file` and `atomic_folder` first: they write under a temporary name next to the target and
rename it at the end. Single files are flushed to disk before that; in folders, readers detect missing content by
hashes. After them come compressed files as streams, temporary folders, and the refusal of pickles.
"""

import bz2
import contextlib
import errno
import fcntl
import io
import json
import lzma
import os
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import IO, Any

import pyarrow as pa
import zstandard

from bert_jax.errors import UserError
from bert_jax.storage.remote import BinaryFile, as_address, first_line, is_remote, open_stream

INCOMPLETE = ".incomplete"  # suffix for the name of an unfinished folder or long file
# Marks an unfinished folder, so that atomic_folder may replace it. A kill can leave it in a complete folder.
MARKER = ".made_by_bert_jax"
_TEMPORARY = ".tmp"


def incomplete_path(path: Path) -> Path:
    """The name of a folder or long file while it is unfinished."""
    return path.parent / (path.name + INCOMPLETE)


def as_typed(path: str) -> str:
    """A path as a user would type it: relative if it is below the current folder."""
    absolute_path, here = Path(path), Path.cwd()
    return str(absolute_path.relative_to(here)) if absolute_path.is_relative_to(here) else path


def write_atomic(path: Path, content: bytes | memoryview | Iterable[bytes | memoryview]) -> None:
    """Writes a file, from bytes or from blocks, as `atomic_writer` does."""
    with atomic_writer(path) as file:
        for block in (content,) if isinstance(content, bytes | memoryview) else content:
            file.write(block)


@contextlib.contextmanager
def atomic_writer(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file to write under a temporary name. At the end of the block, flushes it to disk and renames it.

    If the disk or the block raises an error, neither the file nor the temporary one remains.
    """
    # The name is fixed, so that the next write replaces what a killed process left.
    unfinished = path.with_name(path.name + _TEMPORARY)
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException as error:
        _add_path(error, path)
        unfinished.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON document atomically."""
    write_atomic(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """A JSON document as a file's content. Path bytes that are not UTF-8 are escaped as Python escapes them."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        UserError: the file is missing, is not valid JSON, or holds another type.
    """
    try:
        return parse_json(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise UserError(f"no {path.name} in {path.parent}. Check the path") from error


def parse_json(content: bytes, name: str) -> dict[str, Any]:
    """Parses a JSON file's content, which must be an object.

    Raises:
        UserError: the content is anything else. The message names the file.
    """
    try:
        values = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not valid JSON ({error}). Create or download it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{name} is not a JSON object. Create or download it again")
    return values


def format_of_ending(path: str | Path, known: Mapping[str, str], name: str = "--output") -> str:
    """Returns the format that the ending of a file's name means.

    Args:
        known: The formats by ending, such as .csv; "" is the ending of a name without one.
        name: What names the file, for the message.

    Raises:
        UserError: The ending is unknown.
    """
    ending = Path(path).suffix.lower()
    if ending not in known:
        endings = ", ".join(filter(None, known))
        raise UserError(f"{name} is {path}, but files that end in {ending or 'nothing'} are not written; use {endings}")
    return known[ending]


def refuse_existing(output: Path) -> None:
    """Checks that an output can be created.

    Raises:
        UserError: the output exists (nothing is overwritten) or is in an object store, or its name is not UTF-8 or is
            reserved for unfinished outputs.
    """
    # Arrow opens files by UTF-8 names only, so it would fail after hours of work.
    try:
        str(output).encode()
    except UnicodeEncodeError:
        raise UserError(f"output {str(output)!r} is not UTF-8. Choose another --output") from None
    problem = ""
    if output.name.endswith(INCOMPLETE):
        problem = f"ends in {INCOMPLETE}, which is reserved for unfinished outputs. Choose another --output"
    elif is_remote(output):
        problem = (
            "is in an object store. Choose a local folder, and copy it when it is complete "
            "(shards: bert-jax copy-examples)"
        )
    elif output.exists():
        problem = "exists. Choose another --output, or remove it first"
    if problem:
        raise UserError(f"output {as_address(output)} {problem}")


def refuse_inside(output: Path, folder: Path) -> None:
    """Refuses an output inside a finished folder, because that folder lists all its files."""
    if Path(os.path.realpath(output)).is_relative_to(os.path.realpath(folder)) and output != folder:
        raise UserError(f"output {output} is inside {folder}. Choose an --output outside of it")


def lock(path: Path, mode: str = "ab") -> IO[bytes]:
    """Opens and locks a file. Closing it, or the end of the process, releases the lock.

    Raises:
        UserError: another job holds the lock, or has just renamed or removed the file.
    """
    try:
        with contextlib.ExitStack() as closing:
            file = closing.enter_context(path.open(mode))
            try_lock(file)  # on a file system without locks, users keep their jobs apart themselves
            # The holder may have finished, and renamed or removed the file, between our open and our lock.
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise FileNotFoundError
            closing.pop_all()
    except (BlockingIOError, FileNotFoundError):
        unfinished = next((folder for folder in (path, *path.parents) if folder.name.endswith(INCOMPLETE)), path)
        raise _locked(unfinished) from None
    return file


def _locked(unfinished: Path) -> UserError:
    return UserError(f"another job is writing {unfinished}; wait for it, or choose another --output")


def try_lock(file: IO[bytes], operation: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> bool:
    """Locks an open file until it is closed or its process ends.

    Returns:
        False if the file system has no locks, as Lustre and NFS are often mounted.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        return False
    return True


def wait_for_lock(file: IO[bytes]) -> bool:
    """Locks an open file as `try_lock` does, once no other process has."""
    return try_lock(file, fcntl.LOCK_EX)


@contextlib.contextmanager
def atomic_folder(directory: str | Path, resumes: bool = False) -> Iterator[Path]:
    """Creates DIR.incomplete to write into and renames it to DIR at the end. An exception removes it.

    The leftover of a killed run is replaced.

    Args:
        resumes: Keeps the files of a run that failed or was killed, for the next one.

    Raises:
        UserError: DIR exists, another job is writing it, or DIR.incomplete holds files but no MARKER, so it is no such
            leftover.
    """
    directory = Path(directory)
    refuse_existing(directory)
    unfinished = incomplete_path(directory)
    marker = unfinished / MARKER
    unknown = UserError(
        f"{unfinished} already exists and was not left by an interrupted run. Move it, or choose another --output"
    )
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        present = os.listdir(unfinished)
    except FileExistsError:
        raise unknown from None
    except FileNotFoundError:
        # Another job renamed or removed the folder between the two calls.
        raise _locked(unfinished) from None
    if present and MARKER not in present:
        raise unknown
    # "r+b" does not create the marker: if it was listed and is gone, another job has just finished this output.
    with lock(marker, "r+b" if present else "ab"):
        try:
            refuse_existing(directory)  # the previous holder of the lock may have finished
            for path in () if resumes else unfinished.iterdir():
                if path != marker:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            yield unfinished
            # In this order: without the marker, a kill in between would leave a folder that no later job replaces.
            unfinished.rename(directory)
            with contextlib.suppress(OSError):  # the output is complete, and readers ignore the marker
                (directory / MARKER).unlink()
        except BaseException as error:
            _add_path(error, directory)
            if resumes:
                raise
            # Threads of a failed writer may still be writing, so it takes several attempts.
            for _ in range(20):
                shutil.rmtree(unfinished, ignore_errors=True)
                time.sleep(0.1)
                if not unfinished.exists():
                    break
            raise


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens FILE.incomplete for sequential writing and renames it to FILE at the end. An exception removes it.

    The leftover of a killed run is overwritten.

    Raises:
        UserError: FILE exists, or another job is writing it.
    """
    refuse_existing(path)
    unfinished = incomplete_path(path)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    with lock(unfinished) as file:
        try:
            refuse_existing(path)  # the previous holder of the lock may have finished
            # The lock needs an open file, and opening for writing would empty another job's file before the lock is
            # ours. So the file is opened for appending, and emptied only now.
            file.seek(0)
            file.truncate()
            yield file
            file.flush()
            # After a power failure, a rename may be on the disk without the content that was written before it.
            os.fsync(file.fileno())
            unfinished.rename(path)
        except BaseException as error:
            _add_path(error, path)
            # Removed while the lock is held, so that it cannot be another job's file.
            unfinished.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Adds a path to OSErrors without one, so that e.g. a message about a full disk names the disk."""
    try:
        yield
    except OSError as error:
        _add_path(error, path)
        raise


def naming_temporary() -> contextlib.AbstractContextManager[None]:
    """Names TMPDIR in the block's OSErrors without a path."""
    return naming(f"the temporary folder {tempfile.gettempdir()} (TMPDIR)")


def _add_path(error: BaseException, path: str | Path) -> None:
    """Adds the output's path to an OSError without one, as a full disk raises it."""
    if isinstance(error, OSError):
        error.filename = error.filename or str(path)


# The content of .bz2, .gz, .xz and .zst files as streams of bytes.

SUFFIXES = (".gz", ".xz", ".zst", ".bz2")
# Large enough that the cost of a call vanishes, small enough that memory does not matter.
BLOCK_BYTES = 1 << 16
_INPUT_BYTES = 1 << 16
_BUFFER_BYTES = 1 << 17
_READ_AHEAD = 2 * _INPUT_BYTES  # a decompressor holds at most one input that it has not decompressed yet
# The largest window with which pyarrow decompresses .zst; `zstd --long` makes larger ones, up to 2 GiB.
_PYARROW_WINDOW = (1 << 27) + 1
# By pyarrow's message, why it does not read a .zst that may be intact.
_UNSUPPORTED = {
    "Dictionary mismatch": "it was compressed with a dictionary. Store it without one: zstd -dc -D DICTIONARY FILE | "
    "zstd -o NEW_FILE",
}
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".zst": lambda: _LongWindowFrame(),
    # 16: with the header and the checksum of gzip.
    ".gz": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    ".bz2": bz2.BZ2Decompressor,
}

OnRead = Callable[[int], None]


class DamagedFile(Exception):
    """A compressed file is corrupt or truncated. The message says which."""


def ignore_progress(size: int) -> None:
    """An OnRead that does nothing."""


def suffixes(path: str) -> tuple[str, str]:
    """The suffixes for a file's content and its compression: (".jsonl", ".gz"), (".txt", "")."""
    name = PurePath(path)
    compression = name.suffix if name.suffix in SUFFIXES else ""
    return PurePath(name.stem if compression else name.name).suffix, compression


def field_separator(line: str) -> str:
    """What separates the fields of a CSV file with this first line: a comma, or a semicolon or tab.

    Spreadsheets write a semicolon in countries that write a decimal comma. A mark inside of a sentence is followed by a
    space, and separates nothing.
    """
    for mark in (",", ";", "\t"):
        fields = line.rstrip("\r\n").split(mark)
        if len(fields) > 1 and (mark == "," or all(field and field == field.strip() for field in fields)):
            return mark
    return ","


def decompressed(stored: BinaryFile, suffix: str, buffer_bytes: int = _BUFFER_BYTES) -> io.BufferedReader:
    """Decompresses an open file with one of SUFFIXES. Closing the result closes the file.

    Raises:
        DamagedFile: when the result is read, not here.
        OSError: when the result is read, a .zst file needs more than pyarrow has.
    """
    source: Any = _Streams(stored, suffix)
    if suffix == ".zst":
        is_long = _zstd_window(stored) > _PYARROW_WINDOW
        stored.seek(0)
        source = source if is_long else pa.CompressedInputStream(stored, "zstd")
    return io.BufferedReader(_Decompressed(stored, source.read), buffer_bytes)


def read_blocks(path: str, on_read: OnRead = ignore_progress) -> Iterator[bytes]:
    """Yields a local or remote file's decompressed content.

    Args:
        on_read: called after every block with the number of stored bytes read for it.

    Raises:
        DamagedFile: the file is damaged. All content before the damage is yielded first.
        OSError: as `open_file` does.
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
            # The end of the file, e.g. a checksum, may be read only after the last block.
            on_read(stored.tell() - stored_bytes)
    except DamagedFile:
        # At the damage, a decompressor drops the content that it decompressed in the same call. So the file is read
        # again. From just before the damage on, the decompressor gets, and returns, one byte at a time.
        rest = bytearray()
        with (
            contextlib.suppress(DamagedFile),
            contextlib.closing(open_stream(path)) as stored,
            decompressed(_BytewiseTail(stored, stored_bytes - _READ_AHEAD), compression, 1) as opened,
        ):
            while content_bytes and (block := opened.read(min(content_bytes, BLOCK_BYTES))):
                content_bytes -= len(block)
            while byte := opened.read(1):
                rest += byte
        yield bytes(rest)
        raise


class _Decompressed(io.RawIOBase):
    """A stream decompressed by `read`. Turns every decompressor's errors into DamagedFile."""

    def __init__(self, stored: BinaryFile, read: Callable[[int], bytes]) -> None:
        self._stored = stored
        self._read = read

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any, /) -> int:
        try:
            piece = self._read(len(target))
        except (lzma.LZMAError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # from the file, not from the decompressor: errors of `open_file` have a number
            for message, problem in _UNSUPPORTED.items():
                if message in str(error):
                    raise OSError(errno.ENOTSUP, problem) from None
            raise DamagedFile(first_line(error)) from error
        target[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._stored.close()
        super().close()


def _zstd_window(stored: BinaryFile) -> int:
    """The bytes that a .zst file's first frame asks a decompressor to hold (RFC 8878, 3.1.1.1); 0 if it is no frame."""
    head = b""
    # A read may return less than requested.
    while len(head) < 18 and (piece := stored.read(18 - len(head))):
        head += piece
    if len(head) < 6 or not head.startswith(b"\x28\xb5\x2f\xfd"):
        return 0
    if head[4] & 32:  # one segment, so the window is the content
        # The size of the content follows the dictionary's id. Sizes in two bytes are 256 more, which does not matter
        # here.
        begin, size = 5 + (0, 1, 2, 4)[head[4] & 3], (1, 2, 4, 8)[head[4] >> 6]
        return int.from_bytes(head[begin : begin + size], "little")
    base = 1 << (10 + (head[5] >> 3))
    return base + base // 8 * (head[5] & 7)


class _LongWindowFrame:
    """Decompresses one .zst frame with any window, with the interface of zlib's objects."""

    def __init__(self) -> None:
        self._frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self._content = io.BytesIO()

    @property
    def eof(self) -> bool:
        return self._frame.eof and self._content.tell() == len(self._content.getbuffer())

    @property
    def unused_data(self) -> bytes:
        return bytes(self._frame.unused_data)

    def decompress(self, stored: bytes, size: int) -> bytes:
        # _Streams passes new input only after this has returned nothing, so none is lost here.
        if piece := self._content.read(size):
            return piece
        try:
            self._content = io.BytesIO(self._frame.decompress(stored))
        except zstandard.ZstdError as error:
            raise DamagedFile(first_line(error)) from error
        return self._content.read(size)


class _Streams:
    """Decompresses the concatenated streams of a .gz, .xz or .bz2 file, or of a .zst file with a long window.

    Python's LZMAFile and BZ2File are no replacement: they end silently if a stream after the first one is damaged.
    """

    def __init__(self, stored: BinaryFile, suffix: str) -> None:
        self._stored, self._suffix = stored, suffix
        # zstandard returns all that it decompresses from an input, so it gets little at once.
        self._input_bytes = 1 << 12 if suffix == ".zst" else _INPUT_BYTES
        self._input = b""  # read, but not yet passed to a decompressor
        self._decompressor: Any = None  # of the current stream
        self._begun = False

    def read(self, size: int) -> bytes:
        """Returns the next 1 to `size` bytes; none at the end."""
        while self._decompressor is not None or self._begin_stream():
            piece: bytes = self._decompressor.decompress(self._input, size)
            # zlib returns the input that it did not use; lzma and bz2 keep it.
            self._input = getattr(self._decompressor, "unconsumed_tail", b"")
            if self._decompressor.eof:
                self._input, self._decompressor = self._decompressor.unused_data, None
            # Decompressors can hold output beyond `size`, so more input is read only once they return nothing.
            elif not piece and not self._input:
                self._input = self._stored.read(self._input_bytes)
                if not self._input:
                    raise DamagedFile("truncated")
            if piece:
                return piece
        return b""

    def _begin_stream(self) -> bool:
        """Whether another stream follows. NULs may pad the space between streams, in .xz in multiples of four."""
        padding = 0
        while True:
            self._input = self._input or self._stored.read(self._input_bytes)
            if not self._begun or self._suffix in (".bz2", ".zst") or not self._input.startswith(b"\0"):
                break
            rest = self._input.lstrip(b"\0")
            padding += len(self._input) - len(rest)
            self._input = rest
        if self._suffix == ".xz" and padding % 4:
            raise DamagedFile(f"{padding} NULs after a stream, which is not a multiple of 4")
        # An empty .gz file has empty content, whereas an empty .xz or .bz2 file is truncated.
        if not self._input and (self._begun or self._suffix == ".gz"):
            return False
        self._decompressor = _DECOMPRESSORS[self._suffix]()
        self._begun = True
        return True


class _BytewiseTail(io.RawIOBase):
    """A file whose reads return one byte from a position on."""

    def __init__(self, stored: BinaryFile, position: int) -> None:
        self._stored = stored
        self._left = position

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        # `decompressed` seeks back to the beginning of a .zst file, whose header it has read.
        self._left += self._stored.tell() - offset
        return self._stored.seek(offset)

    def read(self, size: int = -1, /) -> bytes:
        content = self._stored.read(max(1, min(size, self._left)))
        self._left -= len(content)
        return content


# Temporary folders on disk for large files on their way to or from a store.

IN_MEMORY = "bert_jax-in_memory-"  # prefix of temporary folders for models and data from memory
_LOCK = "lock"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Makes a temporary folder in TMPDIR and removes it at the end.

    Raises:
        UserError: no folder can be made, e.g. because the disk is full.
    """
    prefix = f"bert_jax-staging-{socket.gethostname()}-"  # another host's locks may not be seen here
    try:
        # A killed process leaves its folder behind, and a checkpoint is large. So a process locks a file in its folder,
        # and the next process on this host removes the folders whose lock is free.
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            # BlockingIOError: its process runs. Other errors: it is another user's, or has just been removed.
            with contextlib.suppress(OSError), (folder / _LOCK).open("r+b") as file:
                if folder.stat().st_uid == os.getuid() and try_lock(file):
                    shutil.rmtree(folder, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise UserError(
            f"cannot make a temporary folder ({error.strerror or error}). Free some space, or set TMPDIR to another "
            "folder"
        ) from error
    try:
        with (folder / "new").open("wb") as file:
            try_lock(file)
            (folder / "new").rename(folder / _LOCK)  # so it is locked as soon as others see it
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Files of pickled weights, which are never read.

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def is_pickle(name: str | PurePath) -> bool:
    """Whether a file contains pickled weights, by its name."""
    return any(PurePath(name).match(pattern) for pattern in PICKLES)


def refuse_pickle(path: Path) -> None:
    """Refuses a file of pickled weights. The message tells why, and how to convert it."""
    if path.is_file() and is_pickle(path):
        config = path.parent / "config.json"
        raise pickle_error(path.parent, path.name, read_json(config) if config.is_file() else {})


def pickle_error(source: str | PurePath, name: str, config: Mapping[str, Any]) -> UserError:
    """The error for a pickle in a folder, or in a model on the Hub; `config` is the content of its config.json."""
    # The class that the weights have: another one drops their heads, and adds random ones.
    architectures = config.get("architectures")
    class_name = architectures[0] if isinstance(architectures, list) and architectures else architectures
    hint = ""
    if not isinstance(class_name, str) or not class_name.isidentifier():
        class_name, hint = "AutoModel", ". config.json names no class in architectures; AutoModel keeps no head"
    return UserError(
        f"{source} holds {name}, a pickle: reading one can run any code that it contains. If you "
        f"trust it, convert it once with transformers: {class_name}.from_pretrained(FOLDER)."
        f"save_pretrained(NEW_FOLDER), and the tokenizer likewise{hint}"
    )
