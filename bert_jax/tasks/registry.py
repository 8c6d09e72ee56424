"""Which task a configuration means, where the files of named tasks lie, and how they are read."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.config import TaskConfig
from bert_jax.data.tfds_source import open_tfds
from bert_jax.tasks import reading
from bert_jax.tasks.example import Split
from bert_jax.tasks.kinds import kind_of
from bert_jax.tasks.named import TASKS, NamedTask
from bert_jax.tasks.named.layout import SPLITS
from bert_jax.tasks.reading import COMPRESSED, TFDS, Columns, is_stored, plain_name
from bert_jax.tasks.task import Task

__all__ = ["TASKS", "NamedTask", "find_folder", "find_split", "metrics_of", "read", "resolve", "splits_of"]

BUNDLED_EWT = Path(__file__).resolve().parents[2] / "data_prep" / "sample" / "ewt"
# What a file of one's own is by default, by its form.
KIND_OF_FILE = {"table": "classification", "squad": "question", "conllu": "tagging", "conll": "tagging"}
OWN_ENDINGS = (".json", ".tsv", ".csv", ".jsonl", ".parquet", ".conllu", ".conll")
STORED_ENDINGS = (".parquet", ".jsonl")


def resolve(config: TaskConfig) -> tuple[Task, dict[str, Path]]:
    """The task that a configuration means, and the file of each split that is there.

    A named task's files are those of task.data_dir (a folder, or tfds: and the name of prepared data; nothing after
    it: the task's own), or of $BERT_JAX_DATA; those that task.train, task.dev and
    task.test name take their places. With task.train and no task.data_dir there are no others. Raises UserError for
    an unknown name, no task at all, columns given for a named task, a missing file, or one that is of two splits.
    """
    if config.max_length < 8:
        raise UserError(f"task.max_length is {config.max_length}; use 8 or more")
    given = {split: Path(path) for split in SPLITS if (path := getattr(config, split))}
    if config.name:
        if config.name not in TASKS:
            raise UserError(
                f"task.name is {config.name!r}; known: {', '.join(TASKS)}, or files by task.train, task.dev"
            )
        for key in ("text", "text_pair", "label", "choices", "marks", "kind"):
            if getattr(config, key):
                raise UserError(
                    f"task.{key} is for files of your own; leave it out, or leave out task.name={config.name}"
                )
        named = TASKS[config.name]
        files = _find_files(named, config, given) | given
        task = replace(named.task, max_length=config.max_length)
    elif config.train:
        kind = config.kind or ("choice" if config.choices else KIND_OF_FILE[reading.kind_of_file(Path(config.train))])
        columns = Columns(config.text, config.text_pair, config.label, _marks(config))
        task = Task("own", kind, max_length=config.max_length, columns=columns)
        files = given
    else:
        raise UserError(f"no task: give task.name ({', '.join(TASKS)}), or task.train with task.text and task.label")
    task = replace(task, **_options(config))
    files = {split: files[split] for split in splits_of(task.name) if split in files}
    reading.check_apart(files)
    return task, files


def _options(config: TaskConfig) -> dict[str, Any]:
    """What a configuration sets of the options that a Task has under the same name; empty: as the task has it."""
    shared = {field.name for field in fields(config)} & {field.name for field in fields(Task)} - {"name", "kind"}
    return {name: value for name in sorted(shared) if (value := getattr(config, name)) not in ("", None)}


def _marks(config: TaskConfig) -> tuple[str, ...]:
    marks = tuple(name.strip() for name in config.marks.split(",")) if config.marks else ()
    wanted = 4 if config.text_pair else 2
    if marks and len(marks) != wanted:
        raise UserError(
            f"task.marks is {config.marks!r}; give {wanted} columns, parted by commas: the first character of a word "
            "and the one behind its last, for each text"
        )
    return marks


def splits_of(task_name: str) -> tuple[str, ...]:
    """The splits that a task may have: train, dev, test, and what else a named one has."""
    return tuple(TASKS[task_name].files) if task_name in TASKS else SPLITS


def metrics_of(task: Task, split: str) -> Task:
    """The task with the metrics of a split, where a named task measures it by others."""
    metrics = TASKS[task.name].metrics.get(split) if task.name in TASKS else None
    return replace(task, metrics=metrics) if metrics else task


def read(task: Task, path: Path, label_required: bool = True) -> Split[Any]:
    """Reads a file of a task. Without label_required, one that has no labels is read too."""
    columns = task.columns
    named = TASKS.get(task.name)
    if named and columns == named.task.columns:  # not named by the user
        stored = named.stored_columns if is_stored(path) else None
        columns = stored or named.columns.get(plain_name(path), columns)
    if named and named.reader:
        return named.reader(task, path, columns, label_required)
    return kind_of(task).read(task, path, columns, label_required)


def find_split(task_name: str, folder: Path, split: str) -> Path | None:
    """The file of a split of a named task (or SPLIT.tsv, SPLIT.conllu ... of any other) in a folder, if it is there."""
    named = TASKS.get(task_name)
    names = [split + ending for ending in OWN_ENDINGS]
    called = [split]  # of several files
    if named:
        stored = named.stored_splits.get(split)
        names = [*named.files[split], *(stored + ending for ending in STORED_ENDINGS if stored), *names]
        called = [stored, split] if stored else called
    for name in names:
        for ending in ("", *COMPRESSED):
            if (folder / (name + ending)).is_file():
                return folder / (name + ending)
    return next((path for name in called if (path := reading.first_file(folder, name))), None)


def find_folder(task_name: str, folder: Path, splits: Sequence[str] = ("train",)) -> Path:
    """The folder that holds a file of these splits of a named task: one of its folders in this one, or this one."""
    named = TASKS[task_name]
    tried = [*(folder / name for name in named.folders), folder]
    for candidate in tried:
        if any(find_split(task_name, candidate, split) for split in splits):
            return candidate
    wanted = " or ".join(named.files[split][0] for split in splits)
    raise UserError(
        f"{wanted} of task {task_name} is in none of: {', '.join(map(str, tried))}. "
        "Name another folder (task.data_dir, or --data)"
    )


def _find_files(named: NamedTask, config: TaskConfig, given: Mapping[str, Path]) -> dict[str, Path]:
    """Where the splits that are not given lie; the part of EWT that comes with the code when no folder is given."""
    wanted = [split for split in named.files if split not in given]
    if not wanted or (config.train and not config.data_dir):
        return {}
    if config.data_dir.startswith(TFDS):
        return _find_prepared(named, config.data_dir.removeprefix(TFDS), wanted)
    if config.data_dir:
        root = Path(config.data_dir)
        if not root.is_dir():
            raise UserError(f"task.data_dir: no such folder: {root}")
    elif config.name == "ewt":
        root = BUNDLED_EWT
    elif "BERT_JAX_DATA" in os.environ:
        root = Path(os.environ["BERT_JAX_DATA"])
    else:
        raise UserError(
            f"task.data_dir is empty and BERT_JAX_DATA is not set: set either to the folder that holds "
            f"{named.folders[0]}/, or name files (task.train, task.dev)"
        )
    folder = find_folder(config.name, root, wanted if config.train else ["train"])
    return {split: path for split in wanted if (path := find_split(config.name, folder, split))}


def _find_prepared(named: NamedTask, name: str, wanted: Sequence[str]) -> dict[str, Path]:
    """The splits of a named task that are prepared (bert_jax/data/prepared.py) under a name, or under its own."""
    if not named.stored:
        raise UserError(f"TensorFlow Datasets has no {named.task.name}; name a folder: --config.task.data_dir=DIR")
    address = f"{TFDS}{name or named.stored}"
    there = open_tfds(address)[0].info.splits
    found = {split: named.stored_splits.get(split, split) for split in wanted}
    return {split: Path(f"{address}:{stored}") for split, stored in found.items() if stored in there}
