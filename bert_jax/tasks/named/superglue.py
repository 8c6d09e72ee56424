"""BoolQ, CB, RTE and WiC of SuperGLUE (Wang et al. 2019b, table 1), in the layout of super.gluebenchmark.com.

The order of labels is that of the Hugging Face `super_glue` data set, so that exported models agree.
"""

from bert_jax.tasks.kinds.classification import ClassificationTask
from bert_jax.tasks.named.layout import STORED_SPLITS, NamedTask
from bert_jax.tasks.reading import Columns

FILES = {"train": ("train.jsonl",), "dev": ("val.jsonl",), "test": ("test.jsonl",)}


def superglue_folders(folder: str) -> tuple[str, ...]:
    """The folders of a task of SuperGLUE below a data folder: the published name, and that of the Hugging Face data."""
    return tuple(
        f"{place}{name}"
        for place in ("superglue/", "super_glue/", "SuperGLUE/", "")
        for name in (folder, folder.lower())
    )


def _superglue(
    name: str, folder: str, labels: tuple[str, ...], metrics: tuple[str, ...], columns: Columns
) -> NamedTask:
    return NamedTask(
        ClassificationTask(name, labels, metrics=metrics, columns=columns),
        superglue_folders(folder),
        FILES,
        stored=f"super_glue/{folder.lower()}",
        stored_splits=STORED_SPLITS,
        stored_columns=columns,
    )


_PREMISES = Columns("premise", "hypothesis", "label")
_WORDS = Columns("sentence1", "sentence2", "label", marks=("start1", "end1", "start2", "end2"))

SUPERGLUE = (
    _superglue("boolq", "BoolQ", ("false", "true"), ("accuracy",), Columns("question", "passage", "label")),
    _superglue("cb", "CB", ("entailment", "contradiction", "neutral"), ("accuracy", "macro_f1"), _PREMISES),
    _superglue("superglue_rte", "RTE", ("entailment", "not_entailment"), ("accuracy",), _PREMISES),
    _superglue("wic", "WiC", ("false", "true"), ("accuracy",), _WORDS),
)
