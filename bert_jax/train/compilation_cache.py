"""Keeps compiled programs on disk: a run that resumes or repeats an earlier one starts without compiling.

jax lets only process 0 of several write programs (0.10.2 to 0.12.0; jax/_src/compiler.py, _cache_write), because
others might write the same file at the same time. On hosts with a home directory each, all other processes then compile
at every start. Here, one process for each folder writes.
"""

import os
import types
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from jax._src import compiler
from jax.experimental import multihost_utils

from bert_jax.storage.local import try_lock
from bert_jax.train import distributed

VARIABLE = "JAX_COMPILATION_CACHE_DIR"  # jax's own; it may also name gs://BUCKET/FOLDER

_LOCK = ".writer"  # in the folder of programs: held by the process that writes where process 0 does not
_locks: list[IO[bytes]] = []  # open until the process ends


def enable_compilation_cache() -> Path | None:
    """Makes jax keep compiled programs in ~/.cache/bert_jax (or $XDG_CACHE_HOME/bert_jax) and returns that folder.

    Returns None, and changes nothing, where jax has a folder already, where JAX_COMPILATION_CACHE_DIR is set (an empty
    value disables the cache) or where the folder cannot be created. Programs are found by a hash of their code,
    compiler and devices, so deleting the folder is always safe.
    """
    if VARIABLE in os.environ or jax.config.values["jax_compilation_cache_dir"] is not None:
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache) / "bert_jax" / "programs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a missing or read-only home directory costs compile time, nothing else
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


def write_on_every_host() -> None:
    """Makes one process for each folder of programs write what it compiles. All processes call it once connected.

    It changes nothing for one process, and where all share the folder of process 0 or it is in an object store: jax
    then writes it in process 0.
    """
    if jax.process_count() == 1:
        return
    named = str(jax.config.values["jax_compilation_cache_dir"] or "")
    folder = Path(named) if named and "://" not in named else None
    by_jax = compiler._cache_write
    if folder is not None and not distributed.is_primary() and _is_first(folder):
        # Before it is known whether to write, because programs of the next lines are to be found as well. They take
        # less than a second to compile, so jax keeps them only where its shortest time is set to 0.
        compiler._cache_write = _as_process_0(by_jax)
    mark = distributed.broadcast_from_primary(_leave_mark(folder))
    is_seen = folder is None or not mark or (folder / mark).exists()
    multihost_utils.process_allgather(np.bool_(is_seen))  # all have looked
    if is_seen:
        compiler._cache_write = by_jax
    if folder is not None and mark and distributed.is_primary():
        (folder / mark).unlink(missing_ok=True)


def _leave_mark(folder: Path | None) -> str:
    """Creates a file in process 0's folder of programs and returns its name, or an empty string if it cannot."""
    if folder is None or not distributed.is_primary():
        return ""
    mark = f"{os.urandom(8).hex()}.mark"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / mark).touch()
    except OSError:
        return ""
    return mark


def _is_first(folder: Path) -> bool:
    """Whether this process alone of this host, and of those of other runs that were started so, may write here."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("ab")
        _locks.append(lock)
        try_lock(lock)
    except OSError:  # including BlockingIOError
        return False
    return True


def _as_process_0(function: Any) -> types.FunctionType:
    """Returns a function of jax's compiler that takes this process for process 0."""
    first = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
    return types.FunctionType(function.__code__, vars(compiler) | {"distributed": first})
