"""The kinds of tasks and the named tasks; resolves a configuration to a task and its files.

Add a new kind with `KINDS[kind] = TaskClass`, and a new named task with `TASKS[name] = NamedTask(...)`
(docs/extending.md). Read `resolve` first, then `read`, then `to_json` and `from_json`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from bert_jax import config as config_lib
from bert_jax.config import TaskConfig
from bert_jax.data.shards import open_tfds
from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.storage.files import SUFFIXES
from bert_jax.tasks.kinds.choice import ChoiceTask
from bert_jax.tasks.kinds.classification import ClassificationTask, MultiLabelTask, RegressionTask
from bert_jax.tasks.kinds.embedding import EmbeddingTask
from bert_jax.tasks.kinds.question import QuestionTask
from bert_jax.tasks.kinds.span import SpanPairTask, SpanTask
from bert_jax.tasks.kinds.tagging import TaggingTask
from bert_jax.tasks.kinds.token_regression import TokenRegressionTask
from bert_jax.tasks.labels import NamedLabelsTask, check_names
from bert_jax.tasks.named import SPLITS, TASKS, NamedTask
from bert_jax.tasks.reading import tables
from bert_jax.tasks.reading.tables import TFDS, Columns, is_stored, plain_name
from bert_jax.tasks.rows import Split
from bert_jax.tasks.task import Task, with_pooling

BUILT_IN: tuple[type[Task[Any, Any]], ...] = (
    ClassificationTask,
    RegressionTask,
    ChoiceTask,
    TaggingTask,
    MultiLabelTask,
    TokenRegressionTask,
    QuestionTask,
    SpanTask,
    SpanPairTask,
    EmbeddingTask,
)
KINDS = {one.kind: one for one in BUILT_IN}

BUNDLED_EWT = Path(__file__).resolve().parents[2] / "data_prep" / "sample" / "ewt"
# The kind that task=auto means for your own file, by its format.
KIND_OF_FILE = {"table": "classification", "squad": "question", "conllu": "tagging", "conll": "tagging"}
OWN_ENDINGS = (".json", ".tsv", ".csv", ".jsonl", ".parquet", ".conllu", ".conll")
STORED_ENDINGS = (".parquet", ".jsonl")
PROMPTS = ("prompt", "query_prompt", "document_prompt")  # for which none stands for no text
OWN_KEYS = ("text", "text_pair", "label", "choices", "negatives", "marks")  # of your own files


def kind_class(kind: str) -> type[Task[Any, Any]]:
    """The class of a kind of task. Raises UserError for an unknown one."""
    if kind not in KINDS:
        raise UserError(
            f"task.kind is {kind!r}; choose from: {', '.join(KINDS)}, or import the module that registers a kind of "
            "your own"
        )
    return KINDS[kind]


def resolve(config: TaskConfig) -> tuple[Task, dict[str, Path]]:
    """The task that a configuration selects, and the existing file of each split.

    The files of a named task are those of task.data_dir (a folder, or tfds: and the name of prepared data, by default
    the task's own), or of $BERT_JAX_DATA; task.train, task.dev and task.test replace single ones. With task.train and
    no task.data_dir there are no others. Raises UserError for an unknown name, a missing task, columns given for a
    named task or a kind that is not its own, task.data_dir without a name, a missing file, and a file that belongs to
    two splits.
    """
    if config.submission and getattr(config, "label_map", None):
        raise UserError(
            "task.label_map is set, but the leaderboard of task.submission expects the labels of its own files; leave "
            "out one of the two"
        )
    given = {split: Path(path) for split in SPLITS if (path := getattr(config, split))}
    task: Task
    if config.name:
        if config.name not in TASKS:
            raise UserError(
                f"task.name is {config.name!r}; choose from: {', '.join(TASKS)}, or name files by task.train and "
                "task.dev"
            )
        task = TASKS[config.name].task
        own = [key for key in OWN_KEYS if getattr(config, key, None)]
        if own or config.kind not in ("auto", task.kind):
            raise UserError(
                f"task.{own[0] if own else 'kind'} is for your own files, but task.name is {config.name}; leave out "
                "one of the two"
            )
        files = _find_files(TASKS[config.name], config, given) | given
    elif config.train:
        kind = KIND_OF_FILE[tables.kind_of_file(Path(config.train))] if config.kind == "auto" else config.kind
        label = config.label if isinstance(config.label, str) else ",".join(config.label)
        task = kind_class(kind)(
            "own", columns=Columns(config.text, getattr(config, "text_pair", ""), label, _marks(config))
        )
        if config.data_dir:
            raise UserError(
                f"task.data_dir is {config.data_dir!r}, which is for the files of a named task, but task.name is not "
                "set. Set it, or leave out task.data_dir and name files by task.train, task.dev and task.test"
            )
        files = given
    else:
        raise UserError(
            f"no task is given; set task.name ({', '.join(TASKS)}), or task.train, task.text and task.label"
        )
    task = replace(task, **_options(config, task))
    files = {split: files[split] for split in splits_of(task.name) if split in files}
    tables.check_apart(files)
    return task, files


def _options(config: TaskConfig, task: Task) -> dict[str, Any]:
    """The options that a configuration sets: those that differ from their defaults.

    Raises UserError for an option that the kind which `auto` means does not have.
    """
    check_names("task.metrics", config.metrics)
    check_names("task.labels", getattr(config, "labels", ()))
    own = {item.name for item in fields(task)}
    allowed = {item.name for item in fields(TaskConfig.kinds.get(task.kind, config))}
    options: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if value == _default(item):
            continue
        if item.name not in allowed:
            raise UserError(
                f"task.{item.name} is set, but the task is {task.kind}, which does not have it. Omit it, or set "
                "--config.task.kind"
            )
        if item.name in own and item.name != "name":
            no_prompt = item.name in PROMPTS and value.lower() == "none"
            options[item.name] = "" if no_prompt else value
    if "label_map" in options and task.labels and "labels" not in options:  # a named task takes the new names
        options["labels"] = tuple(dict.fromkeys(options["label_map"].get(label, label) for label in task.labels))
    return options


def _marks(config: TaskConfig) -> tuple[str, ...]:
    marks: tuple[str, ...] = getattr(config, "marks", ())
    expected = 4 if getattr(config, "text_pair", "") else 2
    if marks and len(marks) != expected:
        raise UserError(
            f"task.marks is {','.join(marks)!r}; give {expected} columns: the first character of a "
            "word and the one after its last, for each text"
        )
    return marks


def splits_of(task_name: str) -> tuple[str, ...]:
    """The splits that a task may have: train, dev, test, and further ones of a named task."""
    return tuple(TASKS[task_name].files) if task_name in TASKS else SPLITS


def metrics_of(task: Task, split: str) -> Task:
    """The task with the metrics of a split, where a named task has others for it."""
    metrics = TASKS[task.name].metrics.get(split) if task.name in TASKS else None
    return replace(task, metrics=metrics) if metrics else task


def read(task: Task, path: Path, label_required: bool = True) -> Split[Any]:
    """Reads a file of a task. Without label_required, a file without labels is read too."""
    columns = task.columns
    named = TASKS.get(task.name)
    if named and columns == named.task.columns:  # the user has not named others
        stored = named.stored_columns if is_stored(path) else None
        columns = stored or named.columns.get(plain_name(path), columns)
    split = task.read(path, columns, label_required)
    return task.with_names(split) if isinstance(task, NamedLabelsTask) else split


def find_split(task_name: str, folder: Path, split: str) -> Path | None:
    """The file of a split in a folder, or None: a named task's file, or else SPLIT.tsv, SPLIT.conllu ..."""
    named = TASKS.get(task_name)
    names = [split + ending for ending in OWN_ENDINGS]
    bases = [split]  # names of data sets in several files
    if named:
        stored = named.stored_splits.get(split)
        names = [*named.files[split], *(stored + ending for ending in STORED_ENDINGS if stored), *names]
        bases = [stored, split] if stored else bases
    for name in names:
        for ending in ("", *SUFFIXES):
            if (folder / (name + ending)).is_file():
                return folder / (name + ending)
    return next((path for base in bases if (path := tables.first_file(folder, base))), None)


def find_folder(task_name: str, folder: Path, splits: Sequence[str] = ("train",)) -> Path:
    """The folder that holds a file of these splits of a named task: one of its folders below this one, or this one."""
    named = TASKS[task_name]
    tried = [*(folder / name for name in named.folders), folder]
    for candidate in tried:
        if any(find_split(task_name, candidate, split) for split in splits):
            return candidate
    expected = " or ".join(named.files[split][0] for split in splits)
    raise UserError(
        f"{expected} of task {task_name} was not found in: {', '.join(map(str, tried))}. "
        "Name another folder (task.data_dir, or --data)"
    )


def _find_files(named: NamedTask, config: TaskConfig, given: Mapping[str, Path]) -> dict[str, Path]:
    """The files of the splits that are not given; without a folder, the part of EWT that comes with the code."""
    needed = [split for split in named.files if split not in given]
    if not needed or (config.train and not config.data_dir):
        return {}
    if config.data_dir.startswith(TFDS):
        return _find_prepared(named, config.data_dir.removeprefix(TFDS), needed)
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
    folder = find_folder(config.name, root, needed if config.train else ["train"])
    return {split: path for split in needed if (path := find_split(config.name, folder, split))}


def _find_prepared(named: NamedTask, name: str, needed: Sequence[str]) -> dict[str, Path]:
    """The splits of a named task in data prepared by TensorFlow Datasets, under a name or the task's own."""
    if not named.stored:
        raise UserError(f"TensorFlow Datasets has no {named.task.name}; name a folder: --config.task.data_dir=DIR")
    address = f"{TFDS}{name or named.stored}"
    existing = open_tfds(address)[0].info.splits
    found = {split: named.stored_splits.get(split, split) for split in needed}
    return {split: Path(f"{address}:{stored}") for split, stored in found.items() if stored in existing}


# A task as the JSON values under `task` in the config.json of a workdir or an export: its kind, and its own fields.


def _default(item: Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


def to_json(task: Task) -> dict[str, Any]:
    """The JSON values of a task."""
    return {"kind": task.kind, **asdict(task)}


def from_json(values: Mapping[str, Any]) -> Task:
    """The task of JSON values; options that its kind does not have are ignored.

    The class is that of the named task, which may refine its kind's, or else that of the kind.

    Raises UserError for an unknown kind, a missing name, or a value of another type.
    """
    if "kind" not in values:
        raise UserError("task.kind is missing; give the kind of the task, such as classification")
    named = TASKS.get(values.get("name", ""))
    kind = type(named.task) if named and named.task.kind == values["kind"] else kind_class(values["kind"])
    known = {item.name for item in fields(kind)}
    return config_lib.load(kind, {key: value for key, value in values.items() if key in known}, "task")


def task_of(loaded: LoadedModel) -> Task:
    """The task that a checkpoint was fine-tuned for, with rows of at most as many tokens as the model has positions.

    Raises UserError for a checkpoint that was not fine-tuned.
    """
    if not loaded.task:
        raise UserError("this checkpoint was not fine-tuned for a task; fine-tune it first: bert-jax finetune")
    task = from_json(loaded.task)
    task = replace(task, max_length=min(task.max_length, loaded.model.max_positions)).with_metrics()
    # A folder in Hugging Face format does not record the options of a task; the pooling is that of its heads.
    return with_pooling(task, loaded.heads.pooling)


@dataclass(frozen=True)
class Published:
    """Metrics of a task on its dev file, as test_NAME on its test file, with their model and source."""

    source: str
    metrics: Mapping[str, float]


# The table of huggingface/transformers, examples/flax/text-classification/README.md: three epochs of batches of 32. Of
# MNLI the matched dev file.
_FLAX = "bert-base-cased (Hugging Face's Flax example; dev, mean of 5 seeds)"
_GLUE: dict[str, dict[str, float]] = {
    "cola": {"matthews_correlation": 0.590},
    "sst2": {"accuracy": 0.922},
    "mrpc": {"f1": 0.890, "accuracy": 0.844},
    "stsb": {"pearson": 0.889, "spearman": 0.886},
    "qqp": {"accuracy": 0.908, "f1": 0.875},
    "mnli": {"accuracy": 0.838},
    "qnli": {"accuracy": 0.908},
    "rte": {"accuracy": 0.648},
    "wnli": {"accuracy": 0.370},
}

FIGURES: dict[str, Published] = {
    **{task: Published(_FLAX, metrics) for task, metrics in _GLUE.items()},
    "conll2003": Published(
        "BERT-Base, cased, fine-tuned with document context (Devlin et al. 2019, table 7; mean of 5 runs)",
        {"f1": 0.964, "test_f1": 0.924},
    ),
    "squad1": Published(
        "BERT-Base, single (Devlin et al. 2019, table 2; official training and dev files)",
        {"exact_match": 0.808, "f1": 0.885},
    ),
}
