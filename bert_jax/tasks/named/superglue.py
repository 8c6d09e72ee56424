"""BoolQ, CB, RTE and WiC of SuperGLUE (Wang et al. 2019b, table 1), in the layout of super.gluebenchmark.com.

The order of labels is that of the Hugging Face `super_glue` data set, so that exported models agree.
"""

from bert_jax.tasks.kinds.classification import ClassificationTask
from bert_jax.tasks.named.layout import NamedTask
from bert_jax.tasks.reading import Columns

FILES = {"train": ("train.jsonl",), "dev": ("val.jsonl",), "test": ("test.jsonl",)}
STORED_SPLITS = {"train": "train", "dev": "validation", "test": "test"}


def superglue_folders(folder: str) -> tuple[str, ...]:
    """The folders of a task of SuperGLUE below a data folder: the published name, and that of the Hugging Face data."""
    return tuple(
        f"{place}{name}"
        for place in ("superglue/", "super_glue/", "SuperGLUE/", "")
        for name in (folder, folder.lower())
    )


def _superglue(task: ClassificationTask, folder: str) -> NamedTask:
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
        ClassificationTask(
            "boolq",
            ("false", "true"),
            metrics=("accuracy",),
            columns=Columns("question", "passage", "label"),
        ),
        "BoolQ",
    ),
    "cb": _superglue(
        ClassificationTask(
            "cb",
            ("entailment", "contradiction", "neutral"),
            metrics=("accuracy", "macro_f1"),
            columns=Columns("premise", "hypothesis", "label"),
        ),
        "CB",
    ),
    "superglue_rte": _superglue(
        ClassificationTask(
            "superglue_rte",
            ("entailment", "not_entailment"),
            metrics=("accuracy",),
            columns=Columns("premise", "hypothesis", "label"),
        ),
        "RTE",
    ),
    "wic": _superglue(
        ClassificationTask(
            "wic",
            ("false", "true"),
            metrics=("accuracy",),
            columns=Columns("sentence1", "sentence2", "label", marks=("start1", "end1", "start2", "end2")),
        ),
        "WiC",
    ),
}
