"""The inputs of predict, record by record: their texts and words. Errors name the line of the record."""

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_jax.command import UserError
from bert_jax.tasks.example import Sentence, Split

JOINER = "\u200d"  # between the parts of an emoji


class InputRecord(NamedTuple):
    """One input: a line of plain text, or the object that a line of JSON holds, or a text or object of a caller."""

    line: int  # in its file, from 1
    content: str | Mapping[str, Any]
    tabs: bool = True  # whether tabs separate the texts of a plain line; in the texts of a caller they are white space

    def plain_texts(self) -> list[str]:
        """The texts of a plain line."""
        assert isinstance(self.content, str)
        return self.content.split("\t") if self.tabs else [self.content]


class Words(NamedTuple):
    """The words of a text, and their positions in it."""

    words: tuple[str, ...]
    text: str | None  # None where only words were given
    offsets: tuple[tuple[int, int], ...] | None  # of each word, the characters [start, end) of the text


def texts_of(source: Path, record: InputRecord, names: Sequence[Sequence[str]], needed: int) -> list[str]:
    """The texts of a record: separated by tabs in a plain line, or the fields of these names.

    names has the possible field names of each text, and the first `needed` texts are required. Raises UserError for a
    text that is missing, empty or not a string, and for too many tabs.
    """
    if isinstance(record.content, str):
        texts: list[Any] = record.plain_texts()
        if len(texts) < needed and not record.tabs:
            raise UserError(
                f"{source} line {record.line} is one text, but the task needs {needed}. Give an object with the fields "
                f"{', '.join(choice[-1] for choice in names)}"
            )
        if not needed <= len(texts) <= len(names):
            expected = f"{needed}" if needed == len(names) else f"{needed} to {len(names)}"
            raise UserError(
                f"{source} line {record.line} has {len(texts)} texts separated by tabs; expected {expected}: "
                f"{', '.join(choice[-1] for choice in names)}. Correct the line"
            )
    else:
        found = [value_of(source, record, choice, required=place < needed) for place, choice in enumerate(names)]
        texts = [value for value in found if value is not None]
    return [checked_text(source, record.line, text) for text in texts]


def value_of(source: Path, record: InputRecord, names: Sequence[str], required: bool = True) -> Any:
    """The value of the first of these fields that an object has; None where it has none. Empty names are ignored.

    Raises UserError for a missing field that is required, and for a plain line.
    """
    if isinstance(record.content, str):
        raise UserError(
            f"{source} line {record.line} is plain text, but {names[-1]!r} is required. Write JSON lines: {{...}}"
        )
    for name in names:
        if name and record.content.get(name) is not None:
            return record.content[name]
    if not required:
        return None
    there = ", ".join(map(repr, record.content)) or "none"
    expected = " or ".join(repr(name) for name in dict.fromkeys(names) if name)
    raise UserError(f"{source} line {record.line} has no field {expected}; its fields are: {there}. Add or rename it")


def checked_text(source: Path, line: int, text: Any) -> str:
    """The text unchanged. Raises UserError for one that is empty, not a string, or not encodable as UTF-8."""
    if not isinstance(text, str):
        raise UserError(f"{source} line {line}: expected a string, got {text!r:.60}")
    if not text.strip():
        raise UserError(f"{source} line {line} is empty. Write a text in it, or remove the line")
    if not is_unicode(text):
        raise UserError(f"{source} line {line} has half of a surrogate pair, which is not a character")
    return text


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode a text: an escape in JSON may give half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_list(value: Any) -> bool:
    """Whether a value is a list, or what stands for one in rows of a caller: a tuple, or an array of NumPy."""
    return isinstance(value, list | tuple | np.ndarray)


def words_of(source: Path, record: InputRecord, column: str = "") -> Words:
    """The words of a record: the list in its `column`, `tokens` or `words`, or what its text splits into.

    Given tokens are located in the text, in order, where there is a text too. Raises UserError as texts_of does, and
    for a token that the text lacks.
    """
    tokens = None
    if not isinstance(record.content, str):
        tokens = record.content.get(column) if column else None
        if not _is_list(tokens):
            tokens = value_of(source, record, ("tokens", "words"), required=False)
    if tokens is None:
        (text,) = texts_of(source, record, [(column, "text")], needed=1)
        offsets = split_words(text)
        return Words(tuple(text[start:end] for start, end in offsets), text, tuple(offsets))
    if not _is_list(tokens) or not len(tokens):
        raise UserError(f"{source} line {record.line}: tokens is {tokens!r:.60}; expected a list of words")
    words = tuple(checked_text(source, record.line, token) for token in tokens)
    text = value_of(source, record, ("text",), required=False)
    if text is None or text is tokens:
        return Words(words, None, None)
    return Words(words, text, _located(source, record.line, words, checked_text(source, record.line, text)))


def sentences_of(source: Path, records: Sequence[InputRecord], column: str) -> Split[Sentence]:
    """Sentences without labels, of given words or of the words of texts (words_of)."""
    items = []
    for record in records:
        words, text, offsets = words_of(source, record, column)
        items.append(Sentence(words, None, (record.line,) * len(words), text, offsets))
    return Split(source, tuple(items), labelled=False)


def split_words(text: str) -> list[tuple[int, int]]:
    """Where the words of a raw text lie, as [start, end) in characters.

    White space parts words, and every character of Unicode's categories P (punctuation) and S (symbols) is a word of
    its own, as treebanks and CoNLL files nearly have it, together with the combining characters (category M, as the
    variation selector of an emoji) and the joiner behind it. What they split or join by the rules of a language
    ("do n't", "U.S.") takes a tokenizer of that language: give its words.
    """
    found: list[tuple[int, int]] = []
    start = None
    for place, character in enumerate(text):
        category = unicodedata.category(character)[0]
        if start is None and found and found[-1][1] == place and (category == "M" or character == JOINER):
            found[-1] = (found[-1][0], place + 1)
            continue
        mark = category in "PS"
        if start is not None and (mark or character.isspace()):
            found.append((start, place))
            start = None
        if mark:
            found.append((place, place + 1))
        elif start is None and not character.isspace():
            start = place
    if start is not None:
        found.append((start, len(text)))
    return found


def _located(source: Path, line: int, words: Sequence[str], text: str) -> tuple[tuple[int, int], ...]:
    found = []
    end = 0
    for word in words:
        start = text.find(word, end)
        if start < 0:
            raise UserError(f"{source} line {line}: the token {word!r} is not in the text after character {end}")
        end = start + len(word)
        found.append((start, end))
    return tuple(found)
