"""Marks the word of a text that a task asks about, in the text itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.command import UserError

# Rare in running text, in every vocabulary, and a single token between spaces.
MARK = "*"


def mark_words(path: Path, line: int, texts: Sequence[str], borders: Sequence[Any]) -> list[str]:
    """Puts the word of each text between marks: "to * place * it". borders has its characters [start, end) by text.

    The tokens of the word do not change, and any encoder with a classification head can be used. The baseline of
    Wang et al. 2019b instead classifies the words' vectors concatenated with that of [CLS], which needs a special
    head. Raises UserError, with file and line, for borders that are not inside the text.
    """
    marked = []
    places = [int(value) if isinstance(value, str) and value.isdecimal() else value for value in borders]
    for text, start, end in zip(texts, places[::2], places[1::2], strict=True):
        if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= len(text)):
            raise UserError(
                f"{path} line {line}: characters {start!r} to {end!r} are not in {text!r:.60}, which has "
                f"{len(text)} characters. Correct the line"
            )
        marked.append(f"{text[:start]}{MARK} {text[start:end]} {MARK}{text[end:]}")
    return marked
