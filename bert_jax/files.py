"""Files and folders that are either complete or absent, whenever the process or the machine stops (law 7)."""

import contextlib
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
    """Raises UserError if an output is there already (nothing is written over), or is called as an unfinished one."""
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


@contextlib.contextmanager
def new_folder(directory: str | Path) -> Iterator[Path]:
    """DIR.incomplete to write into; it becomes DIR at the end, and goes when something is raised.

    Raises UserError when DIR exists, or DIR.incomplete does and is not what a killed run of this function left, which
    is written anew.
    """
    directory = Path(directory)
    refuse_existing(directory)
    unfinished = incomplete(directory)
    if (unfinished / MARKER).exists():
        shutil.rmtree(unfinished)
    if unfinished.exists():
        raise UserError(f"{unfinished} is in the way; move or remove it, or name another --output")
    unfinished.mkdir(parents=True)
    try:
        (unfinished / MARKER).touch()
        yield unfinished
        (unfinished / MARKER).unlink()
        unfinished.rename(directory)
    except BaseException:
        _remove(unfinished)
        raise


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """FILE.incomplete to write into, in order; it becomes FILE at the end, and goes when something is raised.

    Raises UserError when FILE exists. What a killed run left of FILE.incomplete is written anew.
    """
    refuse_existing(path)
    unfinished = incomplete(path)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished.open("wb") as file:
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
