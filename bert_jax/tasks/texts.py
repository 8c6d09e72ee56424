"""Reads and encodes texts without labels: one on each line, with a tab between the two texts of a pair."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from bert_jax.command import UserError
from bert_jax.tasks.example import TokenRows
from bert_jax.tasks.pairs import truncated_lengths
from bert_jax.tasks.reading import numbered_lines
from bert_jax.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """The rows of R texts, and the word of each token."""

    rows: TokenRows
    words: Int64[np.ndarray, "N"]  # of each token, the number of its word, counted over all texts; -1 for none
    word_offsets: Int64[np.ndarray, "K"]  # K = R + 1: text r has the words word_offsets[r]:word_offsets[r + 1]


def read_texts(path: str | Path) -> list[str]:
    """The lines of a text file, plain or compressed. Raises UserError when it is empty, damaged or not UTF-8."""
    texts = [line for _, line in numbered_lines(Path(path))]
    if not texts:
        raise UserError(f"{path} is empty; write one text on each line")
    return texts


def encode(texts: Sequence[str], tokenizer: Tokenizer, max_length: int, by_word: bool) -> EncodedTexts:
    """[CLS] a [SEP], or [CLS] a [SEP] b [SEP] for two texts separated by a tab; a text over max_length loses its end.

    There are Tokenizer.pair_separators of [SEP] between two texts. With by_word, the words (separated by white space)
    are encoded separately, so that the word of each token is known; otherwise a whole text counts as one word. Raises
    UserError for a text with two tabs.
    """
    pairs = [text.split("\t") for text in texts]
    for line, parts in enumerate(pairs, start=1):
        if len(parts) > 2:
            raise UserError(f"line {line} has {len(parts) - 1} tabs; use one, between the two texts of a pair")
    units = [[tokenizer.as_in_text(part.split()) if by_word else [part] for part in parts] for parts in pairs]
    ids, offsets = tokenizer.encode_many([unit for parts in units for part in parts for unit in part])
    unit_of_piece = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    counts = np.array([[len(parts[0]), len(parts[1]) if len(parts) > 1 else 0] for parts in units]).reshape(-1, 2)
    bounds = offsets[np.concatenate([[0], counts.ravel().cumsum()])]  # of the pieces of each text's two parts
    lengths = np.diff(bounds).reshape(-1, 2)
    paired = np.array([len(parts) > 1 for parts in units])
    separators = tokenizer.pair_separators
    kept = np.where(
        paired[:, None],
        np.stack(truncated_lengths(lengths[:, 0], lengths[:, 1], max_length - 2 - separators), axis=1),
        np.minimum(lengths, max_length - 2),
    )
    rows, words = [], []
    for row, (first, second) in enumerate(kept):
        spans = [slice(bounds[2 * row], bounds[2 * row] + first)]
        if paired[row]:
            spans.append(slice(bounds[2 * row + 1], bounds[2 * row + 1] + second))
        rows.append(_joined(tokenizer.cls_id, [ids[span] for span in spans], [tokenizer.sep_id], separators))
        words.append(_joined(-1, [unit_of_piece[span] for span in spans], [-1], separators))
    encoded = TokenRows(
        input_ids=np.concatenate(rows).astype(np.int32),
        offsets=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        first_lengths=(kept[:, 0] + 1 + np.where(paired, separators, 1)).astype(np.int32),
        pad_id=tokenizer.pad_id,
        truncated=int((kept < lengths).any(axis=1).sum()),
    )
    return EncodedTexts(encoded, np.concatenate(words), np.cumsum([0, *counts.sum(axis=1)], dtype=np.int64))


def _joined(begin: int, parts: Sequence[np.ndarray], end: list[int], between: int) -> np.ndarray:
    """A row: `begin`, the parts with `between` times `end` between them, and `end` once after the last part."""
    separators = [*[end * between] * (len(parts) - 1), end]
    ended = [np.concatenate([part, after]) for part, after in zip(parts, separators, strict=True)]
    return np.concatenate([[begin], *ended]).astype(np.int64)
