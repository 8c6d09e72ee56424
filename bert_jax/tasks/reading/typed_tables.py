"""Reads tables with named, typed columns: JSON lines, Parquet, and data prepared by TensorFlow Datasets."""

import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bert_jax.command import UserError
from bert_jax.data.tfds_source import open_tfds
from bert_jax.storage.remote import first_line
from bert_jax.tasks.input_records import is_unicode
from bert_jax.tasks.reading.columns import Column, Table, TableRow, advice
from bert_jax.tasks.reading.parquet_parts import files_of
from bert_jax.tasks.reading.text_lines import check_file, numbered_lines


def read_json(path: Path, columns: Sequence[Column]) -> Table:
    """Reads a file with one JSON object on each line; blank lines and other fields are ignored.

    A column exists if any object has it; its value is None in an object without it. Raises UserError for a line that
    is not a JSON object, and for an object without a required column.
    """
    rows = []
    for number, line in numbered_lines(path):
        if line.strip():
            found = _json_object(f"{path} line {number}", line)
            _check_columns(f"{path} line {number}", columns, found)
            rows.append((number, found))
    if not rows:
        raise UserError(f"{path} is empty; expected one example on each line")
    return _table(columns, rows, {name for _, found in rows for name in found}, {})


def _json_object(where: str, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({first_line(error)}). Correct the line") from error
    if not isinstance(found, dict):
        raise UserError(f"{where} is not a JSON object; expected an object whose keys are the columns")
    if "\\ud" in line.lower() and not is_unicode(json.dumps(found, ensure_ascii=False)):
        raise UserError(f"{where} contains half of a surrogate pair, which is not a character. Correct the line")
    return found


def read_parquet(path: Path, columns: Sequence[Column]) -> Table:
    """Reads the rows of a Parquet file, or of all files of a data set (parquet_parts.py).

    Rows are numbered through all files. Classes, single or in lists, have names where Hugging Face's `datasets` wrote
    them into the schema. Raises UserError for a file that is missing, damaged or not Parquet, for a missing required
    column, and for files that differ in their columns or in the names of their classes.
    """
    files = files_of(path)
    for file in files:
        check_file(file)
    numbers = itertools.count(1)
    parts = [_read_parquet_file(file, columns, numbers) for file in files]
    for file, part in zip(files, parts, strict=True):
        for column, here, before in zip(columns, part.present, parts[0].present, strict=True):
            if here != before:
                one, other = (file, path) if before else (path, file)
                raise UserError(
                    f"{one} has no column {column.name!r}, but {other.name} has it. Download or create both again"
                )
        if part.class_names != parts[0].class_names:
            raise UserError(f"{file} names its classes differently from {path.name}. Download or create both again")
    rows = [row for part in parts for row in part.records]
    if not rows:
        raise UserError(f"{path} has no rows; expected one example in each row")
    return parts[0]._replace(records=rows)


def _read_parquet_file(path: Path, columns: Sequence[Column], numbers: Iterator[int]) -> Table:
    try:
        schema = pq.read_schema(path)
        _check_columns(str(path), columns, schema.names)
        names = {column.name for column in columns} & set(schema.names)
        rows = pq.read_table(path, columns=sorted(names)).to_pylist()
    except (pa.ArrowException, OSError) as error:
        what = first_line(error)
        raise UserError(f"{path} is damaged or not a Parquet file ({what}). Create or download it again") from error
    return _table(
        columns, ((number, row) for row, number in zip(rows, numbers, strict=False)), names, _class_names(schema)
    )


def read_prepared(address: str, columns: Sequence[Column]) -> Table:
    """Reads a split that TensorFlow Datasets has prepared (bert_jax/data/tfds_source.py), without TensorFlow.

    Raises UserError for data that is damaged or not prepared, and for a missing required column.
    """
    builder, split = open_tfds(address)
    features = builder.info.features
    _check_columns(address, columns, features)
    names = {column.name for column in columns} & set(features)
    class_names = {name: tuple(getattr(features[name], "names", None) or ()) for name in names}
    try:
        rows = [{name: plain_value(one[name]) for name in names} for one in builder.as_data_source(split)]
    except Exception as error:  # TFDS has no exception class for a missing or damaged file
        raise UserError(f"{address} cannot be read ({first_line(error)}). Prepare it again") from error
    if not rows:
        raise UserError(f"{address} has no examples. Name another split")
    return _table(columns, enumerate(rows, start=1), names, class_names)


def _check_columns(where: str, columns: Sequence[Column], names: Collection[str]) -> None:
    """Raises UserError for a required column that is not among the names."""
    for column in columns:
        if column.required and column.name not in names:
            raise UserError(
                f"{where} has no column {column.name!r}; its columns are: {', '.join(names)}. {advice(column.role)}"
            )


def _table(
    columns: Sequence[Column],
    rows: Iterable[tuple[int, Mapping[str, Any]]],
    names: Collection[str],
    class_names: Mapping[str, tuple[str, ...]],
) -> Table:
    """The requested columns of rows with these columns."""
    return Table(
        [TableRow(number, tuple(row.get(column.name) for column in columns)) for number, row in rows],
        tuple(column.name in names for column in columns),
        tuple(class_names.get(column.name, ()) for column in columns),
    )


def _class_names(schema: pa.Schema) -> dict[str, tuple[str, ...]]:
    """The names of the classes that `datasets` wrote into the schema, by column; empty if there are none."""
    try:
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        return {name: _names(feature) for name, feature in metadata.get("info", {}).get("features", {}).items()}
    except (ValueError, AttributeError):
        return {}


def _names(feature: Any) -> tuple[str, ...]:
    """The names of the classes of a feature, or of a list of classes."""
    if not isinstance(feature, dict):
        return ()
    return tuple(feature.get("names") or _names(feature.get("feature")))


def plain_value(value: Any) -> Any:
    """A value of prepared data as the JSON types: texts, numbers, lists and objects."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return [plain_value(one) for one in value]
    if isinstance(value, dict):
        return {name: plain_value(one) for name, one in value.items()}
    return value.item() if isinstance(value, np.generic) else value
