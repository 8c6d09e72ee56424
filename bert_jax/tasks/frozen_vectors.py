"""The vectors of words from a frozen model, computed once for all layers and stored in memory-mapped files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int32, Int64

from bert_jax.progress import Reporter
from bert_jax.tasks.example import spans
from bert_jax.tasks.kinds.tagging import TagRows
from bert_jax.tasks.layer_vectors import LayerVectors
from bert_jax.tasks.length_batches import sorted_batches
from bert_jax.tasks.vector_files import check_range
from bert_jax.train import partitioning

BATCH_SIZE = 32  # rows per batch of the frozen model


class WordBatch(NamedTuple):
    """B sentences, padded to K words."""

    vectors: Any  # [B,K,F]
    labels: Any  # i32[B,K]
    lengths: Any  # i32[B]; 0: a filler


@dataclass(frozen=True, eq=False)
class WordVectors:
    """The words of a split, K - 1 sentences: the vector at the first piece of each, and its tag."""

    vectors: Float[np.ndarray, "W F"]  # memory-mapped
    labels: Int32[np.ndarray, "W"]
    sentence_offsets: Int64[np.ndarray, "K"]  # in the words

    @property
    def lengths(self) -> Int64[np.ndarray, "R"]:
        """The number of words of each sentence."""
        return np.diff(self.sentence_offsets)

    def words(self, sentences: Int64[np.ndarray, "R"]) -> Int64[np.ndarray, "N"]:
        """The numbers of all words of these sentences."""
        return spans(self.sentence_offsets[sentences], self.lengths[sentences])

    def batch(self, sentences: Int64[np.ndarray, "R"], size: int, length: int) -> WordBatch:
        """These sentences, padded to `length` words, and fillers up to `size` sentences."""
        lengths = np.pad(self.lengths[sentences], (0, size - len(sentences))).astype(np.int32)
        inside = np.arange(length) < lengths[:, None]
        vectors = np.zeros((size, length, self.vectors.shape[1]), self.vectors.dtype)
        labels = np.zeros((size, length), np.int32)
        words = self.words(sentences)
        vectors[inside], labels[inside] = self.vectors[words], self.labels[words]
        return WordBatch(vectors, labels, lengths)


def word_vectors(
    model: LayerVectors, splits: Mapping[str, TagRows], folder: Path, max_length: int, quiet: bool = True
) -> dict[str, dict[str, WordVectors]]:
    """The vectors by name of the layers and split, from one pass of the model over all rows.

    Raises UserError for values that the dtype of the model's vectors cannot represent.
    """
    size = partitioning.whole_rows(BATCH_SIZE, model.mesh)
    found: dict[str, dict[str, WordVectors]] = {name: {} for name in model.widths}
    with Reporter("vectors of words", sum(rows.count for rows in splits.values()), ["rows"], quiet) as progress:
        for split, rows in splits.items():
            for number, (name, width) in enumerate(model.widths.items()):
                file = np.lib.format.open_memmap(
                    folder / f"{split}-{number}.npy", mode="w+", dtype=model.dtype, shape=(len(rows.word_rows), width)
                )
                found[name][split] = WordVectors(file, rows.labels[rows.word_starts], rows.sentence_offsets)
            for indices, states in model.run(sorted_batches(rows, size, max_length)):
                indices = indices[indices >= 0]
                first, end = (np.searchsorted(rows.word_rows, indices, side) for side in ("left", "right"))
                words = spans(first, end - first)
                places = np.repeat(np.arange(len(indices)), end - first), rows.word_slots[words]
                for name, of_layer in zip(found, states, strict=True):
                    check_range(of_layer[places], "--feature_dtype", f"--layers {name}: ")
                    found[name][split].vectors[words] = of_layer[places]
                progress.advance(len(indices), len(indices))
    return found
