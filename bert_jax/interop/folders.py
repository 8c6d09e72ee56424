"""Folders of files: outputs that appear whole or not at all, and JSON read with its mistakes said."""

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.data.shards import INCOMPLETE


@contextlib.contextmanager
def new_folder(directory: str | Path) -> Iterator[Path]:
    """DIR.incomplete to write into; it becomes DIR at the end, and goes when something is raised.

    Raises UserError when DIR exists. What a killed run left in DIR.incomplete is written anew.
    """
    directory = Path(directory)
    if directory.exists():
        raise UserError(f"{directory} exists. Name another --output, or remove it first")
    unfinished = directory.with_name(directory.name + INCOMPLETE)
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(directory)
    except BaseException:
        _remove(unfinished)
        raise


def _remove(folder: Path) -> None:
    """Removes a folder in which a writer that has failed may still be creating its last files."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)
        if not folder.exists():
            return


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises UserError when it is missing, damaged or something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"no {path.name} in {path.parent}. Is it a checkpoint folder?") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}). Fetch it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a JSON object. Fetch it again")
    return values
