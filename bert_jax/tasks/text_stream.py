"""Streams texts, or pairs of texts, from a file of lines, of JSON lines, of Parquet, or from a table."""

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq

from bert_jax.command import UserError
from bert_jax.tasks.reading import files_of, numbered_lines, plain_name
from bert_jax.tasks.reading.columns import is_number, place_of
from bert_jax.tasks.reading.delimited import delimited_lines, ragged
from bert_jax.tasks.reading.text_lines import check_file

FORMS = ("auto", "text", "jsonl", "parquet", "csv", "tsv")
FORM_OF_ENDING = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".csv": "csv", ".json": "json"}
TEXT = "text"  # the name of the column of texts where none is given
ROWS_AT_ONCE = 4096

Texts = tuple[str, ...]  # one text, or the two of a pair


def read_stream(path: Path, form: str = "auto", text: str = "", text_pair: str = "") -> Iterator[Texts]:
    """The texts of a file in order, of which only a part is in memory at a time.

    form auto is that of the file's name; a Parquet file may stand for several (files_read). Of lines, a tab separates
    the two texts of a pair. In the other forms, text (empty: `text`) and text_pair name the fields or columns, and a
    text may hold line ends and tabs. CSV and TSV have a header line, unless both are numbers, from 0. Blank lines
    between JSON lines are not texts. Raises UserError, with file and line, for a missing file, a missing field, a value
    that is not a text, names where the file has lines without fields, and form auto for a .json file, which may hold a
    document.
    """
    if form not in FORMS:
        raise UserError(f"unknown --form {form!r}; choose from {', '.join(FORMS)}")
    form = _form_of(path, form)
    if form == "json":
        raise UserError(
            f"{path} may be one JSON document, and texts are read from lines. Write one object per line and name its "
            "form: --form jsonl"
        )
    if form == "text":
        if text or text_pair:
            raise UserError(
                f"--text is {text!r} and --text_pair {text_pair!r}, but {path} is read as lines of text, which have no "
                "columns. Leave them out, or name the form of the file: --form csv, tsv, jsonl or parquet"
            )
        return _lines(path)
    names = [text or TEXT, *([text_pair] if text_pair else [])]
    if form in ("csv", "tsv"):
        return _table(path, names, quoted=form == "csv")
    return _json_lines(path, names) if form == "jsonl" else _parquet(path, names)


def files_read(path: Path, form: str = "auto") -> list[Path]:
    """The files whose texts read_stream returns: path, or all of a data set in Parquet whose first one it is."""
    return files_of(path) if _form_of(path, form) == "parquet" else [path]


def read_texts(path: Path, form: str = "auto", text: str = "", text_pair: str = "") -> list[Texts]:
    """All texts of a file. Raises UserError as read_stream does, and for a file without texts."""
    texts = list(read_stream(path, form, text, text_pair))
    if not texts:
        raise UserError(f"{path} has no texts. Write one on each line, or below the header of a table")
    return texts


def _form_of(path: Path, form: str) -> str:
    return FORM_OF_ENDING.get(Path(plain_name(path)).suffix, "text") if form == "auto" else form


def _lines(path: Path) -> Iterator[Texts]:
    for number, line in numbered_lines(path):
        found = tuple(line.split("\t"))
        if len(found) > 2:
            raise UserError(
                f"{path} line {number} has {len(found) - 1} tabs; use one, between the two texts of a pair, or none"
            )
        yield found


def _table(path: Path, names: list[str], quoted: bool) -> Iterator[Texts]:
    lines = delimited_lines(path, quoted)
    first = next(lines, None)
    if first is None:
        return
    header = first[1]
    has_header = not all(is_number(name) for name in names)
    columns = [
        place_of(path, header if has_header else [], len(header), name, role)
        for name, role in zip(names, ("text", "text_pair"), strict=False)
    ]
    for number, fields in lines if has_header else itertools.chain([first], lines):
        if len(fields) != len(header):
            raise UserError(ragged(path, number, len(fields), len(header), quoted))
        yield tuple(fields[column] for column in columns)


def _json_lines(path: Path, names: list[str]) -> Iterator[Texts]:
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} line {number} is not JSON ({error}). Write one object per line") from None
        if not isinstance(values, Mapping):
            raise UserError(f"{path} line {number} is {line:.40}, which is not a JSON object. Write {{...}} per line")
        yield tuple(_text(path, number, values, name) for name in names)


def _parquet(path: Path, names: list[str]) -> Iterator[Texts]:
    """The texts of all files of a data set, whose rows are numbered through. All are checked before the first text."""
    files = files_of(path)
    for file in files:
        check_file(file)
        with _parquet_file(file) as content:
            columns = content.schema_arrow.names
        if missing := [name for name in names if name not in columns]:
            there = ", ".join(columns)
            raise UserError(f"{file} has no column {missing[0]!r}; its columns are: {there}. Name one with --text")
    number = 0
    for file in files:
        with _parquet_file(file) as content:
            for batch in content.iter_batches(ROWS_AT_ONCE, columns=names):
                for values in batch.to_pylist():
                    number += 1
                    yield tuple(_text(path, number, values, name) for name in names)


@contextlib.contextmanager
def _parquet_file(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path) as content:
            yield content
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is not a Parquet file, or is damaged ({error}). Write it again") from error


def _text(path: Path, number: int, values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if isinstance(value, str):
        return value
    there = ", ".join(map(repr, values)) or "none"
    raise UserError(
        f"{path} line {number}: {name!r} is {value!r:.40}, not a text. Its fields are {there}; name one with --text"
    )
