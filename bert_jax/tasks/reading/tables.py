"""Chosen columns of a table: one face over every kind of file, by its ending.

.jsonl (or .ndjson)  an object a line             .parquet  its columns
.csv                 quoted as RFC 4180 has it    tfds:     prepared data of TensorFlow Datasets, tfds:NAME[:SPLIT]
any other            TSV, never quoted            Text files may be compressed (.gz, .xz, .zst).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.tasks.reading.columns import Column
from bert_jax.tasks.reading.delimited import csv_records, tsv_records
from bert_jax.tasks.reading.text_lines import TFDS, plain_name
from bert_jax.tasks.reading.typed_tables import json_records, parquet_records, prepared_records


class TableRow(NamedTuple):
    """What a table holds of one example: a value for each column asked for, None where there is none."""

    line: int  # of the file, from 1; in Parquet and prepared data the row, from 1
    values: tuple[Any, ...]  # texts from TSV and CSV; whatever the file has elsewhere


class Table(NamedTuple):
    """The records of a file, and what it says of their columns."""

    records: list[TableRow]
    present: tuple[bool, ...]  # which of the columns asked for are there
    class_names: tuple[tuple[str, ...], ...]  # of each column, where its numbers stand for names
    left_out: int = 0  # lines with another number of fields


def is_stored(path: Path) -> bool:
    """Whether a file holds values of their own types under names, and no lines of fields."""
    return str(path).startswith(TFDS) or plain_name(path).endswith((".jsonl", ".ndjson", ".parquet"))


def read_records(path: Path, columns: Sequence[Column], ragged_lines: bool = False) -> Table:
    """The columns of a file, of every example in order.

    TSV and CSV have a header, unless every column is named by a number. With ragged_lines a line of TSV with another
    number of fields than the first is left out and counted. Raises UserError, with file and line, for what is not of
    the form, a column that is required and not there, and a file without examples.
    """
    name = plain_name(path)
    if str(path).startswith(TFDS):
        rows, present, class_names = prepared_records(str(path), columns)
    elif name.endswith(".parquet"):
        rows, present, class_names = parquet_records(path, columns)
    elif name.endswith((".jsonl", ".ndjson")):
        rows, present, class_names = json_records(path, columns)
    else:
        read = csv_records if name.endswith(".csv") else tsv_records
        rows, present, left_out = read(path, columns, ragged_lines)
        return Table([TableRow(*row) for row in rows], present, ((),) * len(columns), left_out)
    return Table([TableRow(*row) for row in rows], present, class_names)
