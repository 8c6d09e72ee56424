"""Compiled programs: kept on disk, so that a run that goes on, or a second one like it, starts at once; and those of
later phases made before the first step, so that what does not compile or fit is told then and not after days.
"""

import os
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from bert_jax.train import partitioning
from bert_jax.train.run import Source

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


def later_batches(source: Source, first: int, end: int, mesh: Mesh) -> dict[int, Any]:
    """Abstract batches of the shapes that a run will meet after the one it begins with, by the step that brings each.

    first, end   the step that it begins with, and the number of its steps (0: nobody knows)
    Reads a row for each change of the source.
    """
    sharding = partitioning.rows_sharding(mesh)
    found: dict[int, Any] = {}
    seen = []
    for step in (first, *(change for change in source.changes if change > first and (change < end or end <= 0))):
        rows = source.rows_at(step)
        batch = jax.tree.map(
            lambda leaf, rows=rows: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype, sharding=sharding),
            source.batch(step, slice(0, 1)),
        )
        if batch not in seen:
            seen.append(batch)
            found[step] = batch
    del found[first]
    return found
