"""What the rows of a part hold, counted: lengths, labels, tokens, and the masks."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.array_types import Int, Int64, Integer
from bert_jax.data.example import Rows
from bert_jax.data.manifest import Part, read_unigram_counts
from bert_jax.data.masking import Masker, MaskingRule
from bert_jax.data.shards import Dataset
from bert_jax.tokenizer import Tokenizer
from data_prep import formats
from data_prep.fill import mask_rows

# Rows looked at together: bounds the memory of the working arrays, changes no figure.
ROWS_TOGETHER = 4096
REPLACEMENTS = ("[MASK]", "random", "kept")
NO_LABEL = -1


class Figures:
    """Counts over the rows of one part, as `add` was given them. With dynamic masking the masks are those of epoch 0.

    rows                     how many
    lengths      i64[T+1]    sequences, by their slots
    filled       i64[T+1]    rows, by their slots that are no padding
    packed       i64[S+1]    rows, by the sequences in them
    labels                   sequences, by next-sentence label (0, 1, -1)
    predictions  i64[M+1]    sequences, by how many of their slots are predicted
    runs         i64[T+1]    stretches of predicted slots side by side, by their tokens, or with whole words by their
                             words (spans that touch are one stretch)
    replaced     i64[3]      predicted slots, by what stands there: REPLACEMENTS
    unigrams     i64[V]      tokens before masking, special ones too
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
        self._slots = 0
        self._mask_id, self._unk_id = tokenizer.mask_id, tokenizer.unk_id
        self._has_unknown = tokenizer.has_unknown
        self._special = list(tokenizer.special_ids)
        # Within a run these begin no word; where single tokens are masked each counts for itself.
        self._inside = tokenizer.continuation & (manifest["masking"]["unit"] != "token")

    def add(self, rows: Rows) -> None:
        """Takes in rows with masks (stored, or drawn: `masked`)."""
        assert rows.masked_positions is not None and rows.masked_ids is not None and rows.masked_counts is not None
        lengths = rows.sequence_lengths.astype(np.int64)
        present = lengths > 0
        self.rows += len(lengths)
        self._slots += rows.input_ids.size
        self.lengths += np.bincount(lengths[present], minlength=len(self.lengths))
        self.filled += np.bincount(lengths.sum(axis=1), minlength=len(self.filled))
        self.packed += np.bincount(present.sum(axis=1), minlength=len(self.packed))
        for label in self.labels:
            self.labels[label] += int((rows.next_sentence_labels[present] == label).sum())
        self._add_masks(rows, np.cumsum(lengths, axis=1), present)
        filled = np.arange(rows.input_ids.shape[1]) < lengths.sum(axis=1)[:, None]
        self.unigrams += np.bincount(truth(rows)[filled], minlength=len(self.unigrams))

    @property
    def sequences(self) -> int:
        return int(self.lengths.sum())

    @property
    def tokens(self) -> int:
        """Filled slots."""
        return int(self.lengths @ np.arange(len(self.lengths)))

    @property
    def predicted(self) -> int:
        return int(self.replaced.sum())

    @property
    def ordinary_unigrams(self) -> Int64[np.ndarray, "V"]:
        """How often each id stands in the rows, special ids 0: what unigram_counts.npy holds of train."""
        counts = self.unigrams.copy()
        counts[self._special] = 0
        return counts

    @property
    def filled_share(self) -> float:
        return self.tokens / max(self._slots, 1)

    @property
    def unknown(self) -> int:
        """How many tokens of the text are [UNK]; none in a vocabulary whose token for it begins and ends sequences."""
        return int(self.unigrams[self._unk_id]) if self._has_unknown else 0

    @property
    def text_tokens(self) -> int:
        """The tokens of the rows but for [CLS], [SEP] and their like; [UNK] counts."""
        return int(self.ordinary_unigrams.sum()) + self.unknown

    def _add_masks(self, rows: Rows, ends: Int64[np.ndarray, "R S"], present: np.ndarray) -> None:
        positions = rows.masked_positions.astype(np.int64)  # type: ignore[union-attr]
        real = np.arange(positions.shape[1]) < rows.masked_counts[:, None].astype(np.int64)  # type: ignore[index]
        row, column = np.nonzero(real)
        slots, truths = positions[row, column], rows.masked_ids[row, column]  # type: ignore[index]
        seen = rows.input_ids[row, slots]
        masked, kept = seen == self._mask_id, seen == truths
        self.replaced += [int(masked.sum()), int((~masked & ~kept).sum()), int((~masked & kept).sum())]

        sequence = (ends[row] <= slots[:, None]).sum(axis=1)
        counts = np.bincount(row * ends.shape[1] + sequence, minlength=ends.size)
        self.predictions += np.bincount(counts[present.reshape(-1)], minlength=len(self.predictions))

        if len(slots):
            begins = np.concatenate([[True], (np.diff(slots) != 1) | (np.diff(row) != 0)])
            units = begins | ~self._inside[truths]
            self.runs += np.bincount(np.bincount(np.cumsum(begins) - 1, units).astype(int), minlength=len(self.runs))


def truth(rows: Rows) -> Integer[np.ndarray, "R T"]:
    """input_ids as they were before masking; themselves when there is none."""
    if rows.masked_positions is None or rows.masked_ids is None or rows.masked_counts is None:
        return rows.input_ids
    ids = rows.input_ids.copy()
    real = np.arange(rows.masked_positions.shape[1]) < rows.masked_counts[:, None]
    real &= rows.masked_positions < ids.shape[1]  # others are damage, told elsewhere
    row, column = np.nonzero(real)
    ids[row, rows.masked_positions[row, column]] = rows.masked_ids[row, column]
    return ids


def masked(rows: Rows, masker: Masker | None, max_predictions: int) -> Rows:
    """Rows with the masks of epoch 0: their own where masking is static, else as a loader would draw them."""
    return rows if masker is None or rows.masked_positions is not None else mask_rows(rows, masker, max_predictions)


def pieces(rows: Rows) -> Iterator[Rows]:
    """The rows, ROWS_TOGETHER at a time."""
    for start in range(0, len(rows.input_ids), ROWS_TOGETHER):
        yield Rows(*(None if column is None else column[start : start + ROWS_TOGETHER] for column in rows))  # type: ignore[arg-type]


def masker_of(directory: Path, manifest: Mapping[str, Any], tokenizer: Tokenizer) -> Masker | None:
    """What drew, or will draw, the masks of an output; None where they came with imported rows."""
    if manifest["imported"]:
        return None
    rule = MaskingRule.from_manifest(manifest["masking"])
    counts = read_unigram_counts(directory, manifest) if rule.random == "unigram" else None
    return Masker(tokenizer, rule, manifest["seed"], counts)


def measure(
    directory: Path, part: Part, manifest: Mapping[str, Any], tokenizer: Tokenizer, on_rows: Callable[[int], None]
) -> Figures:
    """The figures of a part, from its shards. Raises UserError for a shard that cannot be read."""
    dataset = Dataset(directory, part, manifest, formats.reader(manifest))
    figures, masker = Figures(manifest, tokenizer), masker_of(directory, manifest, tokenizer)
    for number in range(len(dataset.shards)):
        for rows in pieces(dataset.shard_rows(number)):
            figures.add(masked(rows, masker, dataset.max_predictions))
            on_rows(len(rows.input_ids))
    return figures


def binned(counts: Int[np.ndarray, "n"], bins: int) -> list[tuple[int, int, int]]:
    """A histogram over 1..n-1 as at most `bins` bins of equal width: (first, last, count); 0 is no value."""
    size = len(counts) - 1
    width = max(1, -(-size // bins))
    return [
        (first, min(first + width - 1, size), int(counts[first : first + width].sum()))
        for first in range(1, size + 1, width)
    ]
