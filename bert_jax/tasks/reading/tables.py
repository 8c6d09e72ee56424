"""Reads selected columns of a table. The ending of the file's name determines its format.

.jsonl, .ndjson  one object on each line
.parquet         the columns of the file, or of several (parquet_parts.py)
.csv             quoted as in RFC 4180
tfds:            data prepared by TensorFlow Datasets, tfds:NAME[:SPLIT]
any other        TSV, never quoted

Text files may be compressed (.gz, .xz, .zst).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.tasks.reading.columns import Column
from bert_jax.tasks.reading.delimited import csv_records, tsv_records
from bert_jax.tasks.reading.text_lines import TFDS, plain_name
from bert_jax.tasks.reading.typed_tables import json_records, parquet_records, prepared_records


class TableRow(NamedTuple):
    """The values of one example, one for each requested column; None where it has none."""

    line: int  # in the file, from 1; the row, from 1, in Parquet and prepared data
    values: tuple[Any, ...]  # texts from TSV and CSV; values of any type from other formats


class Table(NamedTuple):
    """The records of a file and the properties of their columns."""

    records: list[TableRow]
    present: tuple[bool, ...]  # for each requested column, whether the file has it
    class_names: tuple[tuple[str, ...], ...]  # by column; empty unless the file names the classes
    left_out: int = 0  # skipped lines with an unexpected number of fields


def is_stored(path: Path) -> bool:
    """Whether a file has named, typed columns (JSON lines, Parquet, prepared data), not lines of fields."""
    return str(path).startswith(TFDS) or plain_name(path).endswith((".jsonl", ".ndjson", ".parquet"))


def read_records(path: Path, columns: Sequence[Column], ragged_lines: bool = False) -> Table:
    """Reads these columns of every example, in order.

    TSV and CSV have a header unless every column is given by a number. With ragged_lines, a line of TSV or CSV whose
    number of fields differs from that of the first line is skipped and counted. Raises UserError, with file and line,
    for malformed input, a missing column that is required, and a file without examples.
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
        rows, present, skipped = read(path, columns, ragged_lines)
        return Table([TableRow(*row) for row in rows], present, ((),) * len(columns), skipped)
    return Table([TableRow(*row) for row in rows], present, class_names)
