"""Vectors of words from a model that is not trained: each layer's, computed once and kept in memory-mapped files."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int32, Int64

from bert_jax.command import UserError
from bert_jax.config import MeshConfig, ModelConfig
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import paths
from bert_jax.model.bert import bind
from bert_jax.model.heads import Heads
from bert_jax.model.layer_selection import LayerSelection
from bert_jax.model.runtime import Runtime
from bert_jax.progress import Reporter
from bert_jax.tasks.example import TaskBatch, spans
from bert_jax.tasks.kinds.tagging import TagRows
from bert_jax.tasks.task_source import evaluation_batches
from bert_jax.train import partitioning

DTYPES = ("float16", "float32")


@dataclass(frozen=True, eq=False)
class WordVectors:
    """The words of a split, K - 1 sentences: a vector of each, at its first piece, and its tag."""

    vectors: Float[np.ndarray, "W F"]  # memory-mapped
    labels: Int32[np.ndarray, "W"]
    sentence_offsets: Int64[np.ndarray, "K"]  # in the words


def bytes_needed(loaded: LoadedModel, splits: Mapping[str, TagRows], layers: Sequence[str], dtype: str) -> int:
    """What word_vectors writes."""
    words = sum(len(rows.word_rows) for rows in splits.values())
    width = sum(LayerSelection.parse(name, loaded.model.layers).width(loaded.model.width) for name in layers)
    return words * width * np.dtype(dtype).itemsize


def word_vectors(
    loaded: LoadedModel,
    splits: Mapping[str, TagRows],
    layers: Sequence[str],
    folder: Path,
    *,
    max_length: int,
    batch_size: int = 32,
    dtype: str = "float16",
    compute_dtype: str = "float32",
    quiet: bool = False,
) -> dict[str, dict[str, WordVectors]]:
    """By layer name (model/layer_selection.py) and split, from one pass over the rows; the files go into folder.

    Raises UserError for a layer that the model does not have, and for values that the dtype cannot hold.
    """
    chosen = tuple(LayerSelection.parse(name, loaded.model.layers) for name in layers)
    # A program a length is compiled, so a loop that compiles fast.
    runtime = Runtime(compute_dtype=compute_dtype, layer_loop="scan", placement=partitioning.OnMesh())
    mesh = partitioning.make_mesh(MeshConfig())
    params = partitioning.put(paths.unflatten(dict(loaded.params)), mesh)
    size = partitioning.whole_rows(batch_size, mesh)
    found: dict[str, dict[str, WordVectors]] = {name: {} for name in layers}
    total = sum(rows.count for rows in splits.values())
    done = 0
    with Reporter("vectors of words", total, ["rows"], quiet) as progress:
        for split, rows in splits.items():
            files = [
                np.lib.format.open_memmap(
                    folder / f"{split}-{place}.npy",
                    mode="w+",
                    dtype=dtype,
                    shape=(len(rows.word_rows), one.width(loaded.model.width)),
                )
                for place, one in enumerate(chosen)
            ]
            for indices, batch in evaluation_batches(rows, size, max_length):
                with jax.set_mesh(mesh):
                    placed = partitioning.place(batch, size, mesh)
                    states = jax.device_get(_states(loaded.model, loaded.heads, runtime, chosen, dtype, params, placed))
                _store(files, states, rows, indices[indices >= 0], layers)
                done += int((indices >= 0).sum())
                progress.update(done, done)
            labels = rows.labels[rows.offsets[rows.word_rows] + rows.word_slots]
            for name, vectors in zip(layers, files, strict=True):
                found[name][split] = WordVectors(vectors, labels, rows.sentence_offsets)
    return found


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _states(
    config: ModelConfig,
    heads: Heads,
    runtime: Runtime,
    chosen: tuple[LayerSelection, ...],
    dtype: str,
    params: dict[str, Any],
    batch: TaskBatch,
) -> tuple[Float[Array, "B T _"], ...]:
    inner = any(one.inner(config.layers) for one in chosen)
    encoded = bind(config, heads, params, runtime).encode(batch, all_layers=inner)
    return tuple(one.of(encoded, config.layers).astype(dtype) for one in chosen)


def _store(
    files: Sequence[np.ndarray],
    states: Sequence[np.ndarray],
    rows: TagRows,
    indices: Int64[np.ndarray, "B"],
    layers: Sequence[str],
) -> None:
    """Puts the vectors of the words of these rows, the first of a batch, where they belong."""
    first, behind = (np.searchsorted(rows.word_rows, indices, side) for side in ("left", "right"))
    words = spans(first, behind - first)
    places = np.repeat(np.arange(len(indices)), behind - first)
    for name, file, state in zip(layers, files, states, strict=True):
        picked = state[places, rows.word_slots[words]]
        if not np.isfinite(picked).all():
            raise UserError(f"--layers {name}: a value is too large for {picked.dtype}. Use --feature_dtype float32")
        file[words] = picked
