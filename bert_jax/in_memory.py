"""Data and models in memory, as the files that a run reads: what `bert_jax.finetune` takes."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax import export
from bert_jax.command import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.storage.hub_models import PREFIX
from bert_jax.storage.location import location, location_address
from bert_jax.storage.stores import store_of
from bert_jax.tasks.input_records import is_unicode
from bert_jax.train.workdir import CHECKPOINTS

Table = str | Path | Iterable[Mapping[str, Any]] | Any  # a file, rows, a pandas DataFrame or a datasets.Dataset


def checkpoint_path(loaded: LoadedModel, scratch: Path) -> str:
    """The path of a model's checkpoint, or hf:NAME; one whose folder is gone, and an average, are written to `scratch`.

    Only an origin with the prefix hf: is of the Hub, so that no model of the Hub replaces a folder.
    """
    if loaded.origin.startswith(PREFIX) and not loaded.average:
        return loaded.origin
    folder = location(loaded.origin) if loaded.origin and not loaded.average else None
    if folder and (folder / CHECKPOINTS).is_dir():
        folder = folder / CHECKPOINTS / str(loaded.step)  # the run may have saved other steps since
    if folder and folder.exists():
        return str(folder)
    export.export_loaded(loaded, scratch, "orbax")
    return str(scratch)


def refuse_store(workdir: str | Path, tables: Iterable[Table]) -> None:
    """Raises UserError for a workdir in a store and data in memory, which are kept as files next to a workdir."""
    address = location_address(workdir)
    if store_of(address) and not all(isinstance(table, str | Path) for table in tables):
        raise UserError(
            f"workdir is {address}, but data in memory can only be kept next to a workdir on disk. Write the data to "
            "files and give their paths, or use a workdir on disk"
        )


def data_file(table: Table, path: Path) -> str:
    """The file of a table. Data in memory is written to `path` as JSON lines; a datasets.Dataset as Parquet, next to
    `path`, because its classes are numbers, and have names and an order only there.

    Raises UserError for data that are no rows.
    """
    if isinstance(table, str | Path):
        return str(table)
    if isinstance(getattr(table, "features", None), Mapping) and hasattr(table, "to_parquet"):  # datasets.Dataset
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet = str(path.with_suffix(".parquet"))
        table.to_parquet(parquet)
        return parquet
    to_dict = getattr(table, "to_dict", None) if hasattr(table, "columns") else None  # pandas.DataFrame
    rows = list(table) if to_dict is None else to_dict("records")
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(
            f"the data is {type(table).__name__} without rows that are dictionaries. Give a file, a list of "
            "dictionaries, a DataFrame or a datasets.Dataset"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows, 1):
            values = {key: _plain(value) for key, value in row.items()}
            line = json.dumps(values, ensure_ascii=False, default=str)  # str: dates, in unused columns
            if not is_unicode(line):
                raise UserError(
                    f"row {number} of the data has half of a surrogate pair, which is no character: {line!r:.80}. "
                    "Correct the text, or omit the row"
                )
            file.write(line + "\n")
    return str(path)


def _plain(value: Any) -> Any:
    """A value as JSON has it: a number of NumPy as one of Python, what is missing as null."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType"):  # of pandas
        return None
    return value
