"""Held-out rows in which each token is masked in turn, for the pseudo-log-likelihood of a masked language model."""

from collections.abc import Iterator

import numpy as np

from bert_jax.array_types import Bool, Int32, Int64
from bert_jax.data.example import Batch, Rows, unmasked_ids
from bert_jax.data.loader import RowTable, fill_up, token_layout
from bert_jax.data.masking import MaskingTokenizer
from bert_jax.data.word_counts import ROWS_AT_ONCE


class SingleMasks:
    """Copies of the first max_rows rows (0: of all), so that every ordinary token is the mask of one copy.

    Copy k of a row has a mask at the k-th ordinary token of each of its sequences. Sequences of a row do not see each
    other, so each token is predicted from all other tokens of its own sequence. The masks of the shards are undone.
    Special tokens are never masked.
    """

    def __init__(self, dataset: RowTable, tokenizer: MaskingTokenizer, max_rows: int = 0) -> None:
        self._dataset, self._mask_id = dataset, tokenizer.mask_id
        self._ordinary = np.ones(tokenizer.vocab_size, bool)
        self._ordinary[list(tokenizer.special_ids)] = False
        count = min(dataset.rows, max_rows) if max_rows > 0 else dataset.rows
        copies = [
            self._numbers(dataset.gather(np.arange(start, min(start + ROWS_AT_ONCE, count))))[0].max(axis=1) + 1
            for start in range(0, count, ROWS_AT_ONCE)
        ]
        self._ends = np.cumsum(np.concatenate(copies) if copies else np.zeros(0, np.int64))

    @property
    def count(self) -> int:
        """The number of copies: for each row, the ordinary tokens of the sequence that has most of them."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def batches(self, batch_size: int, rows: slice | np.ndarray | None = None) -> Iterator[Batch]:
        """All copies in order, batch_size at a time, without labels of next sentences.

        The last batch is filled up with rows of zeros, which have weight 0. `rows` selects the rows of each batch that
        are made.
        """
        picked = np.arange(batch_size, dtype=np.int64)[slice(None) if rows is None else rows]
        for start in range(0, self.count, batch_size):
            copies = start + picked
            copies = copies[copies < self.count]
            batch = self._batch(copies)
            yield Batch(*(field if field is None else fill_up(field, picked.size) for field in batch))

    def _batch(self, copies: Int64[np.ndarray, "K"]) -> Batch:
        row = np.searchsorted(self._ends, copies, side="right")
        number = copies - np.where(row > 0, self._ends[row - 1], 0)
        rows = self._dataset.gather(row)
        numbers, ids = self._numbers(rows)
        where = token_layout(rows)
        copy, position = np.nonzero(numbers == number[:, None])
        sequence = where.sequence_ids[copy, position] - 1
        positions, original = np.zeros((2, *where.cls_positions.shape), np.int32)
        weights = np.zeros(where.cls_positions.shape, np.float32)
        positions[copy, sequence] = position
        original[copy, sequence] = ids[copy, position]
        weights[copy, sequence] = 1
        ids[copy, position] = self._mask_id
        none = np.zeros_like(where.cls_positions)
        layout = (where.segment_ids, where.sequence_ids, where.positions)
        return Batch(ids, *layout, positions, original, weights, where.cls_positions, none, none.astype(np.float32))

    def _numbers(self, rows: Rows) -> tuple[Int64[np.ndarray, "R T"], Int32[np.ndarray, "R T"]]:
        """The number of each ordinary token in its sequence from 0 (-1 at other positions), and the unmasked ids."""
        ids = unmasked_ids(rows).astype(np.int32)
        where = token_layout(rows)
        ordinary: Bool[np.ndarray, "R T"] = self._ordinary[ids] & (where.sequence_ids > 0)
        before = np.cumsum(ordinary, axis=1) - ordinary
        first = np.arange(ids.shape[1]) - where.positions  # the position at which the token's sequence begins
        return np.where(ordinary, before - np.take_along_axis(before, first, axis=1), -1), ids
