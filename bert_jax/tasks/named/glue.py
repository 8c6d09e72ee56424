"""The nine tasks of GLUE, and its diagnostic set (AX), which a model of MNLI is tested on.

Layouts and metrics: Wang et al. 2019, table 1, and the files of gluebenchmark.com. The order of labels is that of
the Hugging Face `glue` data set, so that exported models agree.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from bert_jax.tasks.example import Example, Split
from bert_jax.tasks.kinds.classification import ClassificationTask, RegressionTask
from bert_jax.tasks.named.layout import SPLITS, STORED_SPLITS, NamedTask
from bert_jax.tasks.reading import Columns, read_table

NLI_LABELS = ("entailment", "neutral", "contradiction")


def _glue(
    name: str,
    folder: str,
    labels: tuple[str, ...],
    metrics: tuple[str, ...],
    columns: Columns,
    stored_columns: Columns | None = None,
    test_columns: Columns | None = None,
    kind: type[ClassificationTask] | type[RegressionTask] = ClassificationTask,
) -> NamedTask:
    return NamedTask(
        kind(name, labels, metrics=metrics, columns=columns),
        (folder, f"glue/{folder}", name, f"glue/{name}"),
        {split: (f"{split}.tsv",) for split in SPLITS},
        columns={} if test_columns is None else {"test.tsv": test_columns},
        stored=f"glue/{name}",
        stored_splits=STORED_SPLITS,
        stored_columns=stored_columns or columns,
    )


@dataclass(frozen=True)
class QqpTask(ClassificationTask):
    """QQP. Some questions of the published training file contain line ends, which split their lines in two."""

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[Example]:
        """Leaves out lines with another number of fields, except in a file without labels.

        Such a file is read strictly, because each of its lines needs a prediction in its place.
        """
        split = read_table(path, columns, label_required, self.numbered_labels, ragged_lines=True)
        if split.left_out and not split.labelled:
            return read_table(path, columns, label_required, self.numbered_labels)
        return split


_SENTENCES = Columns("sentence1", "sentence2", "label")
_TWO_WAY = ("entailment", "not_entailment")

GLUE = (
    _glue("sst2", "SST-2", ("0", "1"), ("accuracy",), Columns("sentence", "", "label")),
    _glue(
        "cola",
        "CoLA",
        ("0", "1"),
        ("matthews_correlation", "accuracy"),
        Columns("3", "", "1"),
        stored_columns=Columns("sentence", "", "label"),
        test_columns=Columns("sentence"),
    ),
    _glue(
        "mrpc",
        "MRPC",
        ("0", "1"),
        ("accuracy", "f1"),
        Columns("#1 String", "#2 String", "Quality"),
        stored_columns=_SENTENCES,
    ),
    _glue(
        "stsb",
        "STS-B",
        (),
        ("pearson", "spearman"),
        Columns("sentence1", "sentence2", "score"),
        stored_columns=_SENTENCES,
        kind=RegressionTask,
    ),
    _glue(
        "qqp",
        "QQP",
        ("0", "1"),
        ("accuracy", "f1"),
        Columns("question1", "question2", "is_duplicate"),
        stored_columns=Columns("question1", "question2", "label"),
        kind=QqpTask,
    ),
    replace(
        _glue(
            "mnli",
            "MNLI",
            NLI_LABELS,
            ("accuracy",),
            Columns("sentence1", "sentence2", "gold_label"),
            stored_columns=Columns("premise", "hypothesis", "label"),
        ),
        files={
            "train": ("train.tsv",),
            "dev": ("dev_matched.tsv",),
            "dev_mismatched": ("dev_mismatched.tsv",),
            "test": ("test_matched.tsv",),
            "test_mismatched": ("test_mismatched.tsv",),
            "ax": (
                *(
                    f"{place}/{name}"
                    for name in ("diagnostic-full.tsv", "diagnostic.tsv")
                    for place in ("../diagnostic", "../AX", ".")
                ),
                "../ax/test-00000-of-00001.parquet",  # of the Hugging Face data set, without labels
            ),
        },
        columns={"diagnostic-full.tsv": Columns("Premise", "Hypothesis", "Label")},
        metrics={"ax": ("matthews_correlation",)},
        stored_splits={
            "train": "train",
            "dev": "validation_matched",
            "dev_mismatched": "validation_mismatched",
            "test": "test_matched",
            "test_mismatched": "test_mismatched",
        },
    ),
    _glue("qnli", "QNLI", _TWO_WAY, ("accuracy",), Columns("question", "sentence", "label")),
    _glue("rte", "RTE", _TWO_WAY, ("accuracy",), _SENTENCES),
    _glue("wnli", "WNLI", ("0", "1"), ("accuracy",), _SENTENCES),
)
