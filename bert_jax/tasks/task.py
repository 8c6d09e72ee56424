"""The base classes of fine-tuning tasks and their objectives, and the losses that only tasks have.

Read `Task` first, the interface of all kinds. The kinds are in tasks/kinds, and tasks/registry.py lists them.
"""

import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float64, Int

from bert_jax.config import ModelConfig, TaskConfig
from bert_jax.config.finetuning import ScaledTargets
from bert_jax.config.options import check, option
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert
from bert_jax.model.heads.config import POOLINGS, pool_parts
from bert_jax.model.heads.structured import CRF, IMPOSSIBLE, Allowed
from bert_jax.model.outputs import encode_for_task, sequence_vectors
from bert_jax.tasks.metrics import check_metric_names
from bert_jax.tasks.reading.inputs import InputRecord
from bert_jax.tasks.reading.tables import Columns, first_fields, is_number
from bert_jax.tasks.rows import NO_SCALE, Split, TaskBatch, TaskRows
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train.losses import Scalar, binary_sums, classification_sums, soft_class_sum, squared_difference_sum
from bert_jax.train.objectives import Counts, Objective, Term, Terms


class TaskObjective(Objective):
    """The objective for one kind of task.

    Label id 0 counts like any other. A weight of 0, for fillers and positions without a label, adds nothing.
    """

    @property
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        return {"task": ("accuracy",)}

    @abc.abstractmethod
    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Any:
        """Computes the heads' outputs: a float32 array [B, ...] or a tree. Without a key, dropout is off."""

    @abc.abstractmethod
    def loss_terms(self, model: Bert, outputs: Any, batch: TaskBatch) -> Terms:
        """Computes the loss as the term `task`, with the metric `accuracy` if predictions are right or wrong."""

    def answers(self, model: Bert, outputs: Any, batch: TaskBatch) -> Any:
        """Returns the arrays [B, ...] that the host decodes, as small as possible. By default, the outputs."""
        return outputs

    @property
    def has_soft_targets(self) -> bool:
        """Whether a student can learn from a teacher's outputs: whether the kind defines soft_sum."""
        # A kind that overrides soft_sum has soft targets, and needs no second declaration.
        return type(self).soft_sum is not TaskObjective.soft_sum

    def soft_sum(self, outputs: Any, teacher: Any, batch: TaskBatch, temperature: float) -> Scalar:
        """Sums the weighted distance between the outputs of student and teacher (bert_jax/train/losses.py).

        If the outputs are distributions, both are read at this temperature.
        """
        raise NotImplementedError(f"{type(self).__name__} has no soft targets")

    def counts(self, batch: TaskBatch) -> Counts:
        return {"task": batch.label_weights.sum()}

    def apply(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Terms:
        return self.loss_terms(model, self.outputs(model, batch, dropout_key), batch)


class SoftClassObjective(TaskObjective):
    """An objective whose outputs are logits of classes, [..., C] for labels [...]; a teacher's are soft targets."""

    def soft_sum(
        self, outputs: Float[Array, "*shape C"], teacher: Float[Array, "*shape C"], batch: TaskBatch, temperature: float
    ) -> Scalar:
        return soft_class_sum(outputs, teacher, batch.label_weights, temperature)


def pooled_vectors(model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B 1 D"]:
    """Pools rows of one sequence, with [CLS] at position 0, to one vector each."""
    hidden = encode_for_task(model, batch, dropout_key)
    return sequence_vectors(model, hidden, batch.sequence_ids, jnp.zeros((hidden.shape[0], 1), jnp.int32))


Item = TypeVar("Item")
Rows = TypeVar("Rows", bound=TaskRows)


class Description(NamedTuple):
    """A task's report about the rows of a split."""

    counts: dict[str, int]  # in addition to examples, rows, tokens and truncated ones
    remarks: list[str]  # warnings, one line each, beginning with the file name


@dataclass(frozen=True)
class Task(abc.ABC, Generic[Item, Rows]):
    """A fine-tuning task: its options, and how its files become rows, a loss, metrics and predictions.

    Kinds of tasks are subclasses. Item is the type that a kind reads from a file (a text, a sentence, a question), and
    Rows the type to which it encodes items. Tasks are immutable: labels and class weights from a
    training file give a new task. A kind implements the six abstract methods and overrides others as it needs.

    The fields are its options; users set those that are declared in bert_jax/config/finetuning.py.
    """

    kind: ClassVar[str]  # its name in configurations and in config.json
    known_metrics: ClassVar[Collection[str]] = ()  # the names that `metrics` may have; empty: not checked
    usual_metrics: ClassVar[tuple[str, ...]] = ()  # see default_metrics
    training_options: ClassVar[tuple[str, ...]] = ()  # options of the training loss alone; see `measured`
    length_pool: ClassVar[int] = 32  # the usual one of training (config/finetuning.py)

    name: str  # a named task (tasks/named.py), or `own` for files of the user
    labels: tuple[str, ...] = ()  # by id; empty until the training file is read, and for kinds without labels
    max_length: int = TaskConfig.max_length
    metrics: tuple[str, ...] = ()
    columns: Columns = field(default_factory=Columns)

    def __post_init__(self) -> None:
        """Checks the fields. Subclasses extend it with checks of several fields."""
        check(self, "task.")
        if self.known_metrics:
            check_metric_names(self.metrics, self.known_metrics)

    @property
    def numbered_labels(self) -> tuple[str, ...]:
        """The labels that numbers in JSON lines, Parquet and prepared data stand for."""
        return ()

    @abc.abstractmethod
    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[Item]:
        """Reads a file of the task. Without label_required, a file without labels is read too.

        Raises:
            UserError: The file is malformed, at a line.
        """

    def parse(self, source: Path, records: Sequence[InputRecord]) -> Split[Item]:
        """Makes a split without labels from the inputs of predict, one item per record, in order."""
        return Split(source, tuple(self.parse_record(source, record) for record in records), labelled=False)

    @abc.abstractmethod
    def parse_record(self, source: Path, record: InputRecord) -> Item:
        """Makes an item of an input: a plain line, in which tabs separate texts, or a JSON object.

        The object's fields have the names of the task's columns, or these; other fields are ignored.

        classification, regression  text, text_pair
        tagging, spans              text, which is split into words; or tokens (and text, for offsets)
        questions                   question, context, and an optional id
        choices                     text or context, and choices: a list of texts

        An item keeps the raw text, offsets and id, which predictions report.

        Raises:
            UserError: A text is missing or empty, at a line of the source.
        """

    def has_layout(self, path: Path) -> bool:
        """Whether a file that predict would read as lines of text looks like a training file: by its header."""
        names = {name for name in (self.columns.text, self.columns.text_pair) if name and not is_number(name)}
        header = first_fields(path)
        # A single field may be a text that happens to be spelled as the column.
        return len(header) > 1 and bool(names) and names <= {*header}

    @abc.abstractmethod
    def encode(self, split: Split[Item], tokenizer: Tokenizer) -> Rows:
        """Encodes a split, which the rows keep. If it is not labelled, its items' labels are ignored.

        Raises:
            UserError: A label is unknown, at a line of the file.
        """

    @abc.abstractmethod
    def objective(self) -> TaskObjective:
        """Returns the loss of a task whose labels are known."""

    @abc.abstractmethod
    def measure(self, rows: Rows, answers: Sequence[Any]) -> dict[str, float]:
        """Computes the metrics on a labelled split, from the objective's answers, one per row."""

    @abc.abstractmethod
    def predictions(self, rows: Rows, answers: Sequence[Any]) -> list[dict[str, Any]]:
        """Makes the JSON objects that bert-jax predict prints, one per item, in order.

        An object has `label` and `score`, its probability (for a regression: the number), or `words`, `tags`,
        `entities`, `spans`, `answer` ... with `start` and `end`, characters of the raw text if the item has one. The
        command prints `scores` (of all labels by name, or the best answers to a question) only on request.
        """

    def default_metrics(self) -> tuple[str, ...]:
        """Returns the metrics if the task names none; the first one selects the best seed."""
        return self.usual_metrics

    def with_metrics(self) -> "Task":
        """Sets the default metrics if the task names none."""
        return replace(self, metrics=self.metrics or self.default_metrics())

    def complete(self, train: Split[Item]) -> "Task":
        """Adds the labels and metrics that the training file implies, unless the task names them."""
        return self.with_metrics()

    def fitted(self, rows: Rows) -> "Task":
        """Sets options that follow the encoded training file."""
        return self

    def continuing(self, start: "Task", given: TaskConfig) -> "Task":
        """Takes over options from `start`, the checkpoint's task of the same kind, unless they are given."""
        return self

    @property
    def measured(self) -> "Task":
        """The task with plain cross-entropy as its loss, so that losses compare between runs with class weights."""
        # The options of the training loss get their defaults.
        defaults: dict[str, Any] = {item.name: item.default for item in fields(self)}
        return replace(self, **{name: defaults[name] for name in self.training_options})

    def check_model(self, model: ModelConfig) -> None:
        """Raises UserError for a model that cannot learn the task."""
        if self.max_length > model.max_positions:
            raise UserError(
                f"task.max_length is {self.max_length}, but the model has {model.max_positions} positions; "
                f"use --config.task.max_length={model.max_positions}"
            )

    def describe(self, rows: Rows, training: bool = False) -> Description:
        """Counts and warns about rows.

        Raises:
            UserError: `training` is set, for the training file, and nothing can be learned from it.
        """
        return Description({}, [])

    def metric_names(self, split: Split[Item], explicit: bool = False) -> tuple[str, ...]:
        """Returns the names of all values measured on a labelled split.

        Raises:
            UserError: The split cannot have a metric; if not `explicit`, unless it is only a default.
        """
        return (*self.metrics, "task_loss")

    def baseline(self, train: Rows, rows: Rows) -> tuple[str, dict[str, float]]:
        """Returns the name of a prediction without a model, e.g. the majority class in `train`, and its metrics.

        Both are empty if the kind has none.
        """
        return "", {}

    def calibrated(self, metrics: Mapping[str, float]) -> "Task":
        """Sets thresholds from the metrics on dev, which are empty without a dev file."""
        return self


@dataclass(frozen=True)
class PooledTask(Task[Item, Rows]):
    """A task whose head reads one vector per text, pooled from its tokens (bert_jax/model/heads/basic.py)."""

    pooling: str = option("cls", choices=POOLINGS)

    def check_model(self, model: ModelConfig) -> None:
        check_pooling(self.pooling, model)
        super().check_model(model)


def with_pooling(task: Task, pooling: str) -> Task:
    """Sets a checkpoint's pooling, if the kind of task pools for a head."""
    return replace(task, pooling=pooling) if isinstance(task, PooledTask) else task


def check_pooling(pooling: str, model: ModelConfig) -> None:
    """Raises UserError for the pooling cls in a causal model, whose first token attends to itself alone."""
    if model.causal and "cls" in pool_parts(pooling):
        raise UserError(
            "task.pooling is cls, but the model is causal: the first token of a text does not attend to the "
            "others. Use --config.task.pooling=mean (or max, last, attention_dot, attention_additive)"
        )


# Loss functions of fine-tuning tasks; conventions as in bert_jax.train.losses.


def squared_error_sum(
    scores: Float[Array, "*shape"], targets: Float[Array, "*shape"], weights: Float[Array, "*shape"]
) -> Scalar:
    """Returns the weighted sum of squared errors, over sequences or tokens."""
    return (jnp.square(scores.astype(jnp.float32) - targets) * weights).sum()


def choice_sums(
    scores: Float[Array, "B S"],
    present: Bool[Array, "B S"],
    labels: Int[Array, "B"],
    weights: Float[Array, "B"],
    smoothing: float = 0.0,
) -> tuple[Scalar, Scalar]:
    """Returns the cross-entropy of the correct choice among the present ones, and `correct`.

    Source: Radford et al. 2018, section 3.3; Devlin et al. 2019, section 4.4 (SWAG).
    """
    # Absent choices get no probability. In float32, because bfloat16 sums lose digits.
    masked = jnp.where(present, scores.astype(jnp.float32), IMPOSSIBLE)
    loss, correct = classification_sums(masked, labels, weights)
    if smoothing:
        # Uniform over the present choices.
        losses = jnp.where(present, jax.nn.logsumexp(masked, axis=-1, keepdims=True) - masked, 0)
        # A filler has no choice at all.
        uniform = losses.sum(axis=-1) / jnp.maximum(present.sum(axis=-1), 1)
        loss = (1 - smoothing) * loss + smoothing * (uniform * weights).sum()
    return loss, correct


def answer_sums(
    logits: Float[Array, "B T 2"],
    possible: Bool[Array, "B T"],
    starts: Int[Array, "B"],
    ends: Int[Array, "B"],
    weights: Float[Array, "B"],
) -> tuple[Scalar, Scalar]:
    """Returns the mean of the start and end cross-entropies, and how often both positions are predicted correctly.

    The softmax is over the positions that `possible` marks. Without an answer, start and end are the position of [CLS].
    Source: Devlin et al. 2019, sections 4.2 and 4.3; google-research/bert, run_squad.py, for the mean.
    """
    masked = jnp.where(possible[..., None], logits.astype(jnp.float32), IMPOSSIBLE)
    targets = jnp.stack([starts, ends], axis=-1)
    picked = jnp.take_along_axis(masked, targets[:, None], axis=1)[:, 0]  # [B, 2]
    # Correct if no other position scores higher; accuracy has no gradient.
    right = (picked >= jax.lax.stop_gradient(masked).max(axis=1)).all(axis=-1)
    losses = (jax.nn.logsumexp(masked, axis=1) - picked).mean(axis=-1)
    return (losses * weights).sum(), (right * weights).sum()


def chain_sums(
    chain: CRF,
    logits: Float[Array, "B T C"],
    tags: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    sequence_ids: Int[Array, "B T"],
    allowed: Allowed | None = None,
) -> tuple[Scalar, Scalar]:
    """Returns the negative log-likelihood of the tags under a linear-chain CRF, and `correct` for the best path.

    Weights are 0 or 1. A sequence's chain consists of its positions with weight 1, in order; the loss divided by their
    number is comparable with classification_sums. The tags must be allowed. Source: Lafferty et al. 2001; Lample et al.
    2016, section 2.2.
    """
    # Positions without a tag (special tokens, further pieces of a word) are no links of the chain.
    tagged = weights > 0
    loss = chain.log_partition(logits, tagged, sequence_ids, allowed)
    loss -= chain.score(logits, tags, tagged, sequence_ids, allowed)
    # Decoding only measures accuracy, which has no gradient.
    best, _ = chain.decode(jax.lax.stop_gradient(logits), tagged, sequence_ids, allowed)
    return loss.sum(), ((best == tags) * weights).sum()


def span_sums(
    logits: Float[Array, "B T K C"], labels: Int[Array, "B T K"], weights: Float[Array, "B T K"]
) -> tuple[Scalar, Scalar]:
    """Returns the cross-entropy and `correct` over all spans up to the maximum length K.

    With C = 1 the loss is binary: span or no span. With C > 1 it is a softmax over span classes, of which class 0 is
    NULL. Weights are 0 for spans that cross sequences (structured.possible_spans). Source: Jurafsky and Martin, Speech
    and Language Processing, 3rd edition, "Fine-tuning for Span-Based Applications".
    """
    if logits.shape[-1] == 1:
        return binary_sums(logits[..., 0], labels, weights)
    return classification_sums(logits, labels, weights)


# Targets of about this size, such as the scores of STS-B (0 to 5), are learned as they are. Others are standardized, so
# that numbers of any size are learned at the usual learning rates: if the mean or the deviation is above LARGE, the
# deviation below SMALL, or the mean more than LARGE deviations.
LARGE, SMALL = 10.0, 0.1


@dataclass(frozen=True)
class ScaledTask(ScaledTargets, Task[Item, Rows]):
    """A regression whose head and loss predict (target - target_mean) / target_std.

    Metrics and predictions are in the files' units, in float64.
    """

    target_mean: float = 0.0  # of the training file; 0 and 1 without scaling
    target_std: float = 1.0

    def scaled(self, targets: Sequence[float] | np.ndarray) -> "ScaledTask[Item, Rows]":
        """Sets the targets' mean and deviation, if scale_targets asks for it."""
        values = np.asarray(targets, np.float64)
        mean, deviation = float(values.mean()), float(values.std())
        small = 0 < deviation < max(SMALL, abs(mean) / LARGE)
        usual = max(abs(mean), deviation) <= LARGE and not small
        if self.scale_targets == "no" or (self.scale_targets == "auto" and usual):
            return self
        # Equal targets have no deviation by which they could be divided.
        return replace(self, target_mean=mean, target_std=deviation or 1.0)

    @property
    def scale(self) -> tuple[float, float]:
        """The mean and the deviation by which targets are standardized."""
        return self.target_mean, self.target_std

    def in_units(self, outputs: Float[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
        """Converts the objective's answers to the files' units."""
        return self.target_mean + self.target_std * outputs.astype(np.float64)

    def describe(self, rows: Rows, training: bool = False) -> Description:
        """Also reports the scale of training."""
        description = super().describe(rows, training)
        if training and self.scale != NO_SCALE:
            description.remarks.append(
                f"{rows.split.path}: training standardizes the numbers (mean {self.target_mean:g}, deviation "
                f"{self.target_std:g}); metrics and predictions have the units of the file"
            )
        return description


@dataclass(frozen=True)
class ScaledObjective(TaskObjective):
    """The squared error of standardized numbers; outputs have the labels' shape."""

    @property
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        return {"task": ()}

    def loss_terms(self, model: Bert, outputs: Float[Array, "*shape"], batch: TaskBatch) -> Terms:
        return {"task": Term(squared_error_sum(outputs, batch.labels, batch.label_weights), {})}

    def soft_sum(
        self, outputs: Float[Array, "*shape"], teacher: Float[Array, "*shape"], batch: TaskBatch, temperature: float
    ) -> Scalar:
        return squared_difference_sum(outputs, teacher, batch.label_weights)
