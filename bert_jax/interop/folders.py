"""Output folders that appear whole or not at all."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

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
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
