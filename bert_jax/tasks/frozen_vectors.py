"""The vectors of words from a frozen model, computed once for all layers and stored in memory-mapped files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int32, Int64

from bert_jax.command import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model.layer_selection import LayerSelection
from bert_jax.progress import Reporter
from bert_jax.tasks.example import spans
from bert_jax.tasks.kinds.tagging import TagRows
from bert_jax.tasks.layer_vectors import LayerVectors
from bert_jax.tasks.length_batches import sorted_batches
from bert_jax.train import partitioning

DTYPES = ("float16", "float32")


@dataclass(frozen=True, eq=False)
class WordVectors:
    """The words of a split, K - 1 sentences: the vector at the first piece of each, and its tag."""

    vectors: Float[np.ndarray, "W F"]  # memory-mapped
    labels: Int32[np.ndarray, "W"]
    sentence_offsets: Int64[np.ndarray, "K"]  # in the words


def bytes_needed(loaded: LoadedModel, splits: Mapping[str, TagRows], layers: Sequence[str], dtype: str) -> int:
    """The size of the files that word_vectors writes."""
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
    """The vectors by layer name (model/layer_selection.py) and split, from one pass over all rows.

    Raises UserError for a layer that the model does not have, and for values that the dtype cannot represent.
    """
    chosen = tuple(LayerSelection.parse(name, loaded.model.layers) for name in layers)
    model = LayerVectors(loaded, chosen, dtype=dtype, compute_dtype=compute_dtype)
    size = partitioning.whole_rows(batch_size, model.mesh)
    found: dict[str, dict[str, WordVectors]] = {name: {} for name in layers}
    done = 0
    with Reporter("vectors of words", sum(rows.count for rows in splits.values()), ["rows"], quiet) as progress:
        for split, rows in splits.items():
            files = [
                np.lib.format.open_memmap(
                    folder / f"{split}-{number}.npy",
                    mode="w+",
                    dtype=dtype,
                    shape=(len(rows.word_rows), one.width(loaded.model.width)),
                )
                for number, one in enumerate(chosen)
            ]
            for indices, vectors in model.run(sorted_batches(rows, size, max_length)):
                _store(files, vectors, rows, indices[indices >= 0], layers)
                done += int((indices >= 0).sum())
                progress.update(done, done)
            for name, file in zip(layers, files, strict=True):
                found[name][split] = WordVectors(file, rows.labels[rows.word_starts], rows.sentence_offsets)
    return found


def _store(
    files: Sequence[np.ndarray],
    vectors: Sequence[np.ndarray],
    rows: TagRows,
    indices: Int64[np.ndarray, "B"],
    layers: Sequence[str],
) -> None:
    """Writes the vectors of the words of these rows, which are the first of a batch, to their places in the files."""
    first, end = (np.searchsorted(rows.word_rows, indices, side) for side in ("left", "right"))
    words = spans(first, end - first)
    places = np.repeat(np.arange(len(indices)), end - first)
    for name, file, states in zip(layers, files, vectors, strict=True):
        picked = states[places, rows.word_slots[words]]
        if not np.isfinite(picked).all():
            raise UserError(f"--layers {name}: a value is too large for {picked.dtype}. Use --feature_dtype float32")
        file[words] = picked
