"""Keeps compiled programs on disk, and finds the batch shapes that a run compiles before its first step.

With the cache, a run that resumes or repeats an earlier one starts without compiling. Compiling the shapes of later
phases first reports a program that does not compile, or does not fit into memory, at once and not after days.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.train import partitioning
from bert_jax.train.run import Source
from bert_jax.train.setup import describe_batch
from bert_jax.train.state import TrainState

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


def compile_ahead(
    train_step: Any,
    state: TrainState,
    later: Mapping[int, Any],
    arguments: Sequence[Any],
    report: Callable[[str], None],
) -> None:
    """Compiles a jitted step for batches of other shapes that come later, given by step (`later_batch_shapes`).

    arguments   what the step takes after state, batch and fraction
    """
    for step, batch in later.items():
        report(f"compiling for step {step}: {describe_batch(batch)}")
        train_step.lower(state, batch, np.float32(0), *arguments).compile()


def later_batch_shapes(source: Source, first: int, end: int, mesh: Mesh) -> dict[int, Any]:
    """Returns abstract batches of the shapes and types that a run meets after its first one, by the step that first has
    each.

    first, end   the first step, and the run's number of steps (0: unknown)
    Reads one row for each change of the source.
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
        if (type(batch), batch) not in seen:  # tuples of different types may be equal
            seen.append((type(batch), batch))
            found[step] = batch
    del found[first]
    return found
