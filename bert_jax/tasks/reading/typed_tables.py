"""Values of their own types under names: JSON lines, Parquet, and prepared data of TensorFlow Datasets."""

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

# Line (or row) and values of each record, which columns are there, and the names of classes by column.
Stored = tuple[list[tuple[int, tuple[Any, ...]]], tuple[bool, ...], tuple[tuple[str, ...], ...]]


def json_records(path: Path, columns: Sequence[Column]) -> Stored:
    """Of a file with a JSON object a line; blank lines are passed over, other fields left out.

    A column is there when any object has it; then an object without it has None. Raises UserError for a line that is
    no JSON object and for a required column that an object lacks.
    """
    rows = []
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} line {number} is not JSON ({first_line(error)}). Mend the line") from error
        if not isinstance(found, dict):
            raise UserError(f"{path} line {number} is no JSON object. Give an object with the columns as its keys")
        if "\\ud" in line.lower() and not is_unicode(json.dumps(found, ensure_ascii=False)):
            raise UserError(
                f"{path} line {number} holds half of a surrogate pair, which is no character. Mend the line"
            )
        for column in columns:
            if column.required and column.name not in found:
                _missing(f"{path} line {number}", column, found)
        rows.append((number, tuple(found.get(column.name) for column in columns), found.keys()))
    if not rows:
        raise UserError(f"{path} is empty. Give a file with one example a line")
    present = tuple(any(column.name in keys for _, _, keys in rows) for column in columns)
    return [(number, values) for number, values, _ in rows], present, ((),) * len(columns)


def parquet_records(path: Path, columns: Sequence[Column]) -> Stored:
    """The rows of a Parquet file, or of the several files that the first one names (parquet_parts.py).

    Rows are numbered through all files. Classes, alone or in lists, have names where the schema that `datasets` of
    Hugging Face wrote tells them.

    Raises UserError for a file that is missing, no Parquet or damaged, for a required column that it lacks, and for one
    with other columns than the first, or other names of classes.
    """
    files = files_of(path)
    for file in files:
        check_file(file)
    (first, present, class_names), *others = (_parquet_rows(file, columns) for file in files)
    rows = list(first)
    for file, (more, there, names) in zip(files[1:], others, strict=True):
        for column, here, before in zip(columns, there, present, strict=True):
            if here != before:
                one, other = (file, path) if before else (path, file)
                raise UserError(f"{one} has no column {column.name!r}, and {other.name} has. Fetch or make both again")
        if names != class_names:
            raise UserError(f"{file} names its classes otherwise than {path.name}. Fetch or make both again")
        rows += more
    if not rows:
        raise UserError(f"{path} has no rows. Give a file with one example a row")
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
        raise UserError(f"{path} is no Parquet file, or damaged ({what}). Make or fetch it again") from error
    values = [
        table.column(column.name).to_pylist() if there else [None] * table.num_rows
        for column, there in zip(columns, present, strict=True)
    ]
    features = _features(schema)
    names = tuple(_class_names(features.get(column.name)) for column in columns)
    return list(zip(*values, strict=True)), present, names


def prepared_records(address: str, columns: Sequence[Column]) -> Stored:
    """Of a split that TensorFlow Datasets has prepared (bert_jax/data/prepared.py), read without TensorFlow.

    Raises UserError for what is not prepared, damaged, and for a required column that is not there.
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
    except Exception as error:  # TFDS has no kind of its own for a file that is gone or damaged
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
    """What `datasets` wrote of each column into the schema; nothing where it wrote nothing that is understood."""
    try:
        told = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = told.get("info", {}).get("features", {})
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (ValueError, AttributeError):
        return {}


def _class_names(feature: Any) -> tuple[str, ...]:
    """Of a column of classes, or of lists of them."""
    if not isinstance(feature, dict):
        return ()
    return tuple(feature.get("names") or _class_names(feature.get("feature")))


def _plain(value: Any) -> Any:
    """A value as JSON would have it."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value.item() if isinstance(value, np.generic) else value
