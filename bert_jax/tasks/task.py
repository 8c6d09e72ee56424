"""The base class of fine-tuning tasks: the options that all kinds share, and what a kind of task implements."""

import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from bert_jax.command import UserError
from bert_jax.config import ModelConfig, TaskConfig
from bert_jax.model.heads.config import POOLINGS
from bert_jax.tasks.example import Split, TaskRows
from bert_jax.tasks.input_records import InputRecord
from bert_jax.tasks.metric_functions import check_metric_names
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.reading import Columns
from bert_jax.tokenizer import Tokenizer

Item = TypeVar("Item")
Rows = TypeVar("Rows", bound=TaskRows)


@dataclass(frozen=True)
class Task(abc.ABC, Generic[Item, Rows]):
    """A fine-tuning task: its options, and how its files become rows, a loss, metrics and predictions.

    Each kind of task is a subclass with its own options. Item is what a kind reads from a file (a text, a sentence, a
    question); Rows is what it encodes items to. Tasks are immutable: what a training file adds (labels, class weights)
    gives a new task. bert_jax/tasks/registry.py lists the kinds.

    | option | |
    |---|---|
    | name | a named task (bert_jax/tasks/named), or `own` for files of the user |
    | labels | the labels by id; empty where the kind has none, and until the training file is read |
    | max_length | tokens of a row at most |
    | metrics | names of metrics; the first one selects the best seed and rate, and with early_stop the checkpoint |
    | columns | which columns of a table hold the texts and the labels |
    """

    kind: ClassVar[str]  # its name in configurations and in config.json
    has_labels: ClassVar[bool] = True  # whether task.labels may name the labels
    unread_columns: ClassVar[tuple[str, ...]] = ()  # the fields of Columns that its files cannot have

    name: str
    labels: tuple[str, ...] = ()
    max_length: int = TaskConfig.max_length
    metrics: tuple[str, ...] = ()
    columns: Columns = field(default_factory=Columns)

    def __post_init__(self) -> None:
        """Subclasses check their options here and call this method."""
        if self.known_metrics:
            check_metric_names(self.metrics, self.known_metrics)

    @property
    def known_metrics(self) -> Collection[str]:
        """The names that `metrics` may have; empty where a kind does not state them before it measures a file."""
        return ()

    @abc.abstractmethod
    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[Item]:
        """Reads a file of the task. Without label_required, a file without labels is read too.

        Raises UserError, with file and line, for malformed input.
        """

    @abc.abstractmethod
    def parse(self, source: Path, records: Sequence[InputRecord]) -> Split[Item]:
        """The inputs of a prediction as a split without labels (labelled=False), one item for each record, in order.

        A record is a plain line, in which tabs separate the texts of an item, or a JSON object with the names of the
        task's columns or the names below as its fields; other fields are ignored.

        classification, regression  text, text_pair
        tagging, spans              text, which is split into words; or tokens (and text, for offsets)
        questions                   question, context, and an optional id
        choices                     text or context, and choices: a list of texts

        An item keeps what predictions needs to answer in the user's terms: the raw text, offsets, the id. Raises
        UserError, with source and line, for a missing or empty text (input_records.py has what the kinds share).
        """

    @abc.abstractmethod
    def encode(self, split: Split[Item], tokenizer: Tokenizer) -> Rows:
        """The rows of a split; rows keep their split. Raises UserError, with file and line, for an unknown label.

        Where split.labelled is False the labels of its items are ignored.
        """

    @abc.abstractmethod
    def objective(self) -> TaskObjective:
        """The loss of a task whose labels are known."""

    @abc.abstractmethod
    def measure(self, rows: Rows, answers: Sequence[Any]) -> dict[str, float]:
        """The task's metrics on a labelled split. answers are the objective's answers for each row, in order."""

    @abc.abstractmethod
    def predictions(self, rows: Rows, answers: Sequence[Any]) -> list[dict[str, Any]]:
        """What bert-jax predict prints for each item of a split, in order: an object of JSON values.

        `label` and `score`, its probability (for a regression: the number); `scores` of all labels by name, or
        the best answers to a question, which the command prints only on request; `words`, `tags`, `entities`, `spans`,
        `answer` ... with `start` and `end`, characters of the raw text, where the item has one.
        """

    def with_names(self, split: Split[Item]) -> Split[Item]:
        """A split that was read, with its labels as the task names them."""
        return split

    def default_metrics(self) -> tuple[str, ...]:
        """The metrics of a task that names none; the first one selects as Task.metrics do."""
        return ()

    def complete(self, train: Split[Item]) -> "Task":
        """The task with the labels and metrics that its training file implies, where the task names none."""
        return self.with_metrics()

    def with_metrics(self) -> "Task":
        """The task with the default metrics where it names none."""
        return replace(self, metrics=self.metrics or self.default_metrics())

    def with_pooling(self, pooling: str) -> "Task":
        """The task with the pooling of a checkpoint, for kinds that read one vector of each text."""
        return self

    def continuing(self, start: "Task | None", given: TaskConfig) -> "Task":
        """The task with what a checkpoint's own task decides, where the configuration `given` does not."""
        return self

    @property
    def measured(self) -> "Task":
        """The task with plain cross-entropy as its loss, so that losses compare between runs with class weights."""
        return self

    def check_model(self, model: ModelConfig) -> None:
        """Raises UserError for a model that cannot learn the task."""
        if self.max_length > model.max_positions:
            raise UserError(
                f"task.max_length is {self.max_length}, but the model has {model.max_positions} positions; "
                f"use --config.task.max_length={model.max_positions}"
            )

    def counts(self, rows: Rows) -> dict[str, int]:
        """Counts of a split in addition to examples, rows, tokens and truncated ones."""
        return {}

    def remarks(self, rows: Rows) -> list[str]:
        """Warnings about a split, one line each, beginning with the name of its file."""
        return []

    def training_remarks(self, rows: Rows) -> list[str]:
        """Further warnings about the training file. Raises UserError for rows from which nothing can be learned."""
        return []

    def check_metrics(self, split: Split[Item]) -> None:
        """Raises UserError for a metric of the task that a labelled split cannot have."""

    def metric_names(self, dev: Split[Item]) -> tuple[str, ...]:
        """The names of the metrics on dev during training, of a task whose metrics are known."""
        return (*self.metrics, "task_loss")

    def calibrated(self, metrics: Mapping[str, float]) -> "Task":
        """The task with the thresholds found on dev. metrics are those of dev; they are empty without a dev file."""
        return self


@dataclass(frozen=True)
class PooledTask(Task[Item, Rows]):
    """A task that reads one vector of each text, made of its tokens by pooling (bert_jax/model/heads/pooling.py)."""

    pooling: str = "cls"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("task.pooling", self.pooling, POOLINGS)

    def with_pooling(self, pooling: str) -> "Task":
        return replace(self, pooling=pooling)

    def check_model(self, model: ModelConfig) -> None:
        """Also raises UserError for pooling=cls in a causal model, whose first token attends to itself alone."""
        if model.causal and self.pooling == "cls":
            raise UserError(
                "task.pooling is cls, but the model is causal: the first token of a text does not attend to the "
                "others. Use --config.task.pooling=mean (or max, last, attention_dot, attention_additive)"
            )
        super().check_model(model)


def check_choice(field_name: str, value: str, known: tuple[str, ...]) -> None:
    """Raises UserError for a value that is not one of those known."""
    if value not in known:
        raise UserError(f"{field_name} is {value!r}; choose from: {', '.join(known)}")
