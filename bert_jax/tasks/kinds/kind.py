"""What a kind of task has to say of itself."""

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.tasks.example import Split, TaskRows
from bert_jax.tasks.input_records import InputRecord
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import Task
from bert_jax.tokenizer import Tokenizer


class Kind(abc.ABC):
    """One kind of task: its files, the rows that they become, what is learnt, how answers are measured and told.

    Without state: what varies between two tasks of a kind stands in Task.
    """

    @abc.abstractmethod
    def read(self, task: Task, path: Path, columns: Columns, label_required: bool) -> Split[Any]:
        """A file of the task. Without label_required, one that has no labels is read too.

        Raises UserError, with file and line, for what is not of the form.
        """

    @abc.abstractmethod
    def complete(self, task: Task, train: Split[Any]) -> Task:
        """The task with the labels and metrics that its training file implies, where it names none."""

    @abc.abstractmethod
    def default_metrics(self, task: Task) -> tuple[str, ...]:
        """What a task that names no metrics is measured by; the first chooses between seeds."""

    @abc.abstractmethod
    def parse(self, task: Task, source: Path, records: Sequence[InputRecord]) -> Split[Any]:
        """What a user wants predicted, as a split without labels (labelled=False): an item a record, in order.

        A record is a plain line, whose tabs part the texts of an item, or a JSON object, whose fields are named as the
        task's columns, or as here; others are passed over.

        classification, regression  text, text_pair
        tagging, spans              text, from which words are split; or tokens (and text, for offsets)
        questions                   question, context, and an id where there is one
        choices                     text or context, and choices: a list of texts

        An item keeps what predictions needs to answer in the user's terms: the raw text, offsets, the id. Raises
        UserError, with source and line, for what is missing, empty or no text (inputs.py has what kinds share).
        """

    @abc.abstractmethod
    def encode(self, task: Task, split: Split[Any], tokenizer: Tokenizer) -> TaskRows:
        """The rows of a split, which keep it. Raises UserError, with file and line, for an unknown label.

        Where split.labelled is False no label of it is read, whatever its items hold.
        """

    def counts(self, rows: TaskRows) -> dict[str, int]:
        """What is worth counting of a split beside examples, rows, tokens and cuts."""
        return {}

    def remarks(self, task: Task, rows: TaskRows) -> list[str]:
        """What a user should know of a split before it is used, a line each, beginning with its file."""
        return []

    @abc.abstractmethod
    def objective(self, task: Task) -> TaskObjective:
        """What is learnt of a task whose labels are known."""

    @abc.abstractmethod
    def measure(self, task: Task, rows: TaskRows, answers: Sequence[Any]) -> dict[str, float]:
        """The task's metrics of a labelled split, from the objective's answers for each of its rows, in order."""

    def metric_names(self, task: Task, dev: Split[Any]) -> tuple[str, ...]:
        """The names of what is measured of dev in training, by which one may choose; the task's metrics are known."""
        return (*task.metrics, "task_loss")

    def calibrated(self, task: Task, metrics: Mapping[str, float]) -> Task:
        """The task with the thresholds that a trained model's metrics on dev tell; they are empty without a dev."""
        return task

    @abc.abstractmethod
    def predictions(self, task: Task, rows: TaskRows, answers: Sequence[Any]) -> list[dict[str, Any]]:
        """What predict tells of each item of a split, in order: an object of JSON values.

        `label` and `score`, its probability (of a regression: the number); `scores` of all labels by name, or
        the best answers of a question, which the command tells only when asked; `words`, `tags`, `entities`, `spans`,
        `answer` ... with `start` and `end`, characters of the raw text, where the item has one.
        """
