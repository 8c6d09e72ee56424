"""Keeps compiled programs on disk: a run that resumes or repeats an earlier one starts without compiling."""

import os
from pathlib import Path

import jax

VARIABLE = "JAX_COMPILATION_CACHE_DIR"  # jax's own; it may also name gs://BUCKET/FOLDER


def enable_compilation_cache() -> Path | None:
    """Makes jax keep compiled programs in ~/.cache/bert_jax (or $XDG_CACHE_HOME/bert_jax) and returns that folder.

    Returns None, and changes nothing, where JAX_COMPILATION_CACHE_DIR is set (an empty value disables the cache) or
    where the folder cannot be created. Programs are found by a hash of their code, compiler and devices, so deleting
    the folder is always safe.
    """
    if VARIABLE in os.environ:
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache) / "bert_jax" / "programs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a missing or read-only home directory costs compile time, nothing else
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder
