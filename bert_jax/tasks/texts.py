"""Encodes texts without labels, or pairs of texts, and their words."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

from bert_jax.command import UserError
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
    counts = np.array([list(map(len, side)) for side in both], np.int64)  # of the words of first and second texts
    word_offsets = np.cumsum([0, *counts.sum(axis=0)], dtype=np.int64)
    pieces: list[Pieces] = []
    words = []  # of each piece, the number of its word
    for side, starts, sizes in zip(both, (word_offsets[:-1], word_offsets[:-1] + counts[0]), counts, strict=True):
        ids, bounds = tokenizer.of_tasks.encode_many([unit for units_of_text in side for unit in units_of_text])
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


def checked_texts(texts: Iterable[Any]) -> list[Texts]:
    """The texts of a caller.

    Raises UserError for what refuse_other_inputs refuses, and for an item that is neither a string nor a pair.
    """
    refuse_other_inputs(texts)
    found = []
    for number, text in enumerate(texts, 1):
        parts = (text,) if isinstance(text, str) else text
        pair = isinstance(parts, tuple | list) and len(parts) in (1, 2)
        if not pair or not all(isinstance(part, str) for part in parts):
            raise UserError(f"text {number} is {text!r:.60}; expected a string, or a tuple of two strings")
        found.append(tuple(parts))
    return found


def checked_strings(texts: Iterable[Any]) -> list[str]:
    """The texts of a caller, none of which is a pair. Raises UserError as checked_texts does."""
    refuse_other_inputs(texts)
    found = list(texts)
    for number, text in enumerate(found, 1):
        if not isinstance(text, str):
            raise UserError(f"text {number} is {text!r:.60}; expected a string")
    return found


def refuse_other_inputs(texts: Any) -> None:
    """Raises UserError for a single text, for what is no list of anything, and for a dictionary and a DataFrame, whose
    items are the names of columns."""
    if isinstance(texts, str) or not is_iterable(texts):
        what = "the text " if isinstance(texts, str) else ""
        raise UserError(f"texts is {what}{texts!r:.40}; expected a list of texts")
    if isinstance(texts, Mapping):
        raise UserError(f"the data is one object with the keys {', '.join(map(str, texts))}; expected a list of inputs")
    if hasattr(texts, "to_dict") and hasattr(texts, "columns"):
        raise UserError(
            f"the data is a table with the columns {', '.join(map(str, texts.columns))}; expected texts. Give a column "
            "of it, such as table['text']"
        )


def is_iterable(value: Any) -> bool:
    """Whether a value can be iterated over, also by its indices alone. An array without axes cannot."""
    try:
        iter(value)
    except TypeError:
        return False
    return True
