"""BoolQ, CB, RTE and WiC of SuperGLUE (Wang et al. 2019b, table 1), as super.gluebenchmark.com gives them.

The order of labels is that of the Hugging Face `super_glue` data set, so that exported models agree.
"""

from bert_jax.tasks.named.layout import NamedTask
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import Task

FILES = {"train": ("train.jsonl",), "dev": ("val.jsonl",), "test": ("test.jsonl",)}
STORED_SPLITS = {"train": "train", "dev": "validation", "test": "test"}


def superglue_folders(folder: str) -> tuple[str, ...]:
    """Where a task of SuperGLUE may lie in a folder of data: the published name, or that of the Hugging Face data."""
    return tuple(
        f"{place}{name}"
        for place in ("superglue/", "super_glue/", "SuperGLUE/", "")
        for name in (folder, folder.lower())
    )


def _superglue(task: Task, folder: str) -> NamedTask:
    return NamedTask(
        task,
        superglue_folders(folder),
        FILES,
        stored=f"super_glue/{folder.lower()}",
        stored_splits=STORED_SPLITS,
        stored_columns=task.columns,
    )


SUPERGLUE: dict[str, NamedTask] = {
    "boolq": _superglue(
        Task(
            "boolq",
            "classification",
            ("false", "true"),
            metrics=("accuracy",),
            columns=Columns("question", "passage", "label"),
        ),
        "BoolQ",
    ),
    "cb": _superglue(
        Task(
            "cb",
            "classification",
            ("entailment", "contradiction", "neutral"),
            metrics=("accuracy", "macro_f1"),
            columns=Columns("premise", "hypothesis", "label"),
        ),
        "CB",
    ),
    "superglue_rte": _superglue(
        Task(
            "superglue_rte",
            "classification",
            ("entailment", "not_entailment"),
            metrics=("accuracy",),
            columns=Columns("premise", "hypothesis", "label"),
        ),
        "RTE",
    ),
    "wic": _superglue(
        Task(
            "wic",
            "classification",
            ("false", "true"),
            metrics=("accuracy",),
            columns=Columns("sentence1", "sentence2", "label", marks=("start1", "end1", "start2", "end2")),
        ),
        "WiC",
    ),
}
