"""Readers of tables (TSV), CoNLL columns and CoNLL-U, plain or compressed; every mistake told with file and line."""

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.tasks.example import Example, Sentence, Split

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
# The columns of CoNLL-U: https://universaldependencies.org/format.html
CONLLU_COLUMNS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
# Marks the start of a document in the CoNLL-2003 files; no sentence of the task.
DOCUMENT_MARK = "-DOCSTART-"


@dataclass(frozen=True)
class Columns:
    """Which columns of a file hold what: header names, or numbers from 0 (a negative number counts from the end)."""

    text: str = ""
    text_pair: str = ""
    label: str = ""


def kind_of_file(path: Path) -> str:
    """`conllu`, `conll` or `table`, by the name's ending (a .gz or .xz left out)."""
    name = path.name.removesuffix(".gz").removesuffix(".xz")
    if name.endswith(".conllu"):
        return "conllu"
    return "conll" if name.endswith((".conll", ".iob", ".iob2", ".bio")) else "table"


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file and their numbers from 1, without their ends.

    Only a line feed ends a line (texts hold U+2028 and the like); a byte-order mark is dropped. Raises UserError
    for a missing file, a folder, a broken compressed file or bytes that are not UTF-8.
    """
    if not path.exists():
        raise UserError(f"no such file: {path}. Check task.train, task.dev, task.test or --data")
    if path.is_dir():
        raise UserError(f"{path} is a folder where a file was wanted. Name a file in it")
    number = 0
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} line {number} is not UTF-8 ({error.reason}). Convert the file to UTF-8") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is cut short or damaged after line {number}: {error}. Fetch it again") from error


def read_table(path: Path, columns: Columns, label_required: bool) -> Split[Example]:
    """Reads a table of tab-separated, never quoted fields.

    The first line is a header, unless every given column is a number. Without label_required a file that lacks the
    label column is read as unlabelled. Raises UserError for a missing column, a ragged line or an empty file.
    """
    if not columns.text:
        raise UserError(
            f"task.text is not known: name the column of {path} that holds the text (a header name or a number)"
        )
    given = [name for name in (columns.text, columns.text_pair, columns.label) if name]
    lines = ((number, line) for number, line in numbered_lines(path) if line)
    first = next(lines, None)
    if first is None:
        raise UserError(f"{path} is empty. Give a file with one example a line")
    has_header = not all(_is_number(name) for name in given)
    names = first[1].split("\t") if has_header else []
    width = len(first[1].split("\t"))
    text = _table_column(path, names, width, columns.text, "text")
    pair = _table_column(path, names, width, columns.text_pair, "text_pair") if columns.text_pair else None
    label = None
    if columns.label and (label_required or _has_column(names, width, columns.label)):
        label = _table_column(path, names, width, columns.label, "label")
    elif label_required:
        raise UserError(f"task.label is not known: name the column of {path} that holds the label")
    items = []
    for number, line in lines if has_header else _chain(first, lines):
        fields = line.split("\t")
        if len(fields) != width:
            raise UserError(
                f"{path} line {number} has {len(fields)} fields, the first line has {width}. "
                "Fields are parted by one tab and are never quoted"
            )
        items.append(
            Example(
                fields[text],
                None if pair is None else fields[pair],
                None if label is None else fields[label].strip(),
                number,
            )
        )
    if not items:
        raise UserError(f"{path} holds a header and no examples")
    return Split(path, tuple(items), label is not None)


def read_conllu(path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
    """Reads CoNLL-U: words are FORM and tags UPOS unless columns name others.

    Lines of multiword tokens (1-2) and empty nodes (1.1) are no words and are left out. Raises UserError for a line
    without the ten columns, an unknown column name or a file without words.
    """
    word_column = _conllu_column(columns.text or "FORM", "text")
    tag_column = _conllu_column(columns.label or "UPOS", "label")
    groups: list[list[tuple[int, list[str]]]] = [[]]
    for number, line in numbered_lines(path):
        if not line.strip():
            groups.append([])
        elif not line.startswith("#"):
            fields = line.split("\t")
            if len(fields) != len(CONLLU_COLUMNS):
                raise UserError(
                    f"{path} line {number} has {len(fields)} tab-separated fields; a word of CoNLL-U has "
                    f"{len(CONLLU_COLUMNS)} (https://universaldependencies.org/format.html)"
                )
            if fields[0].isdigit():
                groups[-1].append((number, fields))
    return _sentences(path, groups, word_column, tag_column)


def read_conll(path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
    """Reads CoNLL columns: a word a line, columns parted by tabs or else by spaces, a blank line between sentences.

    Words are in column 0 and tags in the last unless columns give other numbers; -DOCSTART- lines are left out.
    Without label_required a file of one column is read as unlabelled. Raises UserError for a line with another
    number of columns than the first, a column that is not there or a file without words.
    """
    groups: list[list[tuple[int, list[str]]]] = [[]]
    width = 0
    for number, line in numbered_lines(path):
        if not line.strip():
            groups.append([])
            continue
        fields = line.split("\t") if "\t" in line else line.split()
        width = width or len(fields)
        if len(fields) != width:
            raise UserError(f"{path} line {number} has {len(fields)} columns, the first line has {width}")
        if fields[0] != DOCUMENT_MARK:
            groups[-1].append((number, fields))
    word_column = _conll_column(path, columns.text or "0", width, "text") if width else 0
    if width == 1 and not label_required:
        return _sentences(path, groups, word_column, None)
    tag_column = _conll_column(path, columns.label or "-1", width, "label") if width else 0
    if width == 1:
        raise UserError(f"{path} has one column; words and tags need two, parted by a tab or by spaces")
    return _sentences(path, groups, word_column, tag_column)


def _sentences(
    path: Path, groups: list[list[tuple[int, list[str]]]], word_column: int, tag_column: int | None
) -> Split[Sentence]:
    items = tuple(
        Sentence(
            words=tuple(fields[word_column] for _, fields in group),
            tags=None if tag_column is None else tuple(fields[tag_column] for _, fields in group),
            lines=tuple(number for number, _ in group),
        )
        for group in groups
        if group
    )
    if not items:
        raise UserError(f"{path} holds no words. Give one word a line and a blank line between sentences")
    return Split(path, items, tag_column is not None)


def _chain(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _is_number(name: str) -> bool:
    return name.removeprefix("-").isdigit()


def _has_column(names: list[str], width: int, column: str) -> bool:
    return column in names or (_is_number(column) and -width <= int(column) < width)


def _table_column(path: Path, names: list[str], width: int, column: str, role: str) -> int:
    if not _has_column(names, width, column):
        known = f"its columns are: {', '.join(names)}" if names else f"it has columns 0 to {width - 1} and no header"
        raise UserError(f"{path} has no column {column!r}; {known}. Change --config.task.{role}")
    return names.index(column) if column in names else int(column) % width


def _conllu_column(column: str, role: str) -> int:
    if column in CONLLU_COLUMNS:
        return CONLLU_COLUMNS.index(column)
    if _is_number(column) and 0 <= int(column) < len(CONLLU_COLUMNS):
        return int(column)
    raise UserError(
        f"CoNLL-U has no column {column!r}; its columns are: {', '.join(CONLLU_COLUMNS)}. Change --config.task.{role}"
    )


def _conll_column(path: Path, column: str, width: int, role: str) -> int:
    if not _is_number(column) or not -width <= int(column) < width:
        raise UserError(
            f"{path} has no column {column!r}; it has columns 0 to {width - 1}. Change --config.task.{role}"
        )
    return int(column) % width
