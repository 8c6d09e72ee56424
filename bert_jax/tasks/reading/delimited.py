"""Reads TSV, whose fields are never quoted, and CSV, whose fields may be quoted (RFC 4180)."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from bert_jax.command import UserError
from bert_jax.tasks.reading.columns import Column, has_column, is_number, place_of
from bert_jax.tasks.reading.text_lines import decoded_lines, numbered_lines

LONGEST_FIELD = 2**31 - 1  # characters; the default limit of the csv module is 128 KiB

Rows = list[tuple[int, tuple[str | None, ...]]]


def tsv_records(path: Path, columns: Sequence[Column], ragged_lines: bool) -> tuple[Rows, tuple[bool, ...], int]:
    """The line and the values of each record, which columns exist, and the number of skipped ragged lines."""
    lines = ((number, line.split("\t")) for number, line in numbered_lines(path) if line)
    return _chosen(path, lines, columns, ragged_lines, "Fields are separated by one tab and are never quoted")


def csv_records(path: Path, columns: Sequence[Column], ragged_lines: bool) -> tuple[Rows, tuple[bool, ...], int]:
    """Like tsv_records; a record's line is the one on which it ends, because a quoted field may contain line ends."""
    advice = 'Quote a field that contains commas, quotes or line ends, and double its quotes: "so ""quoted"""'
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
        raise UserError(f"{path} is empty; expected one example on each line")
    has_header = not all(is_number(column.name) for column in columns)
    names, width = first[1] if has_header else [], len(first[1])
    places = [
        place_of(path, names, width, column.name, column.role)
        if column.required or has_column(names, width, column.name)
        else None
        for column in columns
    ]
    rows: Rows = []
    skipped = 0
    for number, fields in lines if has_header else _chain(first, lines):
        if len(fields) == width:
            rows.append((number, tuple(None if place is None else fields[place] for place in places)))
        elif ragged_lines:
            skipped += 1
        else:
            raise UserError(f"{path} line {number} has {len(fields)} fields, but the first line has {width}. {advice}")
    if not rows:
        raise UserError(f"{path} contains a header but no examples. Name another file")
    return rows, tuple(place is not None for place in places), skipped


def _chain(first: tuple[int, list[str]], rest: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, list[str]]]:
    yield first
    yield from rest
