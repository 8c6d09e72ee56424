"""Reads TSV, whose fields are never quoted, and CSV, whose fields may be quoted (RFC 4180)."""

import csv
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from bert_jax.command import UserError
from bert_jax.tasks.reading.columns import Column, Table, TableRow, has_column, is_number, place_of
from bert_jax.tasks.reading.text_lines import decoded_lines, numbered_lines

LONGEST_FIELD = 2**31 - 1  # characters; the default limit of the csv module is 128 KiB
TSV_ADVICE = "Fields are separated by one tab and are never quoted"
CSV_ADVICE = 'Quote a field that contains commas, quotes or line ends, and double its quotes: "so ""quoted"""'


def read_delimited(path: Path, columns: Sequence[Column], ragged_lines: bool, quoted: bool) -> Table:
    """Reads CSV if quoted, else TSV (tables.read_records).

    The line of a CSV record is the one on which it ends, because a quoted field may contain line ends.
    """
    lines = delimited_lines(path, quoted)
    first = next(lines, None)
    if first is None:
        raise UserError(f"{path} is empty; expected one example on each line")
    has_header = not all(is_number(column.name) for column in columns if column.name)
    names, width = first[1] if has_header else [], len(first[1])
    places = [
        place_of(path, names, width, column.name, column.role)
        if column.required or has_column(names, width, column.name)
        else None
        for column in columns
    ]
    rows = []
    skipped = 0
    for number, fields in lines if has_header else itertools.chain([first], lines):
        if len(fields) == width:
            rows.append(TableRow(number, tuple(None if place is None else fields[place] for place in places)))
        elif ragged_lines:
            skipped += 1
        else:
            raise UserError(ragged(path, number, len(fields), width, quoted))
    if not rows:
        raise UserError(f"{path} contains a header but no examples. Name another file")
    return Table(rows, tuple(place is not None for place in places), ((),) * len(columns), skipped)


def delimited_lines(path: Path, quoted: bool) -> Iterator[tuple[int, list[str]]]:
    """The records of CSV if quoted, else of TSV: the number of the line on which each ends, and its fields."""
    return _csv_lines(path) if quoted else _tsv_lines(path)


def ragged(path: Path, number: int, fields: int, width: int, quoted: bool) -> str:
    """The error for a record with another number of fields than the first one."""
    return (
        f"{path} line {number} has {fields} fields, but the first line has {width}. "
        f"{CSV_ADVICE if quoted else TSV_ADVICE}"
    )


def _tsv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    return ((number, line.split("\t")) for number, line in numbered_lines(path) if line)


def _csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader((line for _, line in decoded_lines(path)), strict=True)
    while True:
        before = reader.line_num
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise UserError(f"{path} line {before + 1} is not CSV ({error}). {CSV_ADVICE}") from error
        if fields is None:
            return
        if fields:
            yield reader.line_num, fields
