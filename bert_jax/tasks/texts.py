"""Reads and encodes texts and pairs of texts without labels; in a file, a tab separates the texts of a pair."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from bert_jax.command import UserError
from bert_jax.tasks.example import TokenRows, spans
from bert_jax.tasks.pairs import Pieces, encode_pieces
from bert_jax.tasks.reading import numbered_lines
from bert_jax.tokenizer import Tokenizer

Text = str | tuple[str, str]  # a text, or a pair


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """The rows of R texts, and the word of each token."""

    rows: TokenRows
    words: Int64[np.ndarray, "N"]  # of each token, the number of its word, counted over all texts; -1 for none
    word_offsets: Int64[np.ndarray, "K"]  # K = R + 1: text r has the words word_offsets[r]:word_offsets[r + 1]


def read_texts(path: str | Path) -> list[Text]:
    """The lines of a text file, plain or compressed; a line with a tab is a pair.

    Raises UserError for a line with two tabs, and for a file that is empty, damaged or not UTF-8.
    """
    texts: list[Text] = []
    for number, line in numbered_lines(Path(path)):
        first, *others = line.split("\t")
        if len(others) > 1:
            raise UserError(
                f"{path} line {number} has {len(others)} tabs; use one, between the two texts of a pair, or none"
            )
        texts.append((first, others[0]) if others else first)
    if not texts:
        raise UserError(f"{path} is empty; write one text on each line")
    return texts


def encode(texts: Sequence[Text], tokenizer: Tokenizer, max_length: int, by_word: bool) -> EncodedTexts:
    """[CLS] a [SEP], or [CLS] a [SEP] b [SEP] for a pair; a text over max_length loses its end.

    There are Tokenizer.pair_separators of [SEP] between two texts. With by_word, the words (separated by white space)
    are encoded separately, so that the word of each token is known; otherwise a whole text counts as one word.
    """
    parts = [(text,) if isinstance(text, str) else text for text in texts]
    units = [[tokenizer.as_in_text(part.split()) if by_word else [part] for part in found] for found in parts]
    paired = np.array([len(found) > 1 for found in parts])
    both = [found[0] for found in units], [found[1] if len(found) > 1 else [] for found in units]
    counts = np.array([list(map(len, side)) for side in both])  # of the words of first and second texts
    word_offsets = np.cumsum([0, *counts.sum(axis=0)], dtype=np.int64)
    pieces: list[Pieces] = []
    words = []  # of each piece, the number of its word
    for side, starts, sizes in zip(both, (word_offsets[:-1], word_offsets[:-1] + counts[0]), counts, strict=True):
        ids, bounds = tokenizer.encode_many([unit for units_of_text in side for unit in units_of_text])
        pieces.append((ids, bounds[np.cumsum([0, *sizes])]))
        words.append(np.repeat(spans(starts, sizes), np.diff(bounds)))
    encoded, cut, places = encode_pieces(pieces[0], pieces[1], paired, tokenizer, max_length)
    rows = TokenRows(
        input_ids=encoded.input_ids,
        offsets=encoded.offsets,
        first_lengths=encoded.first_lengths,
        pad_id=tokenizer.pad_id,
        truncated=int(cut.sum()),
    )
    return EncodedTexts(rows, np.concatenate([*words, [-1]])[places], word_offsets)
