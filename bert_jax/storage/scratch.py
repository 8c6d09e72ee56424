"""Temporary folders on disk for large files on their way to or from a store.

A killed process leaves its folder behind, and a checkpoint is large. So each folder holds a file that its process
locks, and the next process of the same host that makes one removes those whose lock is free.
"""

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bert_jax.command import UserError
from bert_jax.storage.local import try_lock

IN_MEMORY = "bert_jax-in_memory-"  # begins the names of temporary folders of models and data that were in memory
_PREFIX = "bert_jax-staging"
_LOCK = "lock"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Makes a folder in the folder for temporary files (TMPDIR), and removes it at the end.

    Raises UserError where none can be made, as on a full disk.
    """
    prefix = f"{_PREFIX}-{socket.gethostname()}-"  # locks of another host may not be seen here
    try:
        _remove_abandoned(Path(tempfile.gettempdir()), prefix)
        folder = Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise UserError(
            f"cannot make a temporary folder ({error.strerror or error}). Free some space, or set TMPDIR to another "
            "folder"
        ) from error
    try:
        with (folder / "new").open("wb") as file:
            try_lock(file)
            (folder / "new").rename(folder / _LOCK)  # locked from the moment on at which others see it
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        # BlockingIOError: its process runs. Others: it is another user's, or has just been removed.
        with contextlib.suppress(OSError), (folder / _LOCK).open("r+b") as file:
            if folder.stat().st_uid == os.getuid() and try_lock(file):
                shutil.rmtree(folder, ignore_errors=True)
