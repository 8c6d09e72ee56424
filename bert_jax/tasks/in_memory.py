"""Data and models in memory, written to the files that a run reads, for `bert_jax.finetune` and `evaluate`.

`data_file` writes a table of any library as JSON lines, `checkpoint_path` a model as a checkpoint.
"""

import contextlib
import dataclasses
import datetime
import decimal
import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.config import TaskConfig
from bert_jax.errors import UserError
from bert_jax.interop import export
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.storage.files import write_atomic
from bert_jax.storage.location import PREFIX, find_store, location, location_address
from bert_jax.tasks.embedder import is_iterable
from bert_jax.tasks.kinds.choice import CHOICES
from bert_jax.tasks.kinds.question_data import QUESTION_COLUMNS
from bert_jax.tasks.reading.tables import Columns, check_single, is_unicode
from bert_jax.tasks.registry import restore_task
from bert_jax.train.workdir import CHECKPOINTS

# A file, rows, a pandas or polars DataFrame (also a lazy one), datasets.Dataset, a pyarrow.Table.
Table = str | Path | Iterable[Mapping[str, Any]] | Any
_SETS = "multilabel"  # the kind of task whose label may be a set
# The kinds whose columns are all named (auto: by the file), and the columns that others read if none are named.
_OF_NAMED_COLUMNS = ("auto", "classification", "regression", "embedding", _SETS)
_DEFAULT_COLUMNS = ("tokens", "labels", "spans", "relations", *QUESTION_COLUMNS, "is_impossible", CHOICES)


def checkpoint_path(loaded: LoadedModel, scratch: Path) -> str:
    """Returns the path of a model's checkpoint, or hf:NAME. A model without a folder is written to `scratch`."""
    # An average is no checkpoint that a path names.
    if loaded.origin and not loaded.average:
        # Only the prefix hf: means the Hub, so that no model of the Hub replaces a folder that is gone.
        if loaded.origin.startswith(PREFIX):
            return loaded.origin
        folder = location(loaded.origin)
        if (folder / CHECKPOINTS).is_dir():
            folder = folder / CHECKPOINTS / str(loaded.step)  # the run may have saved other steps since
        if folder.exists():
            return str(folder)
    export.export_loaded(loaded, scratch, "orbax")
    return str(scratch)


def refuse_store(workdir: str | Path, tables: Iterable[Table]) -> None:
    """Raises UserError for data in memory, which is kept in files next to the workdir, if that is in a store."""
    address = location_address(workdir)
    if find_store(address) and not all(isinstance(table, str | Path) for table in tables):
        raise UserError(
            f"workdir is {address}, but data in memory can only be kept next to a workdir on disk. Write the data to "
            "files and give their paths, or use a workdir on disk"
        )


def data_file(table: Table, path: Path, task: TaskConfig) -> str:
    """Writes data in memory to `path` as JSON lines, for a task, and returns the file; a file is returned as it is.

    Columns that the task does not read may hold any values, which are written as Python's texts of them.

    Raises:
        UserError: The data are no rows, a column's name is no text, or the task reads a value that JSON does not have.
    """
    if isinstance(table, str | Path):
        return str(table)
    # A datasets.Dataset: its classes are numbers, and only its own Parquet file keeps their names. A transform
    # (set_transform) is not in that file.
    features = getattr(table, "features", None)
    if isinstance(features, Mapping) and hasattr(table, "to_parquet") and not _is_transformed(table):
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet = str(path.with_suffix(".parquet"))
        table.to_parquet(parquet)
        return parquet
    rows = _rows(table)
    if isinstance(features, Mapping):
        rows = [_with_class_names(row, features) for row in rows]
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(
            f"the data is {type(table).__name__} without rows that are dictionaries. Give a file, a list of "
            "dictionaries, a DataFrame, a pyarrow.Table or a datasets.Dataset"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # The file appears when all rows are written, so that a refused row leaves the file of an earlier run.
    lines = (_line(f"row {number} of the data", row, task) for number, row in enumerate(rows, 1))
    write_atomic(path, (f"{line}\n".encode() for line in lines))
    return str(path)


def _is_transformed(table: Any) -> bool:
    form = getattr(table, "format", None)
    return isinstance(form, Mapping) and form.get("type") == "custom"


def _with_class_names(row: Mapping[str, Any], features: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces class numbers in a datasets.Dataset's row, alone or in lists, by the classes' names."""

    def written(value: Any, names: Sequence[str]) -> Any:
        if isinstance(value, list):
            return [written(item, names) for item in value]
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else value

    values = dict(row)
    for name, feature in features.items():
        names = getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)
        if names and name in values:
            values[name] = written(values[name], names)
    return values


def measured_file(table: Table, path: Path, loaded: LoadedModel, columns: Columns) -> str:
    """Returns the file of a table on which a fine-tuned model is measured (see data_file).

    Args:
        columns: Those that differ from the columns of fine-tuning.

    Raises:
        UserError: As in data_file, or the data is in memory and the model was not fine-tuned.
    """
    if isinstance(table, str | Path):
        return str(table)
    task = restore_task(loaded)
    # Only the columns matter: they decide which values must be valid.
    used = columns.filled(task.columns)
    kind = TaskConfig.kinds[task.kind]
    known = {item.name for item in dataclasses.fields(kind)}
    return data_file(table, path, kind(**{name: value for name, value in vars(used).items() if name in known}))


def _line(place: str, row: Mapping[Any, Any], task: TaskConfig) -> str:
    """Writes a row as JSON; raises UserError for a value that the task reads and JSON does not have."""
    labels = {*task.label.split(",")} if isinstance(task.label, str) else {*task.label}
    read = {task.text, getattr(task, "text_pair", ""), *labels}
    read.update(*(getattr(task, key, ()) for key in ("marks", "choices", "negatives")))
    # Kinds with default columns read these as well.
    read.update([] if task.kind in _OF_NAMED_COLUMNS else _DEFAULT_COLUMNS)
    values = {}
    for name, value in row.items():
        if not isinstance(name, str | int):
            raise UserError(f"{place}: column names must be strings; got {name!r:.60}. Rename the column")
        try:
            values[name] = _plain(value, sets=task.kind == _SETS and str(name) in labels)
        except ValueError as error:
            if str(name) in read:
                raise UserError(f"{place}: column {name!r} holds {value!r:.60}; {error}") from None
            values[name] = str(value)
    line = json.dumps(values, ensure_ascii=False)
    if not is_unicode(line):
        raise UserError(f"{place} has half of a surrogate pair: {line!r:.80}. Correct the text, or omit the row")
    return line


def _rows(table: Any) -> list[Any]:
    """Lists a DataFrame's rows, or any other table's items; a value that is no table has none."""
    # Attributes of the type, because columns of pandas are attributes of the DataFrame.
    if hasattr(type(table), "collect"):  # a LazyFrame of polars
        table = table.collect()
    if hasattr(type(table), "to_pylist"):  # pyarrow
        check_single("the data", getattr(table, "column_names", ()))
        return list(table.to_pylist())
    if hasattr(table, "columns") and hasattr(table, "to_dicts"):  # polars
        return list(table.to_dicts())
    if hasattr(table, "columns") and hasattr(table, "to_dict"):  # pandas
        check_single("the data", list(table.columns))
        return list(table.to_dict("records"))
    return list(table) if is_iterable(table) else []


def _plain(value: Any, sets: bool = False) -> Any:
    """Converts a value to JSON's types: missing values to null, bytes and dates to texts, arrays to lists.

    With `sets`, sets become lists too. For other values, raises ValueError with the expected type.
    """
    if getattr(getattr(value, "dtype", None), "kind", "") == "M":  # NumPy's dates, which tolist makes numbers
        value = value.astype(str)
    for method in ("tolist", "item"):  # of NumPy, JAX and PyTorch
        if hasattr(value, method) and type(plain := getattr(value, method)()) is not type(value):
            return _plain(plain, sets)
    expected = "expected a text, a number, true or false, or a list or dictionary of these"
    # By type name: pandas, whose missing values these are, need not be installed.
    missing = isinstance(value, float | decimal.Decimal) and value != value
    if value is None or missing or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal | enum.Enum):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        if sets:
            return sorted(map(_plain, value), key=str)
        expected = "a set has no order, so give a list"
    if isinstance(value, Mapping):
        if all(isinstance(key, str | int) for key in value):
            return {key: _plain(item) for key, item in value.items()}
        expected = "expected keys that are texts"
    if isinstance(value, bytes | bytearray):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
        expected = "the bytes are not UTF-8, so give a text"
    raise ValueError(expected)
