"""The word of a text that a task asks about, marked in the text itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.command import UserError

# Seldom in running text and in every vocabulary, a token of its own between blanks.
MARK = "*"


def mark_words(path: Path, line: int, texts: Sequence[str], borders: Sequence[Any]) -> list[str]:
    """Each text with its word between marks: "to * place * it", from the word's characters [start, end), two a text.

    The word's own tokens stay what they are, and any encoder with a head for classes can be asked. The baseline of
    Wang et al. 2019b reads the words' vectors beside that of [CLS] instead, for which its model has a head of its own.
    Raises UserError, with file and line, for borders that are no place in the text.
    """
    marked = []
    places = [int(value) if isinstance(value, str) and value.isdecimal() else value for value in borders]
    for text, start, end in zip(texts, places[::2], places[1::2], strict=True):
        if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= len(text)):
            raise UserError(
                f"{path} line {line}: characters {start!r} to {end!r} are no word of {text!r:.60}, which has "
                f"{len(text)}. Correct the line"
            )
        marked.append(f"{text[:start]}{MARK} {text[start:end]} {MARK}{text[end:]}")
    return marked
