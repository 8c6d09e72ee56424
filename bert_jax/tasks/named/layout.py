"""What there is to say of a task known by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert_jax.tasks.example import Split
from bert_jax.tasks.reading import Columns, plain_name
from bert_jax.tasks.task import Task

SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class NamedTask:
    """A Task and the layout of its published files.

    | field | |
    |---|---|
    | folders | where its files may lie in a folder of data; that folder itself is tried last |
    | files | of each split, the names that its file may have, in order; a .xz, .gz or .zst may follow |
    | columns | of files that have other columns than the task, by name |
    | metrics | of splits that are measured by others than the task's |
    | stored | its name in TensorFlow Datasets and in Hugging Face's data sets, where it is there |
    | stored_splits, stored_columns | what they are called there |
    | reader | what reads its files in place of the kind's own reader: (task, path, columns, label_required) |
    """

    task: Task
    folders: tuple[str, ...]
    files: Mapping[str, tuple[str, ...]]
    columns: Mapping[str, Columns] = field(default_factory=dict)
    metrics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stored: str = ""
    stored_splits: Mapping[str, str] = field(default_factory=dict)
    stored_columns: Columns | None = None
    reader: Callable[[Task, Path, Columns, bool], Split[Any]] | None = None

    def split_of(self, path: Path) -> str:
        """The split whose file is called so; empty for none."""
        name = plain_name(path)
        found = (split for split, names in self.files.items() if name in [Path(one).name for one in names])
        return next(found, "")
