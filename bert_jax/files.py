"""Files and folders that are either complete or absent, whenever the process or the machine stops (law 7)."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from bert_jax.command import UserError

INCOMPLETE = ".incomplete"  # what a folder is called until it is whole: DIR.incomplete
MARKER = ".made_by_bert_jax"  # stands in what new_folder makes until that is whole, so that only this is replaced


def incomplete(directory: Path) -> Path:
    """What a folder (or a long file) is called until it is whole."""
    return directory.parent / (directory.name + INCOMPLETE)


def is_remote(path: Path) -> bool:
    """Whether what became a path was an address in an object store."""
    return any(part in ("gs:", "s3:") for part in path.parts)


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Writes a file under a temporary name, flushes it to disk, and renames it."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise
    unfinished.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON document whole."""
    write_whole(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises UserError when it is missing, damaged or something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"no {path.name} in {path.parent}. Check the path") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}). Make or fetch it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a JSON object. Make or fetch it again")
    return values


def refuse_existing(output: Path) -> None:
    """Raises UserError if an output is there already (nothing is written over), is called as an unfinished one, or by
    bytes that are no text, under which Arrow finds no file.
    """
    try:
        str(output).encode()
    except UnicodeEncodeError:
        raise UserError(f"output {str(output)!r} is not UTF-8. Name another --output") from None
    if output.name.endswith(INCOMPLETE):
        raise UserError(f"output {output} ends in {INCOMPLETE}, the name of unfinished ones. Name another --output")
    if is_remote(output):
        raise UserError(
            f"output {output} is in an object store. Name a local folder, and copy that when it is whole "
            "(shards: python -m data_prep.copy_examples)"
        )
    if output.exists():
        raise UserError(f"output {output} exists. Name another --output, or remove it first")


def refuse_inside(output: Path, folder: Path) -> None:
    """Raises UserError for an output that would lie in a finished folder, which holds what it lists and no more."""
    if Path(os.path.realpath(output)).is_relative_to(os.path.realpath(folder)) and output != folder:
        raise UserError(f"output {output} is inside of {folder}. Name another --output, beside it")


def lock(path: Path, mode: str = "ab") -> IO[bytes]:
    """Opens the file that one job at a time has open; it is free again when that is closed or its process is gone.

    Raises UserError while another job has it, or has just moved or removed it.
    """
    try:
        with contextlib.ExitStack() as closing:
            file = closing.enter_context(path.open(mode))
            _flock(file)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise FileNotFoundError
            closing.pop_all()
    except (BlockingIOError, FileNotFoundError):
        unfinished = next((folder for folder in (path, *path.parents) if folder.name.endswith(INCOMPLETE)), path)
        raise _taken(unfinished) from None
    return file


def _taken(unfinished: Path) -> UserError:
    return UserError(f"another job is writing {unfinished}; wait for it, or give another --output")


def _flock(file: IO[bytes]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # A file system without locks (Lustre and NFS, as they are often mounted): who has one keeps its jobs apart.
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise


@contextlib.contextmanager
def new_folder(directory: str | Path) -> Iterator[Path]:
    """DIR.incomplete to write into; it becomes DIR at the end, and goes when something is raised.

    Raises UserError when DIR exists, another job is writing it, or DIR.incomplete is there and not what a killed run of
    this function left, which is written anew.
    """
    directory = Path(directory)
    refuse_existing(directory)
    unfinished = incomplete(directory)
    marker = unfinished / MARKER
    in_the_way = UserError(f"{unfinished} is in the way; move or remove it, or name another --output")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        left = os.listdir(unfinished)
    except FileExistsError:
        raise in_the_way from None
    except FileNotFoundError:
        raise _taken(unfinished) from None
    if left and MARKER not in left:
        raise in_the_way
    # Where a marker was and is no more, a job has just ended, and none is to come into what it made.
    with lock(marker, "r+b" if left else "ab"):
        try:
            refuse_existing(directory)  # the job that held the lock may just have ended
            for path in unfinished.iterdir():
                if path != marker:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            yield unfinished
            marker.unlink()
            unfinished.rename(directory)
        except BaseException as error:
            if isinstance(error, OSError):
                error.filename = error.filename or str(directory)  # a full disk is told without
            _remove(unfinished)
            raise


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """FILE.incomplete to write into, in order; it becomes FILE at the end, and goes when something is raised.

    Raises UserError when FILE exists or another job is writing it. What a killed run left of FILE.incomplete is written
    anew.
    """
    refuse_existing(path)
    unfinished = incomplete(path)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    with lock(unfinished) as file:
        try:
            refuse_existing(path)  # the job that held the lock may just have ended
            file.seek(0)
            file.truncate()
            yield file
            file.flush()
            os.fsync(file.fileno())
            unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


def _remove(folder: Path) -> None:
    """Removes a folder in which a writer that has failed may still be creating its last files."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)
        if not folder.exists():
            return
