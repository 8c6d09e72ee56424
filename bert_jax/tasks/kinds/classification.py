"""Classes, scores and label sets for texts and pairs.

Read `TextTask` first, which the three kinds share, then `ClassificationTask`, `RegressionTask` and `MultiLabelTask`.
"""

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Int64, Shaped
from scipy.special import expit, logit, softmax

from bert_jax.config.finetuning import ClassificationOptions, LayerMix, MultiLabelOptions, RegressionOptions, Truncation
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import class_logits
from bert_jax.tasks.labels import LabelTask, NamedLabelsTask, parse_number, shown_labels
from bert_jax.tasks.metrics import (
    CLASSIFICATION_METRICS,
    LARGEST,
    MULTILABEL_METRICS,
    OF_ONE_CLASS,
    REGRESSION_METRICS,
    SCORED_METRICS,
    UNDEFINED_OF_ONE,
    Metric,
    best_threshold,
    check_metric_names,
    classification_metrics,
    compute_metrics,
    multilabel_metrics,
)
from bert_jax.tasks.reading import labelled, tables
from bert_jax.tasks.reading.inputs import InputRecord, read_value, record_texts
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.rows import IGNORED, Example, LabelledRows, LabelSet, Split, TaskBatch, encode_pairs, encode_windows
from bert_jax.tasks.task import (
    Description,
    PooledTask,
    ScaledObjective,
    ScaledTask,
    SoftClassObjective,
    Task,
    TaskObjective,
    pooled_vectors,
)
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train import losses
from bert_jax.train.losses import PLAIN, ClassCosts, Scalar
from bert_jax.train.objectives import Counts, Term, Terms

WINDOWS = ("windows", "windows_max")  # the values of task.truncation that make several rows of a long text


@dataclass(frozen=True)
class TextTask(LayerMix, Truncation, PooledTask[Example, LabelledRows]):
    """A task whose labels belong to a whole text or pair."""

    known_metrics: ClassVar[Mapping[str, Metric]]
    label_dtype: ClassVar[type[np.generic]]

    @abc.abstractmethod
    def label_value(self, split: Split[Example], line: int, label: str) -> int | float:
        """A label's class id or score. Raises UserError, with file and line, for an invalid label."""

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[Example]:
        if tables.kind_of_file(path) != "table":
            other = "question" if tables.kind_of_file(path) == "squad" else "tagging"
            raise UserError(f"{path} is a {other} file, but the task is {self.kind}. Use --config.task={other}")
        return labelled.read_table(path, columns, label_required, self.numbered_labels)

    def parse(self, source: Path, records: Sequence[InputRecord]) -> Split[Example]:
        """Texts or pairs, like the training data; if the checkpoint does not record this, the first record decides."""
        split = super().parse(source, records)
        first = split.items[0]
        for item in split.items:
            if (item.text_pair is None) != (first.text_pair is None):
                kinds = ("one text", "a pair") if item.text_pair is None else ("a pair", "one text")
                raise UserError(
                    f"{source} line {item.line} is {kinds[0]}, but line {first.line} is {kinds[1]}. Give texts or "
                    "pairs, not both"
                )
        return split

    def parse_record(self, source: Path, record: InputRecord) -> Example:
        columns = self.columns
        names = [(columns.text, "text"), (columns.text_pair, "text_pair")]
        # The task is known to be of single texts.
        if columns.text and not columns.text_pair:
            names.pop()
        texts = record_texts(source, record, names, needed=2 if columns.text_pair else 1)
        if columns.marks and isinstance(record.content, Mapping):
            borders = [read_value(source, record, (name,)) for name in columns.marks]
            texts = labelled.mark_words(source, record.line, texts, borders)
        return Example(texts[0], texts[1] if len(texts) > 1 else None, None, record.line)

    def encode(self, split: Split[Example], tokenizer: Tokenizer) -> LabelledRows:
        """One row per example: [CLS] text [SEP], or [CLS] text [SEP] pair [SEP] with the pair in segment 1.

        Some vocabularies put two separators between the texts. A row over max_length loses pieces of its longer text
        (encode_pairs); with windows, such an example has several rows (encode_windows), whose weights sum to 1.
        """
        # All items are texts, or all are pairs: the column decides in a file, and `parse` checks other inputs.
        paired = split.items[0].text_pair is not None
        texts = [example.text for example in split.items]
        seconds = [example.text_pair or "" for example in split.items] if paired else None
        labels, row_items = self.targets(split), None
        weights = np.full(len(texts), float(split.labelled), np.float32)
        if self.truncation in WINDOWS:
            encoded, cut, items = encode_windows(texts, seconds, tokenizer, self.max_length)
            # Windows share the weight of their example, so that a long text trains the model no more than a short one.
            labels, weights = labels[items], (weights / np.bincount(items))[items].astype(np.float32)
            row_items = tuple(items.tolist())
        else:
            encoded, cut = encode_pairs(texts, seconds, tokenizer, self.max_length, self.truncation)
        return LabelledRows(
            **encoded._asdict(),
            labels=labels,
            label_weights=weights,
            pad_id=tokenizer.pad_id,
            truncated=int(cut.sum()),
            split=split,
            row_items=row_items,
        )

    def by_item(self, rows: LabelledRows, values: Float[np.ndarray, "R *shape"]) -> Float[np.ndarray, "K *shape"]:
        """Returns the mean, or with windows_max the maximum, over each item's windows."""
        if rows.row_items is None or rows.count == len(rows.split.items):
            return values
        if self.truncation == "windows_max":
            return np.maximum.reduceat(values, rows.first_rows, axis=0)
        # One divisor for each item, which is broadcast over the classes.
        counts = np.bincount(rows.items()).reshape(-1, *[1] * (values.ndim - 1))
        return np.add.reduceat(values, rows.first_rows, axis=0) / counts

    def targets(self, split: Split[Example]) -> Shaped[np.ndarray, "R *shape"]:
        """Returns each text's class or score; 0 without labels."""
        if not split.labelled:
            return np.zeros(len(split.items), self.label_dtype)
        values = [self.label_value(split, example.line, example.label or "") for example in split.items]
        return np.array(values, self.label_dtype)

    def describe(self, rows: LabelledRows, training: bool = False) -> Description:
        """Counts empty_texts, texts that are empty or white space, a pair once."""
        split = rows.split
        empty = sum(
            not item.text.strip() or (item.text_pair is not None and not item.text_pair.strip()) for item in split.items
        )
        examples = len(split.items)
        remarks = [f"{split.path}: {empty} of {examples} examples have an empty text"] if empty else []
        if (long := int((np.bincount(rows.items()) > 1).sum())) and rows.row_items:
            remarks.append(
                # All other examples have one row each.
                f"{split.path}: {long} of {examples} examples are longer than task.max_length={self.max_length} "
                f"tokens, and have {rows.count - examples + long} windows"
            )
        return Description({"empty_texts": empty}, remarks + (self.constant_labels(rows) if split.labelled else []))

    def constant_labels(self, rows: LabelledRows) -> list[str]:
        """Warns if all labels are equal, and names the metrics that this leaves undefined."""
        if not (rows.labels == rows.labels[0]).all():
            return []
        undefined = " and ".join(name for name in self.metrics if name in UNDEFINED_OF_ONE)
        effect = f", so {undefined} is undefined" if undefined else ""
        return [f"{rows.split.path}: every label is {rows.split.items[0].label!r}{effect}"]


@dataclass(frozen=True)
class ClassificationTask(ClassificationOptions, LabelTask[Example, LabelledRows], TextTask):
    """One class per text or pair."""

    kind = "classification"
    known_metrics = CLASSIFICATION_METRICS
    label_dtype = np.int32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positive and self.labels and self.positive not in self.labels:
            raise UserError(
                f"task.positive is {self.positive!r}, which is not a label of the task: {shown_labels(self.labels)}"
            )
        of_one = [name for name in self.metrics if name in OF_ONE_CLASS]
        if of_one and len(self.labels) > 2 and not self.positive:
            raise UserError(
                f"the metric {of_one[0]} is of one class, but the task has {len(self.labels)} labels: "
                f"{shown_labels(self.labels)}. Use macro_f1 or weighted_f1, or name the class: "
                f"--config.task.positive={self.labels[1]} (in evaluate: --positive)"
            )

    def labels_in(self, split: Split[Example]) -> set[str]:
        return {example.label for example in split.items if example.label is not None}

    def replace_labels(self, split: Split[Example], names: Mapping[str, str]) -> Split[Example]:
        items = (item._replace(label=item.label and names.get(item.label, item.label)) for item in split.items)
        return replace(split, items=tuple(items))

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[Example]:
        """As TextTask.read. Raises UserError for the label IGNORED where labels are required; elsewhere it is none."""
        split = super().read(path, columns, label_required)
        ignored = [item.line for item in split.items if item.label == IGNORED] if IGNORED not in self.labels else []
        if not ignored:
            return split
        if label_required:
            raise UserError(
                f"{path} line {ignored[0]} has the label {IGNORED}, which stands for none, as {len(ignored)} lines "
                "have. Remove them"
            )
        items = (item._replace(label=None) if item.label == IGNORED else item for item in split.items)
        return replace(split, items=tuple(items), labelled=len(ignored) < len(split.items))

    def complete(self, train: Split[Example]) -> Task:
        """Also sets the class weights.

        Labels are in the order in which the file names its classes; otherwise sorted, whole numbers first and in
        numerical order. Raises UserError for fewer than two labels, and for so many that the column is likely wrong.
        """
        task = self
        if not task.labels:
            labels = {example.label or "" for example in train.items}
            if len(labels) < 2:
                raise UserError(f"{train.path}: every label is {labels.pop()!r}; classification needs two or more")
            # A column of texts or numbers has nearly as many values as lines.
            if len(labels) > max(50, len(train.items) // 2):
                raise UserError(
                    f"{train.path} has {len(labels)} different labels in {len(train.items)} lines; is task.label "
                    f"{task.columns.label!r} the right column? For numbers use --config.task=regression"
                )
            # The file may name classes that none of its lines has.
            named = labels <= set(train.class_names)
            task = replace(task, labels=train.class_names if named else tuple(sorted(labels, key=_label_order)))
        weights = task.compute_class_weights(train, (example.label or "" for example in train.items))
        return replace(task, class_weight_values=weights).with_metrics()

    def default_metrics(self) -> tuple[str, ...]:
        # f1 is of one class: the given one, or 1 of 0 and 1, as in GLUE.
        return ("accuracy", "f1") if self.positive or self.labels == ("0", "1") else ("accuracy", "macro_f1")

    def objective(self) -> TaskObjective:
        return ClassObjective(len(self.labels), self.pooling, self.layer_mix, self.costs)

    def measure(self, rows: LabelledRows, answers: Sequence[np.ndarray]) -> dict[str, float]:
        """Computes the metrics from logits f32[C] by row."""
        functions = self.known_metrics
        if self.positive:
            # f1, precision and recall of this class instead of class 1.
            functions = {**functions, **classification_metrics(self.labels.index(self.positive))}
        shares, predicted = self._shares(rows, answers)
        check_metric_names(self.metrics, functions)
        return {
            name: float(functions[name](rows.item_labels, shares if name in SCORED_METRICS else predicted))
            for name in self.metrics
        }

    def baseline(self, train: LabelledRows, rows: LabelledRows) -> tuple[str, dict[str, float]]:
        # As logits, whose softmax gives each class its share. The small number keeps a class without rows finite.
        counts = np.bincount(train.labels.astype(int), minlength=len(self.labels))
        return "majority class", self.measure(rows, [np.log(counts + 1e-9)] * rows.count)

    def predictions(self, rows: LabelledRows, answers: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """`label`, `score` (its probability) and all `scores` by label."""
        predictions = []
        for shares in self._shares(rows, answers)[0]:
            best = int(shares.argmax())
            scores = dict(zip(self.labels, shares.tolist(), strict=True))
            predictions.append({"label": self.labels[best], "score": float(shares[best]), "scores": scores})
        return predictions

    def _shares(
        self, rows: LabelledRows, answers: Sequence[np.ndarray]
    ) -> tuple[Float[np.ndarray, "K C"], Int64[np.ndarray, "K"]]:
        """Computes each item's probabilities and its most probable class."""
        scores = np.stack(answers).astype(np.float64)
        shares = self.by_item(rows, softmax(scores, axis=-1))
        if len(shares) == len(scores):
            # By the logits, because the softmax may round two of them to equal probabilities.
            return shares, scores.argmax(axis=-1)
        # The maxima of windows do not sum to 1.
        return shares / shares.sum(axis=-1, keepdims=True), shares.argmax(axis=-1)


@dataclass(frozen=True)
class RegressionTask(RegressionOptions, ScaledTask[Example, LabelledRows], TextTask):
    """One score per text or pair."""

    kind = "regression"
    known_metrics = REGRESSION_METRICS
    usual_metrics = ("pearson", "spearman")
    label_dtype = np.float64

    def complete(self, train: Split[Example]) -> Task:
        scores = [self.label_value(train, example.line, example.label or "") for example in train.items]
        return self.scaled(scores).with_metrics()

    def encode(self, split: Split[Example], tokenizer: Tokenizer) -> LabelledRows:
        return replace(super().encode(split, tokenizer), scale=self.scale)

    def label_value(self, split: Split[Example], line: int, label: str) -> float:
        # parse_number returns infinity for other texts, and NaN compares as false.
        value = parse_number(label)
        if not abs(value) <= LARGEST:
            raise UserError(f"{split.path} line {line}: {label!r} is not a number, but the task is a regression")
        return value

    def objective(self) -> TaskObjective:
        return RegressionObjective(1, self.pooling, self.layer_mix)

    def measure(self, rows: LabelledRows, answers: Sequence[Any]) -> dict[str, float]:
        """Computes the metrics from one standardized score by row."""
        numbers = self.by_item(rows, self.in_units(np.stack(answers)))
        return compute_metrics(self.known_metrics, self.metrics, rows.item_labels, numbers)

    def baseline(self, train: LabelledRows, rows: LabelledRows) -> tuple[str, dict[str, float]]:
        # measure expects answers as the model gives them, standardized.
        mean = (np.mean(train.labels, dtype=np.float64) - self.target_mean) / self.target_std
        return "mean", self.measure(rows, [mean] * rows.count)

    def predictions(self, rows: LabelledRows, answers: Sequence[Any]) -> list[dict[str, Any]]:
        """`score`, the number."""
        return [{"score": float(value)} for value in self.by_item(rows, self.in_units(np.stack(answers)))]


@dataclass(frozen=True)
class TextObjective(TaskObjective):
    """Outputs from one vector per text: what the three objectives share."""

    classes: int
    pooling: str = "cls"
    layer_mix: bool = False

    @property
    def heads(self) -> Heads:
        return Heads(pooling=self.pooling, pooler=True, classes=self.classes, layer_mix=self.layer_mix)

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B C"]:
        return class_logits(model, pooled_vectors(model, batch, dropout_key), dropout_key)[:, 0]


@dataclass(frozen=True)
class ClassObjective(TextObjective, SoftClassObjective):
    """Cross-entropy of classes (Devlin et al. 2019, section 4)."""

    costs: ClassCosts = PLAIN

    def loss_terms(self, model: Bert, outputs: Float[Array, "B C"], batch: TaskBatch) -> Terms:
        loss, correct = losses.classification_sums(outputs, batch.labels, batch.label_weights, self.costs)
        return {"task": Term(loss, {"accuracy": correct})}

    def counts(self, batch: TaskBatch) -> Counts:
        # Class weights are part of the denominator, too (ClassCosts).
        return {"task": self.costs.weigh(batch.labels, batch.label_weights).sum()}


@dataclass(frozen=True)
class RegressionObjective(ScaledObjective, TextObjective):
    """The squared error of a score (Devlin et al. 2019, section 4)."""

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B"]:
        return super().outputs(model, batch, dropout_key)[:, 0]


def _label_order(label: str) -> tuple[float, str]:
    """The key that sorts whole numbers first and in numerical order, then other labels."""
    return (float(int(label)), label) if label.removeprefix("-").isdecimal() else (math.inf, label)


UNCALIBRATED = 0.5
THRESHOLD = "threshold/"  # the prefix of the metrics that are the thresholds found on dev


@dataclass(frozen=True)
class MultiLabelTask(MultiLabelOptions, NamedLabelsTask[Any, LabelledRows], TextTask):
    """Any number of classes per text or pair, predicted independently."""

    kind = "multilabel"
    known_metrics = MULTILABEL_METRICS
    usual_metrics = ("micro_f1", "macro_f1", "auroc")

    thresholds: tuple[float, ...] = ()  # by label id, with the best F1 of each label on dev; empty until calibrated

    def labels_in(self, split: Split[Any]) -> set[str]:
        return {label for item in split.items if isinstance(item, LabelSet) for label in item.labels or ()}

    def replace_labels(self, split: Split[Any], names: Mapping[str, str]) -> Split[Any]:
        items = (
            # Two labels of a text may become the same one.
            item._replace(labels=item.labels and tuple(dict.fromkeys(names.get(label, label) for label in item.labels)))
            for item in split.items
        )
        return replace(split, items=tuple(items))

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[Any]:
        if tables.kind_of_file(path) != "table":
            raise UserError(f"{path} is not a table, but the task is {self.kind}. Give TSV, CSV, JSON lines or Parquet")
        return labelled.read_label_sets(path, columns, label_required, self.numbered_labels)

    def complete(self, train: Split[Any]) -> Task:
        """Labels are in the order in which the file names columns or classes; otherwise sorted.

        Raises UserError for fewer than two labels.
        """
        task = self
        if not task.labels:
            labels = self.labels_in(train)
            # Columns of 1 and 0 are the labels themselves.
            columns = tuple(name.strip() for name in self.columns.label.split(","))
            named = next((names for names in (train.class_names, columns) if labels <= set(names)), None)
            task = replace(task, labels=named or tuple(sorted(labels, key=_label_order)))
        if len(task.labels) < 2:
            raise UserError(
                f"{train.path} has the labels {list(task.labels)}; a multilabel task needs two or more. For one label "
                "that a text has or not, use --config.task=classification"
            )
        return task.with_metrics()

    def targets(self, split: Split[Any]) -> Int32[np.ndarray, "R C"]:
        """1 if a text has the label."""
        targets = np.zeros((len(split.items), len(self.labels)), np.int32)
        for row, item in enumerate(split.items if split.labelled else ()):
            targets[row, [self.label_value(split, item.line, label) for label in item.labels or ()]] = 1
        return targets

    def describe(self, rows: LabelledRows, training: bool = False) -> Description:
        """Also counts labels, and warns if no text of the training file has several."""
        description = super().describe(rows, training)
        if training and rows.labels.sum(axis=1).max() < 2:
            description.remarks.append(
                f"{rows.split.path}: no text has more than one label. Separate labels by commas, or use "
                "--config.task=classification if each text has one"
            )
        return description._replace(counts=description.counts | {"labels": int(rows.item_labels.sum())})

    def constant_labels(self, rows: LabelledRows) -> list[str]:
        """Warns about labels that no text has, or every one."""
        constant = [self.labels[index] for index in np.flatnonzero(np.ptp(rows.labels, axis=0) == 0)]
        shown = ", ".join(constant[:5]) + (" ..." if len(constant) > 5 else "")
        return [f"{rows.split.path}: no text or every text has {shown}, so its AUROC is left out"] if constant else []

    def objective(self) -> TaskObjective:
        return MultiLabelObjective(len(self.labels), self.pooling, self.layer_mix)

    def measure(self, rows: LabelledRows, answers: Sequence[np.ndarray]) -> dict[str, float]:
        """Computes the metrics from logits f32[C] by row.

        If the task has no thresholds yet, they are calibrated on these rows and returned as `threshold/LABEL`.
        """
        shares, labels = self.by_item(rows, expit(np.stack(answers).astype(np.float64))), rows.item_labels > 0
        if self.threshold or self.thresholds:
            return multilabel_metrics(self.metrics, labels, shares, shares >= self._thresholds())
        # Each label has its own threshold, because rare labels usually get lower probabilities.
        columns = zip(shares.T, labels.T, strict=True)
        thresholds = [best_threshold(scores, true, int(true.sum())) for scores, true in columns]
        metrics = multilabel_metrics(self.metrics, labels, shares, shares >= np.array(thresholds))
        return metrics | dict(zip(self._calibrated_names(), thresholds, strict=True))

    def baseline(self, train: LabelledRows, rows: LabelledRows) -> tuple[str, dict[str, float]]:
        # A label that all texts have, or none, has an infinite logit, which measure turns into a probability of 1 or 0.
        task = replace(self, thresholds=(UNCALIBRATED,) * len(self.labels))
        return "majority of each label", task.measure(rows, [logit(train.labels.mean(axis=0))] * rows.count)

    def calibrated(self, metrics: Mapping[str, float]) -> "MultiLabelTask":
        """The task with the thresholds that are best on dev; 1/2 without a dev file."""
        values = tuple(metrics.get(name, UNCALIBRATED) for name in self._calibrated_names())
        return replace(self, thresholds=values) if values else self

    def metric_names(self, split: Split[Any], explicit: bool = False) -> tuple[str, ...]:
        return (*self.metrics, *self._calibrated_names(), "task_loss")

    def predictions(self, rows: LabelledRows, answers: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """`labels`, the predicted ones, `label_scores`, their probabilities, and all `scores` by label."""
        predictions = []
        for shares in self.by_item(rows, expit(np.stack(answers).astype(np.float64))):
            chosen = np.flatnonzero(shares >= self._thresholds())
            predictions.append(
                {
                    "labels": [self.labels[index] for index in chosen],
                    "label_scores": shares[chosen].tolist(),
                    "scores": dict(zip(self.labels, shares.tolist(), strict=True)),
                }
            )
        return predictions

    def _calibrated_names(self) -> tuple[str, ...]:
        """The names of the thresholds in the metrics; none if the task has thresholds already."""
        return () if self.threshold or self.thresholds else tuple(THRESHOLD + label for label in self.labels)

    def _thresholds(self) -> Float[np.ndarray, "C"]:
        return np.array(self.thresholds or (self.threshold or UNCALIBRATED,) * len(self.labels))


@dataclass(frozen=True)
class MultiLabelObjective(TextObjective):
    """The mean binary cross-entropy over labels (torch's BCEWithLogitsLoss).

    `accuracy` counts decisions at a probability of 1/2.
    """

    def loss_terms(self, model: Bert, outputs: Float[Array, "B C"], batch: TaskBatch) -> Terms:
        loss, correct = losses.binary_sums(outputs, batch.labels, self._weights(batch))
        return {"task": Term(loss, {"accuracy": correct})}

    def soft_sum(
        self, outputs: Float[Array, "B C"], teacher: Float[Array, "B C"], batch: TaskBatch, temperature: float
    ) -> Scalar:
        return losses.soft_binary_sum(outputs, teacher, self._weights(batch), temperature)

    def _weights(self, batch: TaskBatch) -> Float[Array, "B C"]:
        return jnp.broadcast_to(batch.label_weights[:, None], batch.labels.shape) / self.classes
