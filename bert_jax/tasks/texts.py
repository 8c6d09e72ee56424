"""Encodes texts without labels, or pairs of texts, and their words."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from bert_jax.tasks.example import TokenRows, spans
from bert_jax.tasks.pairs import Pieces, encode_pieces
from bert_jax.tasks.text_stream import Texts
from bert_jax.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """The rows of R texts, and the word of each token."""

    rows: TokenRows
    words: Int64[np.ndarray, "N"]  # of each token, the number of its word, counted over all texts; -1 for none
    word_offsets: Int64[np.ndarray, "K"]  # K = R + 1: text r has the words word_offsets[r]:word_offsets[r + 1]


def encode(
    texts: Sequence[str | Texts], tokenizer: Tokenizer, max_length: int, by_word: bool, prompt: str = ""
) -> EncodedTexts:
    """[CLS] a [SEP], or [CLS] a [SEP] b [SEP] for a tuple of two texts; a text over max_length loses its end.

    The prompt is put before the first one. There are Tokenizer.pair_separators of [SEP] between two texts. With
    by_word, the words (separated by white space) are encoded separately, so that the word of each token is known;
    otherwise a whole text counts as one word.
    """
    parts: list[Texts] = [(text,) if isinstance(text, str) else text for text in texts]
    parts = [(prompt + first, *second) for first, *second in parts] if prompt else parts
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
