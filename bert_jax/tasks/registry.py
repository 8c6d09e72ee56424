"""The kinds of tasks and the named tasks; resolves a configuration to a task and its files.

Add a kind with `KINDS[kind] = TaskClass`, and a named task with `TASKS[name] = NamedTask(...)` (docs/extending.md).
Read `resolve` first, then `read`, then `to_json` and `from_json`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
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
KINDS = {task.kind: task for task in BUILT_IN}

BUNDLED_EWT = Path(__file__).resolve().parents[2] / "data_prep" / "sample" / "ewt"
# The kind that task=auto means for your own file, by its format.
KIND_OF_FILE = {"table": "classification", "squad": "question", "conllu": "tagging", "conll": "tagging"}
OWN_ENDINGS = (".json", ".tsv", ".csv", ".jsonl", ".parquet", ".conllu", ".conll")
STORED_ENDINGS = (".parquet", ".jsonl")
PROMPTS = ("prompt", "query_prompt", "document_prompt")  # for which none stands for no text
OWN_KEYS = ("text", "text_pair", "label", "choices", "negatives", "marks")  # of your own files


def kind_class(kind: str) -> type[Task[Any, Any]]:
    """Returns a kind's class. Raises UserError if the kind is unknown."""
    if kind not in KINDS:
        raise UserError(
            f"task.kind is {kind!r}; choose from: {', '.join(KINDS)}, or import the file that registers your own kind: "
            "--import FILE"
        )
    return KINDS[kind]


def resolve(config: TaskConfig) -> tuple[Task, dict[str, Path]]:
    """Resolves a configuration to its task and, by split, the files.

    The files of a named task are in task.data_dir (a folder, or tfds: and the name of prepared data, by default the
    task's own) or in $BERT_JAX_DATA; task.train, task.dev and task.test replace single ones. With task.train and
    without task.data_dir there are no others.

    Raises:
        UserError: There is no task, an option does not apply to it, or a file is missing or belongs to two splits.
    """
    given = {split: Path(path) for split in SPLITS if (path := getattr(config, split))}
    named = TASKS.get(config.name)
    own = [key for key in OWN_KEYS if getattr(config, key, None)]
    if named and config.kind not in ("auto", named.task.kind):
        own.append("kind")
    text_pair, marks = getattr(config, "text_pair", ""), getattr(config, "marks", ())
    expected = 4 if text_pair else 2
    refusals = {
        f"task.name is {config.name!r}; choose from: {', '.join(TASKS)}, or name files by task.train and task.dev": (
            config.name and not named
        ),
        f"no task is given; set task.name ({', '.join(TASKS)}), or task.train, task.text and task.label": not (
            named or config.train
        ),
        f"task.{own[0] if own else ''} is for your own files, but task.name is {config.name}; omit one of the two": (
            named and own
        ),
        f"task.data_dir is {config.data_dir!r}, which is for the files of a named task, but task.name is not set. Set "
        "it, or omit task.data_dir and name files by task.train, task.dev and task.test": (
            config.data_dir and not named
        ),
        f"task.marks is {','.join(marks)!r}; give {expected} columns: the first character of a word and the one after "
        "its last, for each text": marks and len(marks) != expected,
    }
    if message := next((message for message, refused in refusals.items() if refused), ""):
        raise UserError(message)
    if named:
        task = named.task
        files = _find_files(named, config, given) | given
    else:
        kind = KIND_OF_FILE[tables.kind_of_file(given["train"])] if config.kind == "auto" else config.kind
        label = config.label if isinstance(config.label, str) else ",".join(config.label)
        task = kind_class(kind)("own", columns=Columns(config.text, text_pair, label, marks))
        files = given
    task = replace(task, **_options(config, task))
    # In the task's own order, with train first, however they were given.
    files = {split: files[split] for split in split_names(task.name) if split in files}
    tables.check_apart(files)
    return task, files


def _options(config: TaskConfig, task: Task) -> dict[str, Any]:
    """Returns the options that differ from their defaults.

    Raises UserError for an option that the kind which `auto` means does not have.
    """
    check_names("task.metrics", config.metrics)
    check_names("task.labels", getattr(config, "labels", ()))
    own = {item.name for item in fields(task)} - {"name"}
    allowed = {item.name for item in fields(TaskConfig.kinds.get(task.kind, config))}
    # Only what differs from the defaults replaces the options of a named task.
    defaults = vars(type(config)())
    options = {name: value for name, value in vars(config).items() if value != defaults[name]}
    if other := next((name for name in options if name not in allowed), ""):
        raise UserError(
            f"task.{other} is set, but the task is {task.kind}, which does not have it. Omit it, or set "
            "--config.task.kind"
        )
    options = {name: value for name, value in options.items() if name in own}
    # `none` is how a user asks for no prompt, because an empty text means the prompt of init_from.
    options |= {name: "" for name in PROMPTS if str(options.get(name)).lower() == "none" and name in options}
    # A named task takes the new names of its labels.
    if "label_map" in options and task.labels and "labels" not in options:
        options["labels"] = tuple(dict.fromkeys(options["label_map"].get(label, label) for label in task.labels))
    return options


def split_names(task_name: str) -> tuple[str, ...]:
    """Returns the splits that a task may have: train, dev, test, and a named task's further ones."""
    return tuple(TASKS[task_name].files) if task_name in TASKS else SPLITS


def with_split_metrics(task: Task, split: str) -> Task:
    """Gives a task the metrics of a split, for which a named task may have others."""
    metrics = TASKS[task.name].metrics.get(split) if task.name in TASKS else None
    return replace(task, metrics=metrics) if metrics else task


def read(task: Task, path: Path, label_required: bool = True) -> Split[Any]:
    """Reads a file of a task. Without label_required, a file without labels is read too."""
    columns = task.columns
    named = TASKS.get(task.name)
    # Published files have several layouts, of which the task has one; but a user may name other columns.
    if named and columns == named.task.columns:
        stored = named.stored_columns if is_stored(path) else None
        columns = stored or named.columns.get(plain_name(path), columns)
    split = task.read(path, columns, label_required)
    return task.with_names(split) if isinstance(task, NamedLabelsTask) else split


def find_split(task_name: str, folder: Path, split: str) -> Path | None:
    """Finds the file of a split in a folder: a named task's file, or else SPLIT.tsv, SPLIT.conllu ..."""
    named = TASKS.get(task_name)
    stored = named.stored_splits.get(split) if named else None
    names = [*named.files[split]] if named else []
    names += [stored + ending for ending in STORED_ENDINGS if stored]
    names += [split + ending for ending in OWN_ENDINGS]
    # The order of names decides if a folder has several.
    for name in names:
        for ending in ("", *SUFFIXES):
            if (folder / (name + ending)).is_file():
                return folder / (name + ending)
    # Data sets in several files, such as train-00000-of-00003.parquet.
    return next((path for base in (stored, split) if base and (path := tables.first_file(folder, base))), None)


def find_folder(task_name: str, folder: Path, splits: Sequence[str] = ("train",)) -> Path:
    """Finds the folder with these splits of a named task: below a folder, or the folder itself."""
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
    """Finds the files for splits that are not given."""
    needed = [split for split in named.files if split not in given]
    if not needed or (config.train and not config.data_dir):
        return {}
    if config.data_dir.startswith(TFDS):
        if not named.stored:
            raise UserError(f"TensorFlow Datasets has no {config.name}; name a folder: --config.task.data_dir=DIR")
        address = f"{TFDS}{config.data_dir.removeprefix(TFDS) or named.stored}"
        existing = open_tfds(address)[0].info.splits
        stored = {split: named.stored_splits.get(split, split) for split in needed}
        return {split: Path(f"{address}:{name}") for split, name in stored.items() if name in existing}
    if config.data_dir:
        root = Path(config.data_dir)
        if not root.is_dir():
            raise UserError(f"task.data_dir: no such folder: {root}")
    elif config.name == "ewt":
        root = BUNDLED_EWT  # a part of it comes with the code
    elif "BERT_JAX_DATA" in os.environ:
        root = Path(os.environ["BERT_JAX_DATA"])
    else:
        raise UserError(
            f"task.data_dir is empty and BERT_JAX_DATA is not set: set either to the folder that holds "
            f"{named.folders[0]}/, or name files (task.train, task.dev)"
        )
    folder = find_folder(config.name, root, needed if config.train else ["train"])
    return {split: path for split in needed if (path := find_split(config.name, folder, split))}


# A task as the JSON values under `task` in the config.json of a workdir or an export: its kind, and its own fields.


def to_json(task: Task) -> dict[str, Any]:
    """Returns the JSON values of a task."""
    return {"kind": task.kind, **asdict(task)}


def from_json(values: Mapping[str, Any]) -> Task:
    """Restores a task from JSON values. Options that its kind does not have are ignored.

    The class is the named task's, which may refine its kind's, or else the kind's.

    Raises:
        UserError: The kind is unknown, the name is missing, or a value has another type.
    """
    if "kind" not in values:
        raise UserError("task.kind is missing; give the kind of the task, such as classification")
    named = TASKS.get(values.get("name", ""))
    kind = type(named.task) if named and named.task.kind == values["kind"] else kind_class(values["kind"])
    # An extension or an export may record more than the class has.
    known = {item.name for item in fields(kind)}
    return config_lib.load(kind, {key: value for key, value in values.items() if key in known}, "task")


def restore_task(loaded: LoadedModel) -> Task:
    """Restores a checkpoint's task, with rows that are not longer than the model's positions.

    Raises:
        UserError: The checkpoint was not fine-tuned.
    """
    if not loaded.task:
        raise UserError("this checkpoint was not fine-tuned for a task; fine-tune it first: bert-jax finetune")
    task = from_json(loaded.task)
    task = replace(task, max_length=min(task.max_length, loaded.model.max_positions)).with_metrics()
    # A folder in Hugging Face format does not record the options of a task; the pooling is that of its heads.
    return with_pooling(task, loaded.heads.pooling)


@dataclass(frozen=True)
class Published:
    """Published metrics of a task on its dev file and, as test_NAME, on its test file."""

    source: str  # the model and the publication
    metrics: Mapping[str, float]


# The table in huggingface/transformers, examples/flax/text-classification/README.md: three epochs, batches of 32; for
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
