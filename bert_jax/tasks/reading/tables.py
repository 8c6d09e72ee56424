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

from bert_jax.tasks.reading.columns import Column, Table
from bert_jax.tasks.reading.delimited import read_delimited
from bert_jax.tasks.reading.text_lines import TFDS, plain_name
from bert_jax.tasks.reading.typed_tables import read_json, read_parquet, read_prepared

JSON_LINES = (".jsonl", ".ndjson")


def is_stored(path: Path) -> bool:
    """Whether a file has named, typed columns (JSON lines, Parquet, prepared data), not lines of fields."""
    return str(path).startswith(TFDS) or plain_name(path).endswith((*JSON_LINES, ".parquet"))


def read_records(path: Path, columns: Sequence[Column], ragged_lines: bool = False) -> Table:
    """Reads these columns of every example, in order.

    TSV and CSV have a header unless every column is given by a number. With ragged_lines, a line of TSV or CSV whose
    number of fields differs from that of the first line is skipped and counted. Raises UserError, with file and line,
    for malformed input, a missing column that is required, and a file without examples.
    """
    if str(path).startswith(TFDS):
        return read_prepared(str(path), columns)
    name = plain_name(path)
    if name.endswith(".parquet"):
        return read_parquet(path, columns)
    if name.endswith(JSON_LINES):
        return read_json(path, columns)
    return read_delimited(path, columns, ragged_lines, quoted=name.endswith(".csv"))
