"""Reads the inputs of predict and embed, from files, standard input and Python.

In order: the texts and words in one record, the lines of predict, and the texts that embed streams. Errors name the
record's line.
"""

import json
import os
import select
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np

from bert_jax.errors import UserError
from bert_jax.tasks.reading.tables import (
    Column,
    data_set_files,
    delimited_records,
    ending,
    is_unicode,
    json_form,
    json_lines,
    json_object,
    json_rows,
    numbered_lines,
    parquet_rows,
    parquet_schemas,
)
from bert_jax.tokenization.specification import is_unspaced

# The inputs of predict, record by record: their texts and words.


JOINER = "\u200d"  # between the parts of an emoji
# How a raw text is split where its script has no spaces between words (Chinese, Japanese, Thai ...).
PIECES = "pieces"  # before each of the tokenizer's pieces; done by the task, which has a tokenizer
CHARACTERS = "characters"
ALL_CHARACTERS = "all_characters"  # also between letters and digits of other scripts, as some Chinese corpora are
SINGLE = 0.9  # the share of characters that must be words of their own, if words are characters
ENOUGH = 20  # characters of other scripts that show how they are split


class InputRecord(NamedTuple):
    """One input: a line of plain text, the object in a JSON line, or a caller's text, tuple of texts or object."""

    line: int  # in its file, from 1
    content: str | tuple[str, ...] | Mapping[str, Any]
    tabs: bool = True  # whether tabs separate the texts of a plain line; in the texts of a caller they are white space

    def plain_texts(self) -> list[str]:
        """Splits a plain line into its texts, or lists a tuple's."""
        assert not isinstance(self.content, Mapping)
        if isinstance(self.content, tuple):
            return list(self.content)
        return self.content.split("\t") if self.tabs else [self.content]


class Words(NamedTuple):
    """A text's words, and their positions in it."""

    words: tuple[str, ...]
    text: str | None  # None if only words were given
    offsets: tuple[tuple[int, int], ...] | None  # of each word, the characters [start, end) of the text
    raw: bool = False  # whether the words are the text, split


def record_texts(source: Path, record: InputRecord, names: Sequence[Sequence[str]], needed: int) -> list[str]:
    """Returns a record's texts: separated by tabs in a plain line, or the fields with these names.

    Args:
        names: The possible field names, text by text.
        needed: How many of the texts are required, from the first.

    Raises:
        UserError: A text is missing, empty or not a string, or there are too many tabs.
    """
    if not isinstance(record.content, Mapping):
        texts: list[Any] = record.plain_texts()
        fields = ", ".join(choice[-1] for choice in names)
        # In a caller's text, tabs separate nothing, so the advice for lines would not help.
        if len(texts) < needed and not record.tabs:
            raise UserError(
                f"{source} line {record.line} is one text, but the task needs {needed}. Give a tuple, or an object "
                f"with the fields {fields}"
            )
        if not needed <= len(texts) <= len(names):
            expected = f"{needed}" if needed == len(names) else f"{needed} to {len(names)}"
            raise UserError(
                f"{source} line {record.line} has {len(texts)} texts{' separated by tabs' if record.tabs else ''}; "
                f"expected {expected}: {fields}. Correct the line"
            )
    else:
        values = [read_value(source, record, choice, required=place < needed) for place, choice in enumerate(names)]
        texts = [value for value in values if value is not None]
    return [checked_text(source, record.line, text) for text in texts]


def read_value(source: Path, record: InputRecord, names: Sequence[str], required: bool = True) -> Any:
    """Returns the value of the first of these fields in the object, else None. Empty names are ignored.

    Raises:
        UserError: A required field is missing, or the record is a plain line.
    """
    if not isinstance(record.content, Mapping):
        raise UserError(
            f"{source} line {record.line} is plain text, but {names[-1]!r} is required. Write JSON lines: {{...}}"
        )
    for name in names:
        if name and record.content.get(name) is not None:
            return record.content[name]
    if not required:
        return None
    if null := next((name for name in names if name in record.content), ""):
        raise UserError(f"{source} line {record.line}: {null!r} is null. Give it a value, or remove the line")
    fields = ", ".join(map(repr, record.content)) or "none"
    expected = " or ".join(repr(name) for name in dict.fromkeys(names) if name)
    raise UserError(f"{source} line {record.line} has no field {expected}; its fields are: {fields}. Add or rename it")


def checked_text(source: Path, line: int, text: Any, part: str = "") -> str:
    """Checks a text, and returns it unchanged.

    Args:
        part: Names a part of a text, such as a token, which may be empty.

    Raises:
        UserError: The text is empty, not a string, or cannot be encoded as UTF-8.
    """
    if not isinstance(text, str):
        raise UserError(f"{source} line {line}: {part and f'{part}: '}expected a string, got {text!r:.60}")
    if not part and not text.strip():
        raise UserError(f"{source} line {line} is empty. Write a text in it, or remove the line")
    if not is_unicode(text):
        raise UserError(f"{source} line {line} has half of a surrogate pair, which is not a character")
    return text


def record_words(source: Path, record: InputRecord, column: str = "", unit: str = CHARACTERS) -> Words:
    """Returns a record's words: the list in `column`, `tokens` or `words`, or its text, split by split_text.

    If there are tokens and a text, the tokens are located in the text, in order.

    Raises:
        UserError: As in record_texts, or the text lacks a token.
    """
    lists = list | tuple | np.ndarray  # in rows of a caller, tuples and arrays stand for lists
    tokens = None
    if isinstance(record.content, Mapping):
        tokens = record.content.get(column) if column else None
        if not isinstance(tokens, lists):
            text = tokens
            tokens = read_value(source, record, ("tokens", "words"), required=False)
            # The tokens of Prodigy are objects; its texts have entities by their characters.
            if isinstance(text, str) and isinstance(tokens, list) and any(isinstance(each, dict) for each in tokens):
                tokens = None
    if tokens is None:
        (text,) = record_texts(source, record, [(column, "text")], needed=1)
        offsets = split_text(text, unit)
        return Words(tuple(text[start:end] for start, end in offsets), text, tuple(offsets), raw=True)
    if not isinstance(tokens, lists) or not len(tokens):
        raise UserError(f"{source} line {record.line}: tokens is {tokens!r:.60}; expected a list of words")
    # As in training, a token may be white space or empty.
    words = tuple(checked_text(source, record.line, token, f"token {number}") for number, token in enumerate(tokens))
    text = read_value(source, record, ("text",), required=False)
    # The column of tokens may itself be called `text`.
    if text is None or text is tokens:
        return Words(words, None, None)
    checked_text(source, record.line, text)
    offsets, end = [], 0
    for word in words:
        # From the end of the last token, so that a repeated word is located at its own place.
        start = text.find(word, end)
        if start < 0:
            raise UserError(f"{source} line {record.line}: the token {word!r} is not in the text after character {end}")
        end = start + len(word)
        offsets.append((start, end))
    return Words(words, text, tuple(offsets))


def split_words(text: str) -> list[tuple[int, int]]:
    """Splits a raw text into words, as [start, end) in characters.

    White space separates words. A character of Unicode's categories P (punctuation) and S (symbols) is a word of its
    own, nearly as in treebanks and CoNLL files, together with following combining characters (category M, such as the
    variation selector of an emoji) and joiners. Splits by a language's rules ("do n't", "U.S.") need its tokenizer;
    give words instead of a text.
    """
    words: list[tuple[int, int]] = []
    start = None
    for place, character in enumerate(text):
        category = unicodedata.category(character)[0]
        # A combining character directly after a mark, such as an emoji, belongs to it. After a letter, it continues the
        # word below.
        if start is None and words and words[-1][1] == place and (category == "M" or character == JOINER):
            words[-1] = (words[-1][0], place + 1)
            continue
        mark = category in "PS"
        if start is not None and (mark or character.isspace()):
            words.append((start, place))
            start = None
        if mark:
            words.append((place, place + 1))
        elif start is None and not character.isspace():
            start = place
    if start is not None:
        words.append((start, len(text)))
    return words


def split_text(text: str, unit: str = CHARACTERS) -> list[tuple[int, int]]:
    """split_words, whose words in scripts without spaces are split into characters, with their marks, unless PIECES."""
    offsets = split_words(text)
    if unit == PIECES or text.isascii():
        return offsets
    return cut_words(text, offsets, range(len(text) + 1), everywhere=unit == ALL_CHARACTERS)


def cut_words(
    text: str, offsets: Sequence[tuple[int, int]], borders: Collection[int], everywhere: bool = False
) -> list[tuple[int, int]]:
    """Splits words at those borders (characters in the text) next to a character from a script without spaces.

    With `everywhere`, at all borders. Marks and joiners stay with the character before them.
    """
    words = []
    for first, end in offsets:
        start = first
        for place in range(first + 1, end):
            joined = text[place] == JOINER or text[place - 1] == JOINER or unicodedata.category(text[place])[0] == "M"
            beside = everywhere or is_unspaced(text[place]) or is_unspaced(text[place - 1])
            if beside and not joined and place in borders:
                words.append((start, place))
                start = place
        words.append((start, end))
    return words


def unit_of_words(sentences: Iterable[Sequence[str]]) -> str:
    """How the words of a training file split text without spaces: by CHARACTERS, ALL_CHARACTERS, or else PIECES."""
    counts = Counter(word for words in sentences for word in words if word.isalnum() or not word.isascii())
    single, total = [0, 0], [0, 0]  # characters of scripts without spaces, and other letters and digits
    for word, count in counts.items():
        letters = [character for character in word if character.isalnum()]
        for character in letters:
            other = not is_unspaced(character)
            # As indices, False is 0 and True is 1.
            total[other] += count
            single[other] += count * (len(letters) == 1)
    if not total[0] or single[0] < SINGLE * total[0]:
        return PIECES
    return ALL_CHARACTERS if total[1] >= ENOUGH and single[1] >= SINGLE * total[1] else CHARACTERS


# The lines that predict reads from files and standard input, and their forms.


FORMS = ("auto", "text", "jsonl", "task")
PYTHON = "python"  # the form of texts and objects of a caller
STDIN = Path("standard input")  # in messages
FORM_OF_ENDING = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text", ".text": "text", "": "text"}
CHUNK = 1 << 20  # bytes; a pipe returns at most what it holds

Line = tuple[int, str]  # its number, from 1, and its content
Item = TypeVar("Item")


def form_of_file(path: Path) -> str:
    """`text` (one input per line), `jsonl` (one object per line) or `task` (the format of the training files).

    The ending of the name decides; the ending of a compressed file does not count.
    """
    return "jsonl" if json_form(path) == "lines" else FORM_OF_ENDING.get(ending(path), "task")


def form_of_line(text: str) -> str:
    """The form of a stream with this first line: `jsonl` if the line is a JSON object, otherwise `text`."""
    try:
        return "jsonl" if isinstance(json.loads(text), dict) else "text"
    except (ValueError, RecursionError):
        return "text"


def without_blank_json(lines: Iterable[Line], form: str) -> Iterator[Line]:
    """Drops blank lines from JSON lines, because, as in task files, they hold no input."""
    return (line for line in lines if form != "jsonl" or line[1].strip())


def windows(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """The items in lists of `size`; the last list may be shorter."""
    remaining = iter(items)
    # The first empty list ends the iteration.
    return iter(lambda: list(islice(remaining, size)), [])


def stream_windows(stream: IO[bytes], size: int) -> Iterator[list[Line]]:
    """Yields a stream's lines, without line ends, in lists of at most `size` lines.

    A list is yielded as soon as reading more would wait. A program that writes a line into a pipe and waits for its
    prediction therefore receives it.

    Raises:
        UserError: A line is not UTF-8.
    """
    number, unfinished = 0, b""
    waiting: list[bytes] = []
    # os.read returns what the pipe holds. stream.read would wait for CHUNK bytes, and its buffer would hide lines from
    # select.
    while chunk := os.read(stream.fileno(), CHUNK):
        # The last part has no line end yet.
        *lines, unfinished = (unfinished + chunk).split(b"\n")
        waiting += lines
        # select tells whether reading would wait.
        while len(waiting) >= size or (waiting and not select.select([stream], [], [], 0)[0]):
            yield _decoded(waiting[:size], number)
            number += len(waiting[:size])
            del waiting[:size]
    waiting += [unfinished] if unfinished else []
    if waiting:
        yield _decoded(waiting, number)


def _decoded(lines: list[bytes], before: int) -> list[Line]:
    """Lines as text. `before` lines precede them in the stream; a byte-order mark at its start is dropped."""
    decoded = []
    for number, line in enumerate(lines, before + 1):
        try:
            decoded.append((number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r")))
        except UnicodeDecodeError as error:
            raise UserError(f"{STDIN} line {number} is not UTF-8 ({error.reason}). Convert it to UTF-8") from error
    return decoded


def to_record(
    source: Path, number: int, content: str | tuple[str, ...] | Mapping[str, Any], form: str, words: bool
) -> InputRecord:
    """Makes an InputRecord from a line, or from a caller's object.

    Args:
        words: Whether a line of text holds words separated by white space.

    Raises:
        UserError: A line of the form jsonl is not a JSON object.
    """
    if not isinstance(content, str):
        return InputRecord(number, content, tabs=False)
    if form not in ("text", PYTHON):
        return InputRecord(number, json_object(f"{source} line {number}", content))
    # The text gives the words their offsets. A line without words stays a text, so that the reader reports it as empty.
    if words and content.split():
        return InputRecord(number, {"tokens": content.split(), "text": content})
    return InputRecord(number, content, tabs=form == "text")


# Streams texts, or pairs of texts, from a file of lines, of JSON lines, of Parquet, or from a table.


STREAM_FORMS = ("auto", "text", "jsonl", "parquet", "csv", "tsv")
STREAM_FORM_OF_ENDING = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".csv": "csv", ".json": "json"}
TEXT = "text"  # the default name of the column of texts

Texts = tuple[str, ...]  # one text, or the two of a pair


def read_stream(path: Path, form: str = "auto", text: str = "", text_pair: str = "") -> Iterator[Texts]:
    """Yields a file's texts in order; only a part is in memory at a time.

    Blank lines between JSON lines are skipped.

    Args:
        form: By default, by the ending of the name; a Parquet file may stand for several (files_read). In lines of
            text, a tab separates the two texts of a pair. In the other forms, a text may hold line ends and tabs.
        text: The field or column of texts; empty: `text`. CSV and TSV have a header line, unless both names are
            numbers, from 0.
        text_pair: The field or column of the second text of a pair.

    Raises:
        UserError: The file or a field is missing, a value is not a text, names are given for lines of text, or form is
            auto for a .json file without rows (tables.json_form). The message names the line.
    """
    # Neither function is a generator, so mistakes in arguments raise at the call, and not with the first text.
    return (texts for _, texts in numbered_texts(path, form, text, text_pair))


def numbered_texts(
    path: Path, form: str = "auto", text: str = "", text_pair: str = "", more: Sequence[str] = ()
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yields the line of each text, from 1, and the text as read_stream does, followed by the values of more columns.

    Raises:
        UserError: As read_stream, or one of the columns is missing.
    """
    if form not in STREAM_FORMS:
        raise UserError(f"unknown --form {form!r}; choose from {', '.join(STREAM_FORMS)}")
    form = _stream_form(path, form)
    if form == "json" and json_form(path) == "squad":
        raise UserError(
            f"{path} is a JSON document without rows, and texts are read from rows. Write one object per line, "
            "or a list of objects"
        )
    if form == "text":
        flags = {"text": text, "text_pair": text_pair, "group": ",".join(more)}
        if named := " and ".join(f"--{flag} is {name!r}" for flag, name in flags.items() if name):
            raise UserError(
                f"{named}, but {path} is read as lines of text, which have no columns. Leave "
                "them out, or name the form of the file: --form csv, tsv, jsonl or parquet"
            )
        return _lines(path)
    names = [text or TEXT, *([text_pair] if text_pair else [])]
    columns = [Column(name, role) for name, role in zip(names, ("text", "text_pair"), strict=False)]
    columns += [Column(name, "group") for name in more]
    if form in ("csv", "tsv"):
        return iter(delimited_records(path, columns, quoted=form == "csv")[1])
    by_name = {"json": json_rows, "jsonl": json_lines}
    rows = by_name[form](path) if form in by_name else parquet_rows(parquet_schemas(path, columns), [*names, *more])
    return _fields(path, names, more, rows)


def files_read(path: Path, form: str = "auto") -> list[Path]:
    """Lists the files that read_stream reads: path, or all files in the Parquet data set that it begins."""
    return data_set_files(path) if _stream_form(path, form) == "parquet" else [path]


def read_texts(path: Path, form: str = "auto", text: str = "", text_pair: str = "") -> list[Texts]:
    """All texts of a file. Raises UserError as read_stream does, and for a file without texts."""
    texts = list(read_stream(path, form, text, text_pair))
    if not texts:
        raise UserError(f"{path} has no texts. Write one on each line, or below the header of a table")
    return texts


def _stream_form(path: Path, form: str) -> str:
    return STREAM_FORM_OF_ENDING.get(ending(path), "text") if form == "auto" else form


def _lines(path: Path) -> Iterator[tuple[int, Texts]]:
    for number, line in numbered_lines(path):
        texts = tuple(line.split("\t"))
        if len(texts) > 2:
            raise UserError(
                f"{path} line {number} has {len(texts) - 1} tabs; use one, between the two texts of a pair, or none"
            )
        yield number, texts


def _fields(
    path: Path, names: Sequence[str], more: Sequence[str], rows: Iterable[tuple[int, Mapping[str, Any]]]
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    for number, row in rows:
        for name in (*names, *more):
            wrong = not isinstance(row.get(name), str) if name in names else row.get(name) is None
            if wrong:
                fields = ", ".join(map(repr, row)) or "none"
                expected = "a text" if name in names else "a group"
                raise UserError(
                    f"{path} line {number}: {name!r} is {row.get(name)!r:.40}, not {expected}. Its fields are "
                    f"{fields}; name one with --{'text' if name in names else 'group'}"
                )
        yield number, tuple(row[name] for name in (*names, *more))
