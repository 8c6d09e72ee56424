"""Compiled programs kept on disk, so that a run that goes on, or a second one like it, starts at once."""

import os
from pathlib import Path

import jax

VARIABLE = "JAX_COMPILATION_CACHE_DIR"  # jax's own; it may name gs://BUCKET/FOLDER, too


def keep_programs() -> Path | None:
    """Has jax keep what it compiles in ~/.cache/bert_jax (or $XDG_CACHE_HOME/bert_jax) and returns that folder.

    None, and nothing is changed, where JAX_COMPILATION_CACHE_DIR is set, be it empty, which is how to do without, or
    where that folder cannot be made.
    Programs are found by a hash of their code, compiler and devices; deleting the folder is always safe.
    """
    if VARIABLE in os.environ:
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache) / "bert_jax" / "programs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that is not there or read-only costs time, and nothing else
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder
