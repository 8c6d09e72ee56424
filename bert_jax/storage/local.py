"""Files and folders that are either complete or absent, whenever the process stops (law 7).

Everything is written under a temporary name and renamed at the end. Files are flushed to the disk before that, and so
survive a machine that stops, too; those in folders are not, and readers detect what is missing by hashes. A long output
is `NAME.incomplete` until then, and a lock on it keeps a second job from writing the same output.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from bert_jax.command import UserError
from bert_jax.storage.remote import is_remote

INCOMPLETE = ".incomplete"  # suffix of the name of an unfinished folder or long file
# It is in an unfinished folder of atomic_folder, which replaces none without it. A kill can leave it in a complete one.
MARKER = ".made_by_bert_jax"
_TEMPORARY = ".tmp"


def incomplete_path(path: Path) -> Path:
    """The name of a folder or long file while it is unfinished."""
    return path.parent / (path.name + INCOMPLETE)


def as_typed(path: str) -> str:
    """A path as a user would type it here: one below the current folder is relative."""
    absolute_path, here = Path(path), Path.cwd()
    return str(absolute_path.relative_to(here)) if absolute_path.is_relative_to(here) else path


def write_atomic(path: Path, content: bytes | memoryview | Iterable[bytes | memoryview]) -> None:
    """Writes a file, given at once or in blocks, under a temporary name, flushes it to disk and renames it.

    Whatever is raised, by the disk or by the blocks, leaves neither the file nor the temporary one.
    """
    unfinished = path.with_name(path.name + _TEMPORARY)
    try:
        with unfinished.open("wb") as file:
            for block in (content,) if isinstance(content, bytes | memoryview) else content:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException as error:
        _name(error, path)
        unfinished.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON document atomically."""
    write_atomic(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """The content of the file of a JSON document. Bytes of a path that are not UTF-8 are escaped as Python has them."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def read_json(path: Path) -> dict[str, Any]:
    """Reads the object in a JSON file. Raises UserError if the file is missing, damaged or holds something else."""
    try:
        return parse_json(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise UserError(f"no {path.name} in {path.parent}. Check the path") from error


def parse_json(content: bytes, name: str) -> dict[str, Any]:
    """Parses the object in a JSON file's content. Raises UserError, with the file's name, for anything else."""
    try:
        values = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not valid JSON ({error}). Create or download it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{name} is not a JSON object. Create or download it again")
    return values


def refuse_existing(output: Path) -> None:
    """Raises UserError for an output that cannot be created.

    It exists (nothing is overwritten), has the name of an unfinished output or one that is not UTF-8 (Arrow cannot open
    such a file), or is in an object store.
    """
    try:
        str(output).encode()
    except UnicodeEncodeError:
        raise UserError(f"output {str(output)!r} is not UTF-8. Choose another --output") from None
    if output.name.endswith(INCOMPLETE):
        raise UserError(
            f"output {output} ends in {INCOMPLETE}, which is reserved for unfinished outputs. Choose another --output"
        )
    if is_remote(output):
        raise UserError(
            f"output {output} is in an object store. Choose a local folder, and copy it when it is complete "
            "(shards: bert-jax copy-examples)"
        )
    if output.exists():
        raise UserError(f"output {output} exists. Choose another --output, or remove it first")


def refuse_inside(output: Path, folder: Path) -> None:
    """Raises UserError for an output inside a finished folder, which holds the files that it lists and no others."""
    if Path(os.path.realpath(output)).is_relative_to(os.path.realpath(folder)) and output != folder:
        raise UserError(f"output {output} is inside {folder}. Choose an --output outside of it")


def lock(path: Path, mode: str = "ab") -> IO[bytes]:
    """Opens a file that one job at a time may have open. Closing it, or the end of the process, releases the lock.

    Raises UserError while another job holds the lock, or if that job has just renamed or removed the file.
    """
    try:
        with contextlib.ExitStack() as closing:
            file = closing.enter_context(path.open(mode))
            try_lock(file)  # where there are no locks, users keep their jobs apart themselves
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


def try_lock(file: IO[bytes]) -> bool:
    """Locks an open file until it is closed or its process ends. Raises BlockingIOError if another process has.

    Returns False, and locks nothing, on a file system without locks: Lustre and NFS are often mounted so.
    """
    return _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def wait_for_lock(file: IO[bytes]) -> bool:
    """Locks an open file as `try_lock` does, once no other process has."""
    return _lock(file, fcntl.LOCK_EX)


def _lock(file: IO[bytes], operation: int) -> bool:
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        return False
    return True


@contextlib.contextmanager
def atomic_folder(directory: str | Path) -> Iterator[Path]:
    """Creates DIR.incomplete to write into and renames it to DIR at the end; an exception removes it.

    The leftover of a run that was killed is replaced. Raises UserError if DIR exists, another job is writing it, or
    DIR.incomplete holds files but no MARKER and so is somebody else's.
    """
    directory = Path(directory)
    refuse_existing(directory)
    unfinished = incomplete_path(directory)
    marker = unfinished / MARKER
    not_ours = UserError(f"{unfinished} exists and is no unfinished output. Move it, or choose another --output")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        present = os.listdir(unfinished)
    except FileExistsError:
        raise not_ours from None
    except FileNotFoundError:
        raise _locked(unfinished) from None
    if present and MARKER not in present:
        raise not_ours
    # "r+b" does not create the marker: where it was listed and is gone, another job has just finished this output.
    with lock(marker, "r+b" if present else "ab"):
        try:
            refuse_existing(directory)  # the previous holder of the lock may have finished
            for path in unfinished.iterdir():
                if path != marker:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            yield unfinished
            # In this order: without the marker, a kill in between would leave a folder that no later job replaces.
            unfinished.rename(directory)
            with contextlib.suppress(OSError):  # the output is complete, and readers ignore the marker
                (directory / MARKER).unlink()
        except BaseException as error:
            _name(error, directory)
            _remove(unfinished)
            raise


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens FILE.incomplete for sequential writing and renames it to FILE at the end; an exception removes it.

    The leftover of a run that was killed is overwritten. Raises UserError if FILE exists or another job is writing it.
    """
    refuse_existing(path)
    unfinished = incomplete_path(path)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    with lock(unfinished) as file:
        try:
            refuse_existing(path)  # the previous holder of the lock may have finished
            file.seek(0)
            file.truncate()
            yield file
            file.flush()
            os.fsync(file.fileno())
            unfinished.rename(path)
        except BaseException as error:
            _name(error, path)
            unfinished.unlink(missing_ok=True)
            raise


def _name(error: BaseException, path: Path) -> None:
    """Names what was being written in the error of a full disk, which comes without a name."""
    if isinstance(error, OSError):
        error.filename = error.filename or str(path)


def _remove(folder: Path) -> None:
    """Removes a folder into which threads of a failed writer may still be writing; hence the attempts."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)
        if not folder.exists():
            return
