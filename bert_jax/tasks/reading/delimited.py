"""TSV, whose fields are never quoted, and CSV, whose fields are (RFC 4180)."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from bert_jax.command import UserError
from bert_jax.tasks.reading.columns import Column, has_column, is_number, place_of
from bert_jax.tasks.reading.text_lines import decoded_lines, numbered_lines

LONGEST_FIELD = 2**31 - 1  # of the csv module, which refuses fields of 128 KiB unless it is told

Rows = list[tuple[int, tuple[str | None, ...]]]


def tsv_records(path: Path, columns: Sequence[Column], ragged_lines: bool) -> tuple[Rows, tuple[bool, ...], int]:
    """Line and values of each record, which columns are there, and how many ragged lines were left out."""
    lines = ((number, line.split("\t")) for number, line in numbered_lines(path) if line)
    return _chosen(path, lines, columns, ragged_lines, "Fields are parted by one tab and are never quoted")


def csv_records(path: Path, columns: Sequence[Column], ragged_lines: bool) -> tuple[Rows, tuple[bool, ...], int]:
    """As tsv_records; a record's line is that on which it ends, for a quoted field may hold line ends."""
    advice = 'A field that holds commas, quotes or line ends is quoted, and its quotes are doubled: "so ""quoted"""'
    return _chosen(path, _csv_rows(path, advice), columns, ragged_lines, advice)


def _csv_rows(path: Path, advice: str) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader((line for _, line in decoded_lines(path)), strict=True)
    while True:
        before = reader.line_num
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise UserError(f"{path} line {before + 1} is not CSV ({error}). {advice}") from error
        if fields is None:
            return
        if fields:
            yield reader.line_num, fields


def _chosen(
    path: Path, lines: Iterator[tuple[int, list[str]]], columns: Sequence[Column], ragged_lines: bool, advice: str
) -> tuple[Rows, tuple[bool, ...], int]:
    first = next(lines, None)
    if first is None:
        raise UserError(f"{path} is empty. Give a file with one example a line")
    has_header = not all(is_number(column.name) for column in columns)
    names, width = first[1] if has_header else [], len(first[1])
    places = [
        place_of(path, names, width, column.name, column.role)
        if column.required or has_column(names, width, column.name)
        else None
        for column in columns
    ]
    rows: Rows = []
    left_out = 0
    for number, fields in lines if has_header else _chain(first, lines):
        if len(fields) == width:
            rows.append((number, tuple(None if place is None else fields[place] for place in places)))
        elif ragged_lines:
            left_out += 1
        else:
            raise UserError(f"{path} line {number} has {len(fields)} fields, the first line has {width}. {advice}")
    if not rows:
        raise UserError(f"{path} holds a header and no examples")
    return rows, tuple(place is not None for place in places), left_out


def _chain(first: tuple[int, list[str]], rest: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, list[str]]]:
    yield first
    yield from rest
