"""The tasks known by name: their options, and the layout of their published files."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bert_jax.errors import UserError
from bert_jax.tasks.kinds.choice import ChoiceTask, MultipleChoice
from bert_jax.tasks.kinds.classification import ClassificationTask, RegressionTask
from bert_jax.tasks.kinds.question import SQUAD1_METRICS, SQUAD2_METRICS, QuestionTask
from bert_jax.tasks.kinds.tagging import SentenceReader, TaggingTask
from bert_jax.tasks.reading.inputs import InputRecord
from bert_jax.tasks.reading.labelled import read_conllu, read_table, read_word_lists
from bert_jax.tasks.reading.tables import Columns, is_stored, plain_name
from bert_jax.tasks.rows import Example, Sentence, Split
from bert_jax.tasks.task import Task

SPLITS = ("train", "dev", "test")
# The splits of most data sets in TensorFlow Datasets and on the Hugging Face hub.
STORED_SPLITS = {"train": "train", "dev": "validation", "test": "test"}


@dataclass(frozen=True)
class NamedTask:
    """A task and the layout of its published files."""

    task: Task
    folders: tuple[str, ...]  # below a data folder, where its files may be; the data folder itself is tried last
    files: Mapping[str, tuple[str, ...]]  # by split, the names of its file, in order; .xz, .gz or .zst may follow
    columns: Mapping[str, Columns] = field(default_factory=dict)  # by file name, if they differ from the task's
    metrics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by split, if they differ from the task's
    stored: str = ""  # its name in TensorFlow Datasets and on the Hugging Face hub; empty if it is in neither
    stored_splits: Mapping[str, str] = field(default_factory=dict)  # the names of its splits there
    stored_columns: Columns | None = None

    def match_split(self, path: Path) -> str:
        """Returns the split whose file has this name, or an empty text."""
        splits = (
            split for split, names in self.files.items() if plain_name(path) in {Path(name).name for name in names}
        )
        return next(splits, "")


# The nine tasks of GLUE, and its diagnostic set (AX), on which a model of MNLI is tested.
#
# Layouts and metrics: Wang et al. 2019, table 1, and the files of gluebenchmark.com. The order of labels is that of
# the Hugging Face `glue` data set, so that exported models agree.


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
    """QQP, whose published training file has questions with line ends, which split their lines in two."""

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[Example]:
        split = read_table(path, columns, label_required, self.numbered_labels, ragged_lines=True)
        # A line without a label needs a prediction in its place, so none may be left out.
        if split.left_out and not split.labelled:
            return read_table(path, columns, label_required, self.numbered_labels)
        return split


_SENTENCE = Columns("sentence", "", "label")
_SENTENCES = Columns("sentence1", "sentence2", "label")
_PREMISES = Columns("premise", "hypothesis", "label")
_BINARY = ("0", "1")
_TWO_WAY = ("entailment", "not_entailment")
_COLA = ("matthews_correlation", "accuracy")
_DIAGNOSTIC = ("diagnostic-full.tsv", "diagnostic.tsv")

# name, folder, labels, metrics, columns; if they differ, the columns of stored data and of test.tsv
GLUE = (
    _glue("sst2", "SST-2", _BINARY, ("accuracy",), _SENTENCE),
    _glue("cola", "CoLA", _BINARY, _COLA, Columns("3", "", "1"), _SENTENCE, Columns("sentence")),
    _glue("mrpc", "MRPC", _BINARY, ("accuracy", "f1"), Columns("#1 String", "#2 String", "Quality"), _SENTENCES),
    _glue(
        "stsb",
        "STS-B",
        (),
        ("pearson", "spearman"),
        Columns("sentence1", "sentence2", "score"),
        _SENTENCES,
        kind=RegressionTask,
    ),
    _glue(
        "qqp",
        "QQP",
        _BINARY,
        ("accuracy", "f1"),
        Columns("question1", "question2", "is_duplicate"),
        Columns("question1", "question2", "label"),
        kind=QqpTask,
    ),
    replace(
        _glue("mnli", "MNLI", NLI_LABELS, ("accuracy",), Columns("sentence1", "sentence2", "gold_label"), _PREMISES),
        files={
            "train": ("train.tsv",),
            "dev": ("dev_matched.tsv",),
            "dev_mismatched": ("dev_mismatched.tsv",),
            "test": ("test_matched.tsv",),
            "test_mismatched": ("test_mismatched.tsv",),
            # The file of the Hugging Face data set, the last one, has no labels.
            "ax": (
                *(f"{folder}/{name}" for name in _DIAGNOSTIC for folder in ("../diagnostic", "../AX", ".")),
                "../ax/test-00000-of-00001.parquet",
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
    _glue("wnli", "WNLI", _BINARY, ("accuracy",), _SENTENCES),
)


# BoolQ, CB, RTE, WiC and COPA of SuperGLUE (Wang et al. 2019b, table 1), in the layout of super.gluebenchmark.com, and
# SWAG (Zellers et al. 2018) in that of https://github.com/rowanz/swagaf.
#
# The order of labels is that of the Hugging Face `super_glue` data set, so that exported models agree.


FILES = {"train": ("train.jsonl",), "dev": ("val.jsonl",), "test": ("test.jsonl",)}
# The question that follows the premise of COPA, as the authors print it (Roemmele et al. 2011, figure 1).
COPA_QUESTIONS = {"cause": "What was the CAUSE of this?", "effect": "What happened as a RESULT?"}


def _superglue(folder: str, task: Task) -> NamedTask:
    """A task in its published folder, or in the lower-case one of the Hugging Face data."""
    places = ("superglue/", "super_glue/", "SuperGLUE/", "")
    return NamedTask(
        task,
        tuple(f"{place}{name}" for place in places for name in (folder, folder.lower())),
        FILES,
        stored=f"super_glue/{folder.lower()}",
        stored_splits=STORED_SPLITS,
        stored_columns=task.columns,
    )


@dataclass(frozen=True)
class CopaTask(ChoiceTask):
    """COPA: a premise, and a question about its cause or its effect, which the column text_pair names."""

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[MultipleChoice]:
        split = super().read(path, columns, label_required)
        return replace(split, items=tuple(_with_question(path, item) for item in split.items))

    def parse_record(self, source: Path, record: InputRecord) -> MultipleChoice:
        item = super().parse_record(source, record)
        return _with_question(source, item) if item.start else item


def _with_question(source: Path, item: MultipleChoice) -> MultipleChoice:
    """Puts the question after the premise. Raises UserError if it is not in COPA_QUESTIONS."""
    if item.start not in COPA_QUESTIONS:
        raise UserError(
            f"{source} line {item.line}: question is {item.start!r}; expected {' or '.join(COPA_QUESTIONS)}"
        )
    return item._replace(context=f"{item.context} {COPA_QUESTIONS[item.start]}", start="")


_WORDS = Columns("sentence1", "sentence2", "label", marks=("start1", "end1", "start2", "end2"))


def _classes(name: str, labels: tuple[str, ...], columns: Columns, *further: str) -> ClassificationTask:
    return ClassificationTask(name, labels, metrics=("accuracy", *further), columns=columns)


SUPERGLUE = (
    _superglue("BoolQ", _classes("boolq", ("false", "true"), Columns("question", "passage", "label"))),
    _superglue("CB", _classes("cb", ("entailment", "contradiction", "neutral"), _PREMISES, "macro_f1")),
    _superglue("RTE", _classes("superglue_rte", _TWO_WAY, _PREMISES)),
    _superglue("WiC", _classes("wic", ("false", "true"), _WORDS)),
)
COPA = _superglue(
    "COPA",
    CopaTask(
        "copa", metrics=("accuracy",), columns=Columns("premise", "question", "label"), choices=("choice1", "choice2")
    ),
)
SWAG = NamedTask(
    # sent1 is the context, sent2 (a noun phrase) the common beginning of all endings; the test file has no labels.
    ChoiceTask(
        "swag",
        metrics=("accuracy",),
        columns=Columns("sent1", "sent2", "label"),
        choices=("ending0", "ending1", "ending2", "ending3"),
    ),
    ("swag", "SWAG", "swagaf/data", "swagaf", "swag/regular"),
    {"train": ("train.csv",), "dev": ("val.csv",), "test": ("test.csv",)},
    stored_splits=STORED_SPLITS,
)


# SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 2018), and the dev set of 1.1 with other training questions.


FOLDERS = ("squad", "SQuAD")


def _squad(name: str, version: str, metrics: tuple[str, ...], unanswerable: bool = False) -> NamedTask:
    return NamedTask(
        QuestionTask(name, metrics=metrics, unanswerable=unanswerable),
        FOLDERS,
        {"train": (f"train-{version}.json",), "dev": (f"dev-{version}.json",)},
        stored=f"squad/{version}",
        stored_splits={"train": "train", "dev": "validation"},
    )


SQUAD = (
    _squad("squad1", "v1.1", SQUAD1_METRICS),
    _squad("squad2", "v2.0", SQUAD2_METRICS, unanswerable=True),
    # Miller et al. 2020: questions on Wikipedia articles that are in neither part of SQuAD.
    NamedTask(
        QuestionTask("new_wiki", metrics=SQUAD1_METRICS),
        FOLDERS,
        {"train": ("squadshifts_new_wiki.json", "new_wiki_v1.0.json"), "dev": ("dev-v1.1.json",)},
    ),
)


# Tagging tasks: parts of speech of UD English EWT, entities of CoNLL-2003.


# https://universaldependencies.org/u/pos
UNIVERSAL_TAGS = (
    *("ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART"),
    *("PRON", "PROPN", "PUNCT", "SCONJ", "SYM", "VERB", "X"),
)


# The classes of STORED_LABEL by number in the Hugging Face data set `universal_dependencies`.
STORED_LABEL = "upos"
NO_WORD = "_"  # a multiword token, whose words follow it, or an empty node
STORED_TAGS = (
    *("NOUN", "PUNCT", "ADP", "NUM", "SYM", "SCONJ", "ADJ", "PART", "DET"),
    *("CCONJ", "PROPN", "PRON", "X", NO_WORD, "ADV", "INTJ", "VERB", "AUX"),
)


@dataclass(frozen=True)
class EwtTask(TaggingTask):
    """UD English EWT, whose text files are CoNLL-U, whatever their endings."""

    def choose_reader(self, path: Path) -> SentenceReader:
        return self._read_lists if is_stored(path) else read_conllu

    def _read_lists(self, path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
        # Numbers are STORED_TAGS in the data set's own column, unless other labels are given.
        own = columns.label == STORED_LABEL and self.labels == UNIVERSAL_TAGS and not self.label_map
        return read_word_lists(path, columns, label_required, STORED_TAGS if own else self.numbered_labels)

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
        split = super().read(path, columns, label_required)
        if not split.labelled or not is_stored(path):
            return split
        # The lists of the Hugging Face data set also hold what is no word, which read_conllu leaves out.
        sentences = []
        for item in split.items:
            rows = zip(item.words, item.tags or (), item.lines, strict=True)
            if kept_rows := [row for row in rows if row[1] != NO_WORD]:
                words, tags, lines = zip(*kept_rows, strict=True)
                sentences.append(item._replace(words=words, tags=tags, lines=lines))
        return replace(split, items=tuple(sentences))


TAGGING = (
    NamedTask(
        EwtTask("ewt", UNIVERSAL_TAGS, metrics=("accuracy",), columns=Columns("FORM", "", "UPOS")),
        ("ud_english_ewt", "universal_dependencies/en_ewt", "en_ewt"),
        {split: (f"en_ewt-ud-{split}.conllu",) for split in SPLITS},
        stored_splits=STORED_SPLITS,
        stored_columns=Columns("tokens", "", STORED_LABEL),
    ),
    # Tjong Kim Sang and De Meulder 2003; the order of the labels is that of the Hugging Face `conll2003` data set.
    NamedTask(
        TaggingTask(
            "conll2003",
            ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"),
            metrics=("f1", "precision", "recall", "accuracy"),
            columns=Columns("0", "", "-1"),
        ),
        ("conll2003",),
        {"train": ("eng.train",), "dev": ("eng.testa",), "test": ("eng.testb",)},
        stored_splits=STORED_SPLITS,
        stored_columns=Columns("tokens", "", "ner_tags"),
    ),
)


TASKS: dict[str, NamedTask] = {named.task.name: named for named in (*GLUE, *SUPERGLUE, SWAG, COPA, *SQUAD, *TAGGING)}
