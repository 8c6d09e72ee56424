"""Counts the tokens and the words of held-out rows, which divide a log-likelihood."""

from typing import NamedTuple

import numpy as np

from bert_jax.data.example import unmasked_ids
from bert_jax.data.loader import RowTable
from bert_jax.data.masking import MaskingTokenizer, token_kinds
from bert_jax.data.masking.sequences import SPECIAL, cut, find_words

ROWS_AT_ONCE = 4096


class WordCounts(NamedTuple):
    """The tokens of some rows, without padding and without the first token of each sequence ([CLS])."""

    ordinary: int  # tokens that are not special
    words: int  # ordinary tokens that begin a word
    special: int  # special tokens: each [SEP], and the token of unknown text


def count_words(dataset: RowTable, tokenizer: MaskingTokenizer, max_rows: int = 0) -> WordCounts:
    """Counts the first max_rows rows; 0 means all.

    A word is what whole-word masking masks together, by the rule of the rows: a token with the continuation tokens
    after it. A continuation token after a special token begins a word.
    """
    kinds = token_kinds(tokenizer, dataset.masking.words)
    count = min(dataset.rows, max_rows) if max_rows > 0 else dataset.rows
    total = np.zeros(3, np.int64)
    for start in range(0, count, ROWS_AT_ONCE):
        rows = dataset.gather(np.arange(start, min(start + ROWS_AT_ONCE, count)))
        sequences = cut(rows, kinds.take(unmasked_ids(rows)))
        ordinary = int((sequences.kinds[:, 1:] != SPECIAL).sum())
        after_first = int(np.maximum(sequences.lengths - 1, 0).sum())
        total += (ordinary, int(find_words(sequences).starts[:, 1:].sum()), after_first - ordinary)
    return WordCounts(*total.tolist())
