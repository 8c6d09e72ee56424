"""The description of a named task: its options and the layout of its published files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bert_jax.tasks.reading import Columns, plain_name
from bert_jax.tasks.task import Task

SPLITS = ("train", "dev", "test")
# The splits of most data sets in TensorFlow Datasets and on the Hugging Face hub.
STORED_SPLITS = {"train": "train", "dev": "validation", "test": "test"}


@dataclass(frozen=True)
class NamedTask:
    """A task and the layout of its published files.

    | field | |
    |---|---|
    | folders | folders in which its files may be, below a data folder; the data folder itself is tried last |
    | files | the names that the file of each split may have, in order; .xz, .gz or .zst may follow |
    | columns | the columns of files that differ from those of the task, by file name |
    | metrics | the metrics of splits that differ from those of the task |
    | stored | its name in TensorFlow Datasets and on the Hugging Face hub; empty if it is in neither |
    | stored_splits, stored_columns | the names of its splits and columns there |
    """

    task: Task
    folders: tuple[str, ...]
    files: Mapping[str, tuple[str, ...]]
    columns: Mapping[str, Columns] = field(default_factory=dict)
    metrics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stored: str = ""
    stored_splits: Mapping[str, str] = field(default_factory=dict)
    stored_columns: Columns | None = None

    def split_of(self, path: Path) -> str:
        """The split whose file has this name; empty if there is none."""
        name = plain_name(path)
        found = (split for split, names in self.files.items() if name in [Path(one).name for one in names])
        return next(found, "")
