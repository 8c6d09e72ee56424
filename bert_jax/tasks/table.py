"""The tasks known by name, where their files lie, and how a user's own files become a task."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.config import TaskConfig
from bert_jax.tasks import reading
from bert_jax.tasks.example import Split
from bert_jax.tasks.kinds import kind_of
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import Task

SPLITS = ("train", "dev", "test")
BUNDLED_EWT = Path(__file__).resolve().parents[2] / "data_prep" / "sample" / "ewt"


@dataclass(frozen=True)
class NamedTask:
    """A Task and the layout of its published files."""

    task: Task
    folder: str
    files: dict[str, str]  # by split; a .xz or .gz may follow
    test_columns: Columns | None = None  # where the test file has other columns than the others


def _glue(folder: str, task: Task, test_columns: Columns | None = None) -> NamedTask:
    return NamedTask(task, folder, {split: f"{split}.tsv" for split in SPLITS}, test_columns)


# https://universaldependencies.org/u/pos
UNIVERSAL_TAGS = (
    *("ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART"),
    *("PRON", "PROPN", "PUNCT", "SCONJ", "SYM", "VERB", "X"),
)

# Layouts, labels and metrics of GLUE: Wang et al. 2019, table 1, and the files of gluebenchmark.com. The order of
# RTE's labels is that of the Hugging Face `glue` data set, so that exported models agree.
TASKS: dict[str, NamedTask] = {
    "sst2": _glue(
        "SST-2",
        Task("sst2", "classification", ("0", "1"), metrics=("accuracy",), columns=Columns("sentence", "", "label")),
    ),
    "cola": _glue(
        "CoLA",
        Task(
            "cola",
            "classification",
            ("0", "1"),
            metrics=("matthews_correlation", "accuracy"),
            columns=Columns("3", "", "1"),
        ),
        test_columns=Columns("sentence"),
    ),
    "mrpc": _glue(
        "MRPC",
        Task(
            "mrpc",
            "classification",
            ("0", "1"),
            metrics=("accuracy", "f1"),
            columns=Columns("#1 String", "#2 String", "Quality"),
        ),
    ),
    "stsb": _glue(
        "STS-B",
        Task(
            "stsb",
            "regression",
            metrics=("pearson", "spearman"),
            columns=Columns("sentence1", "sentence2", "score"),
        ),
    ),
    "rte": _glue(
        "RTE",
        Task(
            "rte",
            "classification",
            ("entailment", "not_entailment"),
            metrics=("accuracy",),
            columns=Columns("sentence1", "sentence2", "label"),
        ),
    ),
    "ewt": NamedTask(
        Task(
            "ewt",
            "tagging",
            UNIVERSAL_TAGS,
            metrics=("accuracy",),
            columns=Columns("FORM", "", "UPOS"),
        ),
        "ud_english_ewt",
        {split: f"en_ewt-ud-{split}.conllu" for split in SPLITS},
    ),
    # Tjong Kim Sang and De Meulder 2003; the order of the labels is that of the Hugging Face `conll2003` data set.
    "conll2003": NamedTask(
        Task(
            "conll2003",
            "tagging",
            ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"),
            metrics=("f1", "precision", "recall", "accuracy"),
            columns=Columns("0", "", "-1"),
        ),
        "conll2003",
        {"train": "eng.train", "dev": "eng.testa", "test": "eng.testb"},
    ),
}


def resolve(config: TaskConfig) -> tuple[Task, dict[str, Path]]:
    """The task that a configuration means, and the file of each split that is there.

    Raises UserError for an unknown name, no task at all, columns given for a named task, or a missing file.
    """
    if config.max_length < 8:
        raise UserError(f"task.max_length is {config.max_length}; use 8 or more")
    given = {split: Path(path) for split in SPLITS if (path := getattr(config, split))}
    if config.name:
        if config.name not in TASKS:
            raise UserError(
                f"task.name is {config.name!r}; known: {', '.join(TASKS)}, or files by task.train, task.dev"
            )
        for key in ("text", "text_pair", "label", "kind"):
            if getattr(config, key):
                raise UserError(
                    f"task.{key} is for files of your own; leave it out, or leave out task.name={config.name}"
                )
        named = TASKS[config.name]
        files = (_find_files(named, config) if len(given) < len(SPLITS) else {}) | given
        task = replace(named.task, max_length=config.max_length)
    elif config.train:
        kind = config.kind or ("classification" if reading.kind_of_file(Path(config.train)) == "table" else "tagging")
        columns = Columns(config.text, config.text_pair, config.label)
        task = Task("own", kind, max_length=config.max_length, columns=columns)
        files = given
    else:
        raise UserError(f"no task: give task.name ({', '.join(TASKS)}), or task.train with task.text and task.label")
    task = replace(task, **_options(config))
    return task, {split: files[split] for split in SPLITS if split in files}


def _options(config: TaskConfig) -> dict[str, Any]:
    """What a configuration sets of the options that a Task has under the same name; empty: as the task has it."""
    shared = {field.name for field in fields(config)} & {field.name for field in fields(Task)} - {"name", "kind"}
    return {name: value for name in sorted(shared) if (value := getattr(config, name)) not in ("", None)}


def read(task: Task, path: Path, label_required: bool = True) -> Split[Any]:
    """Reads a file of a task. Without label_required, one that has no labels is read too."""
    columns = task.columns
    named = TASKS.get(task.name)
    if named and named.test_columns and path.name.startswith("test"):
        columns = named.test_columns
    return kind_of(task).read(task, path, columns, label_required)


def find_split(task_name: str, folder: Path, split: str) -> Path | None:
    """The file of a split of a named task (or SPLIT.tsv, SPLIT.conllu ... of any other) in a folder, if it is there."""
    names = [f"{split}.tsv", f"{split}.conllu", f"{split}.conll"]
    if task_name in TASKS:
        names.insert(0, TASKS[task_name].files[split])
    for name in names:
        for ending in ("", ".xz", ".gz"):
            if (folder / (name + ending)).is_file():
                return folder / (name + ending)
    return None


def find_folder(task_name: str, folder: Path, splits: Sequence[str] = ("train",)) -> Path:
    """The folder that holds a file of these splits of a named task: itself, its FOLDER, or FOLDER in its glue/."""
    name = TASKS[task_name].folder
    tried = [folder / name, folder / "glue" / name, folder]
    for candidate in tried:
        if any(find_split(task_name, candidate, split) for split in splits):
            return candidate
    wanted = " or ".join(TASKS[task_name].files[split] for split in splits)
    raise UserError(
        f"{wanted} of task {task_name} is in none of: {', '.join(map(str, tried))}. "
        "Name another folder (task.data_dir, or --data)"
    )


def _find_files(named: NamedTask, config: TaskConfig) -> dict[str, Path]:
    """Where the splits of a named task lie; the part of EWT that comes with the code when no folder is given."""
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
            f"task.data_dir is empty and BERT_JAX_DATA is not set: set either to the folder that holds {named.folder}/"
        )
    folder = find_folder(config.name, root)
    return {split: path for split in SPLITS if (path := find_split(config.name, folder, split))}
