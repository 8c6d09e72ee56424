"""Files and folders that are either complete or absent, whenever the process or the machine stops (law 7)."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_jax.command import UserError

INCOMPLETE = ".incomplete"  # what a folder is called until it is whole: DIR.incomplete


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


@contextlib.contextmanager
def new_folder(directory: Path) -> Iterator[Path]:
    """A folder to fill, DIR.incomplete, that becomes DIR when the block ends; after an error nothing stays.

    Raises UserError when DIR exists.
    """
    if directory.exists():
        raise UserError(f"{directory} exists; name another output folder, or remove it first")
    unfinished = directory.with_name(directory.name + INCOMPLETE)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
