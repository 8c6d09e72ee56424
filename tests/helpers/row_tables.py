"""Rows in arrays in place of an opened data set, and a vocabulary for them."""

from pathlib import Path

import numpy as np

from bert_jax.data.example import Rows, max_predictions
from bert_jax.data.masking.rule import MaskingRule
from bert_jax.data.shards import Dataset
from bert_jax.tokenization.vocabulary import Vocabulary

CLS, SEP = 2, 3


class Facts(Vocabulary):
    """A vocabulary of fifty whose first five ids are special and whose last twenty are insides of words."""

    kind = "wordpiece"
    vocab_size, pad_id, mask_id, special_ids, content_hash = 50, 0, 4, (0, 1, 2, 3, 4), "f" * 64
    continuation = np.arange(50) >= 30
    unspaced = attached = np.zeros(50, bool)

    def __init__(self) -> None:
        pass


WORDS = MaskingRule("word")


class Table(Dataset):
    """Rows in arrays, with the facts of an opened dataset."""

    def __init__(self, rows: Rows, static: bool = False, rule: MaskingRule = WORDS) -> None:
        self.columns, self.rows, self.static = rows, len(rows.input_ids), static
        self.masking, self.cache_bytes = rule, 0.0
        self.seq_len, self.pack = rows.input_ids.shape[1], rows.sequence_lengths.shape[1]
        self.max_predictions = max_predictions(self.seq_len, self.pack, rule.rate)
        self.tokenizer_hash, self.fingerprint, self.directory = Facts.content_hash, "rows", Path("DIR")

    def gather(self, indices: np.ndarray, into: Rows | None = None) -> Rows:
        return Rows(*(None if column is None else column[indices] for column in self.columns))

    def unigram_counts(self) -> np.ndarray:
        return np.arange(50)


def packed_rows(count: int, width: int = 40, pack: int = 3) -> Rows:
    """Rows of one to three sequences, each a pair or a single segment, with some padding."""
    generator = np.random.default_rng(0)
    ids = np.zeros((count, width), np.uint16)
    lengths, firsts = np.zeros((2, count, pack), np.uint16)
    labels = np.full((count, pack), -1, np.int8)
    keys = generator.integers(0, 2**63, (count, pack)).astype(np.uint64)
    for row in range(count):
        start = 0
        for s in range(1 + row % pack):
            length = int(generator.integers(6, 13))
            first = int(generator.integers(3, length - 2)) if row % 2 else length
            ids[row, start : start + length] = generator.integers(5, 50, length)
            ids[row, start], ids[row, start + first - 1], ids[row, start + length - 1] = CLS, SEP, SEP
            lengths[row, s], firsts[row, s] = length, first
            if row % 2:
                labels[row, s] = s % 2
            start += length
    return Rows(ids, lengths, firsts, labels, keys)
