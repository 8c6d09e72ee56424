"""Statistics of the rows of a part: lengths, labels, token counts, and masks."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.data.example import Rows, unmasked_ids
from bert_jax.data.manifest import Part, read_unigram_counts
from bert_jax.data.masking import Masker, MaskingRule, token_kinds
from bert_jax.data.masking.sequences import find_insides
from bert_jax.data.shards import Dataset
from bert_jax.tokenizer import Tokenizer
from data_prep import formats
from data_prep.fill import mask_rows, row_batches
from data_prep.lengths import summarise
from data_prep.objectives import RANDOM_SEGMENT

REPLACEMENTS = ("[MASK]", "random", "kept")
NO_LABEL = -1


class PartStatistics:
    """Counts over the rows of one part, as passed to `add`. With dynamic masking the masks are those of epoch 0.

    rows, positions          number of rows, and of their positions
    lengths      i64[T+1]    sequences by their number of tokens
    filled       i64[T+1]    rows by their number of tokens that are not padding
    packed       i64[S+1]    rows by their number of sequences
    labels                   sequences by next-sentence label (0, 1, -1)
    predictions  i64[M+1]    sequences by their number of predicted tokens
    runs         i64[T+1]    runs of adjacent predicted tokens by their number of tokens or, with whole words, by their
                             number of words (spans that touch are one run)
    replaced     i64[3]      predicted tokens by what the model sees in their place: REPLACEMENTS
    unigrams     i64[V]      tokens before masking, special tokens included
    words, long_words        words, and those of them that are longer than the mask budget of their sequence; 0 where
                             single tokens are masked
    """

    def __init__(self, manifest: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        width, most = manifest["seq_len"], manifest["masking"]["max_predictions"]
        self.rows = 0
        self.lengths = np.zeros(width + 1, np.int64)
        self.filled = np.zeros(width + 1, np.int64)
        self.packed = np.zeros(manifest["pack"] + 1, np.int64)
        self.labels = dict.fromkeys((0, 1, NO_LABEL), 0)
        self.predictions = np.zeros(most + 1, np.int64)
        self.runs = np.zeros(width + 1, np.int64)
        self.replaced = np.zeros(len(REPLACEMENTS), np.int64)
        self.unigrams = np.zeros(tokenizer.vocab_size, np.int64)
        self.positions = 0
        self._mask_id, self._unk_id = tokenizer.mask_id, tokenizer.unk_id
        self._has_unknown = tokenizer.has_unknown
        self._special = list(tokenizer.special_ids)
        self.words = self.long_words = 0
        self._by_word = manifest["masking"]["unit"] != "token"
        rule = MaskingRule.from_manifest(manifest["masking"]) if self._by_word else None
        self._kinds = token_kinds(tokenizer, rule.words if rule else None)
        self._masker = Masker(tokenizer, rule, 0) if rule else None  # for counting words only
        self._pairs = manifest["objective"] == "nsp"

    def add(self, rows: Rows, masked: Rows) -> None:
        """Counts stored rows, and their masks in `masked` (the same rows, or those of `with_masks`)."""
        lengths = rows.sequence_lengths.astype(np.int64)
        present = lengths > 0
        self.rows += len(lengths)
        self.positions += rows.input_ids.size
        self.lengths += np.bincount(lengths[present], minlength=len(self.lengths))
        self.filled += np.bincount(lengths.sum(axis=1), minlength=len(self.filled))
        self.packed += np.bincount(present.sum(axis=1), minlength=len(self.packed))
        for label in self.labels:
            self.labels[label] += int((rows.next_sentence_labels[present] == label).sum())
        self._add_masks(masked, np.cumsum(masked.sequence_lengths.astype(np.int64), axis=1), present)
        if self._masker:
            words, long_words = self._masker.count_words(Rows(unmasked_ids(rows), *rows[1:5]))
            self.words += words
            self.long_words += long_words
        filled = np.arange(rows.input_ids.shape[1]) < lengths.sum(axis=1)[:, None]
        self.unigrams += np.bincount(unmasked_ids(rows)[filled], minlength=len(self.unigrams))

    @property
    def sequences(self) -> int:
        return int(self.lengths.sum())

    @property
    def tokens(self) -> int:
        """Positions that are not padding."""
        return int(self.lengths @ np.arange(len(self.lengths)))

    @property
    def predicted(self) -> int:
        return int(self.replaced.sum())

    @property
    def ordinary_unigrams(self) -> Int64[np.ndarray, "V"]:
        """Token counts in which special tokens are 0: what unigram_counts.npy holds for train."""
        counts = self.unigrams.copy()
        counts[self._special] = 0
        return counts

    @property
    def manifest_counts(self) -> dict[str, Any]:
        """What the manifest states of the rows of a part (docs/data_format.md)."""
        return {
            "sequences": self.sequences,
            "rows": self.rows,
            "tokens": self.tokens,
            "predictions": self.predicted,
            "filled": round(self.tokens / max(self.positions, 1), 6),
            "lengths": summarise(self.lengths),
            **({"words": self.words, "long_words": self.long_words} if self._by_word else {}),
            **({"random_pairs": self.labels[RANDOM_SEGMENT]} if self._pairs else {}),
        }

    @property
    def unknown(self) -> int:
        """The number of [UNK] in the text; 0 for a vocabulary whose [UNK] also begins and ends sequences."""
        return int(self.unigrams[self._unk_id]) if self._has_unknown else 0

    @property
    def text_tokens(self) -> int:
        """The tokens without [CLS], [SEP] and similar ones; [UNK] counts."""
        return int(self.ordinary_unigrams.sum()) + self.unknown

    def most_frequent(self, tokenizer: Tokenizer, most: int) -> list[tuple[str, int, float]]:
        """The most frequent tokens of the text: name, count, share."""
        counts = self.ordinary_unigrams
        total = max(int(counts.sum()), 1)
        top = [token for token in np.argsort(-counts, kind="stable")[:most].tolist() if counts[token]]
        names = tokenizer.tokens(top)
        return [(name, int(counts[token]), counts[token] / total) for name, token in zip(names, top, strict=True)]

    def _add_masks(self, rows: Rows, ends: Int64[np.ndarray, "R S"], present: np.ndarray) -> None:
        positions = rows.masked_positions.astype(np.int64)  # type: ignore[union-attr]
        real = np.arange(positions.shape[1]) < rows.masked_counts[:, None].astype(np.int64)  # type: ignore[index]
        row, column = np.nonzero(real)
        predicted, labels = positions[row, column], rows.masked_ids[row, column]  # type: ignore[index]
        seen = rows.input_ids[row, predicted]
        masked, kept = seen == self._mask_id, seen == labels
        self.replaced += [int(masked.sum()), int((~masked & ~kept).sum()), int((~masked & kept).sum())]

        sequence = (ends[row] <= predicted[:, None]).sum(axis=1)
        counts = np.bincount(row * ends.shape[1] + sequence, minlength=ends.size)
        self.predictions += np.bincount(counts[present.reshape(-1)], minlength=len(self.predictions))

        if len(predicted):
            begins = np.concatenate([[True], (np.diff(predicted) != 1) | (np.diff(row) != 0)])
            # Tokens that continue a word do not lengthen a run, unless single tokens are masked.
            units = begins | ~find_insides(self._kinds[labels][None])[0]
            self.runs += np.bincount(np.bincount(np.cumsum(begins) - 1, units).astype(int), minlength=len(self.runs))


def with_masks(rows: Rows, masker: Masker, max_predictions: int) -> Rows:
    """Rows with the masks of epoch 0: the stored ones of static masking, else those that a loader would choose."""
    return rows if rows.masked_positions is not None else mask_rows(rows, masker, max_predictions)


def open_masker(directory: Path, manifest: Mapping[str, Any], tokenizer: Tokenizer) -> Masker:
    """The masker of an output."""
    rule = MaskingRule.from_manifest(manifest["masking"])
    counts = read_unigram_counts(directory, manifest) if rule.random == "unigram" else None
    return Masker(tokenizer, rule, manifest["seed"], counts)


def measure(
    directory: Path, part: Part, manifest: Mapping[str, Any], tokenizer: Tokenizer, on_rows: Callable[[int], None]
) -> PartStatistics:
    """The statistics of a part, computed from its shards. Raises UserError for a shard that cannot be read."""
    dataset = Dataset(directory, part, manifest, formats.reader(manifest))
    statistics, masker = PartStatistics(manifest, tokenizer), open_masker(directory, manifest, tokenizer)
    for number in range(len(dataset.shards)):
        for rows in row_batches(dataset.shard_rows(number)):
            statistics.add(rows, with_masks(rows, masker, dataset.max_predictions))
            on_rows(len(rows.input_ids))
    return statistics
