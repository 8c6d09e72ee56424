"""Rows from spans: copies the ids of segments into fixed-width rows, all rows at once."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64, UInt

from bert_jax.data.example import Rows
from bert_jax.data.masking import Masked, Masker
from bert_jax.tokenizer import Tokenizer

# Rows masked together: bounds the memory of the masker's working arrays, changes no mask.
_MASKED_TOGETHER = 4096


def fill_rows(
    ids: UInt[np.ndarray, "n"],
    spans: Int64[np.ndarray, "R K 2"],
    labels: Int64[np.ndarray, "R"],
    first_key: int,
    seq_len: int,
    tokenizer: Tokenizer,
) -> Rows:
    """Unpacked rows `[CLS] span [SEP]` (K = 1) or `[CLS] A [SEP] B [SEP]` (K = 2), keys counting from first_key.

    Each span is [begin, end) of ids, and those of a row fit it: their lengths and K + 1 sum to at most seq_len.
    """
    count = len(spans)
    lengths = spans[..., 1] - spans[..., 0]
    ends = np.cumsum(lengths + 1, axis=1)  # the slot of the [SEP] after each segment; [CLS] is slot 0
    rows = np.full((count, seq_len), tokenizer.pad_id, tokenizer.id_dtype)
    rows[:, 0] = tokenizer.cls_id
    rows[np.arange(count)[:, None], ends] = tokenizer.sep_id

    slots = np.arange(count)[:, None] * seq_len + ends - lengths  # of each segment's first id, among R*T
    before = np.cumsum(lengths) - lengths.reshape(-1)  # ids copied before each segment's
    running = np.arange(lengths.sum())
    repeats = lengths.reshape(-1)
    targets = running + np.repeat(slots.reshape(-1) - before, repeats)
    rows.reshape(-1)[targets] = ids[running + np.repeat(spans[..., 0].reshape(-1) - before, repeats)]

    return Rows(
        input_ids=rows,
        sequence_lengths=(ends[:, -1:] + 1).astype(np.uint16),
        first_segment_lengths=(ends[:, :1] + 1).astype(np.uint16),
        next_sentence_labels=labels[:, None].astype(np.int8),
        sequence_keys=np.arange(first_key, first_key + count, dtype=np.uint64)[:, None],
    )


def count_predictions(rows: Rows, masker: Masker, max_predictions: int) -> int:
    """How many predictions the rows have in epoch 0."""
    return sum(int(masked.counts.sum()) for masked in _masked(rows, masker, max_predictions))


def mask_rows(rows: Rows, masker: Masker, max_predictions: int) -> Rows:
    """The rows with static masks: those that a loader of dynamic masks would give them in epoch 0 (law 2)."""
    id_dtype = rows.input_ids.dtype
    parts = list(_masked(rows, masker, max_predictions))
    return rows._replace(
        input_ids=np.concatenate([part.input_ids for part in parts]).astype(id_dtype),
        masked_positions=np.concatenate([part.positions for part in parts]).astype(np.uint16),
        masked_ids=np.concatenate([part.ids for part in parts]).astype(id_dtype),
        masked_counts=np.concatenate([part.counts for part in parts]).astype(np.uint16),
    )


def _masked(rows: Rows, masker: Masker, max_predictions: int) -> Iterator[Masked]:
    for start in range(0, len(rows.input_ids), _MASKED_TOGETHER):
        part = Rows(*(column[start : start + _MASKED_TOGETHER] for column in rows if column is not None))
        yield masker.apply(part, np.zeros(len(part.input_ids), np.int64), max_predictions)
