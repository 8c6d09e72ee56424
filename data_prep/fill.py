"""Builds rows from spans: copies the ids of segments into fixed-width rows, all rows at once, and masks them."""

from collections.abc import Iterator

import numpy as np

from bert_jax.array_types import UInt64
from bert_jax.data.example import Rows
from bert_jax.data.masking import Masker
from bert_jax.tokenizer import Tokenizer
from data_prep.objectives import Spans
from data_prep.packing import Packed

# Rows processed at a time: bounds the memory of the working arrays and changes no result.
ROWS_PER_BATCH = 4096


def fill_rows(
    spans: Spans, keys: UInt64[np.ndarray, "Q"], packed: Packed, seq_len: int, pack: int, tokenizer: Tokenizer
) -> Rows:
    """Rows of sequences `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]` with their keys, at their packed positions."""
    sequences, segments = spans.sequences[packed.order], spans.segments
    bounds = sequences[:, : 2 * segments].reshape(-1, segments, 2)
    lengths = bounds[..., 1] - bounds[..., 0]
    ends = np.cumsum(lengths + 1, axis=1)  # position in the sequence of the [SEP] after each segment; [CLS] is at 0
    count = int(packed.rows[-1]) + 1
    starts = packed.rows * seq_len + packed.starts  # of each sequence, as an index into R*T

    ids = np.full(count * seq_len, tokenizer.pad_id, tokenizer.id_dtype)
    ids[starts] = tokenizer.cls_id
    ids[starts[:, None] + ends] = tokenizer.sep_id
    firsts = starts[:, None] + ends - lengths  # index of the first id of each segment
    repeats = lengths.reshape(-1)
    before = np.cumsum(repeats) - repeats  # number of ids copied before each segment
    running = np.arange(repeats.sum())
    targets = running + np.repeat(firsts.reshape(-1) - before, repeats)
    ids[targets] = spans.ids[running + np.repeat(bounds[..., 0].reshape(-1) - before, repeats)]

    def column(values: np.ndarray, absent: int, dtype: type[np.integer]) -> np.ndarray:
        filled = np.full((count, pack), absent, dtype)
        filled[packed.rows, packed.places] = values
        return filled

    return Rows(
        input_ids=ids.reshape(count, seq_len),
        sequence_lengths=column(ends[:, -1] + 1, 0, np.uint16),
        first_segment_lengths=column(ends[:, 0] + 1, 0, np.uint16),
        next_sentence_labels=column(sequences[:, 4], -1, np.int8),
        sequence_keys=column(keys[packed.order], 0, np.uint64),
    )


def count_predictions(rows: Rows, masker: Masker) -> int:
    """The number of predictions that the rows have in epoch 0."""
    return sum(int(masker.count(part, np.zeros(len(part.input_ids), np.int64)).sum()) for part in row_batches(rows))


def count_words(rows: Rows, masker: Masker) -> tuple[int, int]:
    """The number of words of the rows, and of those that are longer than the mask budget of their sequence."""
    counts = [masker.count_words(part) for part in row_batches(rows)]
    return sum(words for words, _ in counts), sum(long for _, long in counts)


def mask_rows(rows: Rows, masker: Masker, max_predictions: int) -> Rows:
    """The rows with static masks, equal to the dynamic masks that the loader would apply in epoch 0 (law 2).

    With unit infill, sequences are shorter, and the text cannot be restored from the result.
    """
    id_dtype = rows.input_ids.dtype
    parts = [masker.apply(part, np.zeros(len(part.input_ids), np.int64), max_predictions) for part in row_batches(rows)]
    return rows._replace(
        input_ids=np.concatenate([part.input_ids for part in parts]).astype(id_dtype),
        sequence_lengths=np.concatenate([part.sequence_lengths for part in parts]),
        first_segment_lengths=np.concatenate([part.first_segment_lengths for part in parts]),
        masked_positions=np.concatenate([part.positions for part in parts]).astype(np.uint16),
        masked_ids=np.concatenate([part.ids for part in parts]).astype(id_dtype),
        masked_counts=np.concatenate([part.counts for part in parts]).astype(np.uint16),
    )


def row_batches(rows: Rows) -> Iterator[Rows]:
    """The rows, ROWS_PER_BATCH at a time."""
    for start in range(0, len(rows.input_ids), ROWS_PER_BATCH):
        yield Rows(*(None if column is None else column[start : start + ROWS_PER_BATCH] for column in rows))  # type: ignore[arg-type]
