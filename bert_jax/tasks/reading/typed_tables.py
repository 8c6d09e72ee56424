"""Reads tables with named, typed columns: JSON lines, Parquet, and data prepared by TensorFlow Datasets."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bert_jax.command import UserError
from bert_jax.data.tfds_source import open_tfds
from bert_jax.storage.remote import first_line
from bert_jax.tasks.input_records import is_unicode
from bert_jax.tasks.reading.columns import Column, advice
from bert_jax.tasks.reading.parquet_parts import files_of
from bert_jax.tasks.reading.text_lines import check_file, numbered_lines

# The line (or row) and the values of each record, which columns exist, and the names of classes by column.
Stored = tuple[list[tuple[int, tuple[Any, ...]]], tuple[bool, ...], tuple[tuple[str, ...], ...]]


def json_records(path: Path, columns: Sequence[Column]) -> Stored:
    """Reads a file with one JSON object on each line; blank lines and other fields are ignored.

    A column exists if any object has it; its value is None in an object without it. Raises UserError for a line that
    is not a JSON object, and for an object without a required column.
    """
    rows = []
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} line {number} is not JSON ({first_line(error)}). Correct the line") from error
        if not isinstance(found, dict):
            raise UserError(f"{path} line {number} is not a JSON object; expected an object whose keys are the columns")
        if "\\ud" in line.lower() and not is_unicode(json.dumps(found, ensure_ascii=False)):
            raise UserError(
                f"{path} line {number} contains half of a surrogate pair, which is not a character. Correct the line"
            )
        for column in columns:
            if column.required and column.name not in found:
                _missing(f"{path} line {number}", column, found)
        rows.append((number, tuple(found.get(column.name) for column in columns), found.keys()))
    if not rows:
        raise UserError(f"{path} is empty; expected one example on each line")
    present = tuple(any(column.name in keys for _, _, keys in rows) for column in columns)
    return [(number, values) for number, values, _ in rows], present, ((),) * len(columns)


def parquet_records(path: Path, columns: Sequence[Column]) -> Stored:
    """Reads the rows of a Parquet file, or of all files of a data set (parquet_parts.py).

    Rows are numbered through all files. Classes, single or in lists, have names where Hugging Face's `datasets` wrote
    them into the schema. Raises UserError for a file that is missing, damaged or not Parquet, for a missing required
    column, and for files that differ in their columns or in the names of their classes.
    """
    files = files_of(path)
    for file in files:
        check_file(file)
    (first, present, class_names), *others = (_parquet_rows(file, columns) for file in files)
    rows = list(first)
    for file, (more, exists, names) in zip(files[1:], others, strict=True):
        for column, here, before in zip(columns, exists, present, strict=True):
            if here != before:
                one, other = (file, path) if before else (path, file)
                raise UserError(
                    f"{one} has no column {column.name!r}, but {other.name} has it. Download or create both again"
                )
        if names != class_names:
            raise UserError(f"{file} names its classes differently from {path.name}. Download or create both again")
        rows += more
    if not rows:
        raise UserError(f"{path} has no rows; expected one example in each row")
    return list(enumerate(rows, start=1)), present, class_names


def _parquet_rows(
    path: Path, columns: Sequence[Column]
) -> tuple[list[tuple[Any, ...]], tuple[bool, ...], tuple[tuple[str, ...], ...]]:
    """The rows of one file, which columns it has, and the names of their classes."""
    try:
        schema = pq.read_schema(path)
        present = _present(str(path), columns, schema.names)
        read = [column.name for column, there in zip(columns, present, strict=True) if there]
        table = pq.read_table(path, columns=sorted(set(read)))
    except (pa.ArrowException, OSError) as error:
        what = first_line(error)
        raise UserError(f"{path} is damaged or not a Parquet file ({what}). Create or download it again") from error
    values = [
        table.column(column.name).to_pylist() if there else [None] * table.num_rows
        for column, there in zip(columns, present, strict=True)
    ]
    features = _features(schema)
    names = tuple(_class_names(features.get(column.name)) for column in columns)
    return list(zip(*values, strict=True)), present, names


def prepared_records(address: str, columns: Sequence[Column]) -> Stored:
    """Reads a split that TensorFlow Datasets has prepared (bert_jax/data/tfds_source.py), without TensorFlow.

    Raises UserError for data that is damaged or not prepared, and for a missing required column.
    """
    builder, split = open_tfds(address)
    features = builder.info.features
    present = _present(address, columns, list(features))
    class_names = tuple(
        tuple(getattr(features[column.name], "names", None) or ()) if there else ()
        for column, there in zip(columns, present, strict=True)
    )
    try:
        rows = [
            (
                number,
                tuple(
                    _plain(example[column.name]) if there else None
                    for column, there in zip(columns, present, strict=True)
                ),
            )
            for number, example in enumerate(builder.as_data_source(split), start=1)
        ]
    except Exception as error:  # TFDS has no exception class for a missing or damaged file
        raise UserError(f"{address} cannot be read ({first_line(error)}). Prepare it again") from error
    if not rows:
        raise UserError(f"{address} has no examples. Name another split")
    return rows, present, class_names


def _present(where: str, columns: Sequence[Column], names: Iterable[str]) -> tuple[bool, ...]:
    there = set(names)
    for column in columns:
        if column.required and column.name not in there:
            _missing(where, column, names)
    return tuple(column.name in there for column in columns)


def _missing(where: str, column: Column, names: Iterable[str]) -> None:
    raise UserError(
        f"{where} has no column {column.name!r}; its columns are: {', '.join(names)}. {advice(column.role)}"
    )


def _features(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """The feature descriptions that `datasets` wrote into the schema, by column; empty if there are none."""
    try:
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata.get("info", {}).get("features", {})
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (ValueError, AttributeError):
        return {}


def _class_names(feature: Any) -> tuple[str, ...]:
    """The names of the classes of a column, or of a column of lists of classes."""
    if not isinstance(feature, dict):
        return ()
    return tuple(feature.get("names") or _class_names(feature.get("feature")))


def _plain(value: Any) -> Any:
    """A value as the JSON types: texts, numbers, lists and objects."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value.item() if isinstance(value, np.generic) else value
