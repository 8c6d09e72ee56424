"""Classes, scores and sets of labels of texts and pairs of texts.

Read `TextTask` first, which the three kinds share, then `ClassificationTask`, `RegressionTask` and `MultiLabelTask`.
"""

import abc
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Shaped
from scipy.special import expit, softmax

from bert_jax.config import TaskConfig
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import class_logits
from bert_jax.tasks.labels import LabelTask, NamedLabelsTask, check_label, header_remarks, parse_number, shown_labels
from bert_jax.tasks.metrics import (
    CLASSIFICATION_METRICS,
    LARGEST,
    MULTILABEL_METRICS,
    REGRESSION_METRICS,
    UNDEFINED_OF_ONE,
    Metric,
    best_threshold,
    classification_metrics,
    compute_metrics,
    multilabel_metrics,
)
from bert_jax.tasks.reading import labelled, tables
from bert_jax.tasks.reading.inputs import InputRecord, texts_of, value_of
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.rows import Example, LabelledRows, LabelSet, Split, TaskBatch, encode_pairs
from bert_jax.tasks.task import PooledTask, ScaledTask, Task, TaskObjective, pooled_vectors, squared_error_sum
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train.losses import (
    PLAIN,
    ClassCosts,
    Scalar,
    binary_sums,
    classification_sums,
    soft_binary_sum,
    soft_class_sum,
    squared_difference_sum,
)
from bert_jax.train.objectives import Counts, Term, Terms


@dataclass(frozen=True)
class TextTask(PooledTask[Example, LabelledRows]):
    """A task with one label for each text or pair of texts: what classification and regression share.

    layer_mix: whether the text's vector is that of a learned mix of all layers (Peters et al. 2018, section 3.2).
    """

    metric_functions: ClassVar[Mapping[str, Metric]]
    label_dtype: ClassVar[type[np.generic]]

    layer_mix: bool = TaskConfig.layer_mix

    @property
    def known_metrics(self) -> Collection[str]:
        return self.metric_functions

    @property
    def numbered_labels(self) -> tuple[str, ...]:
        """The labels that numbers in JSON lines, Parquet and prepared data stand for."""
        return ()

    @abc.abstractmethod
    def label_value(self, split: Split[Example], line: int, label: str) -> int | float:
        """The class id or the score that a label means. Raises UserError, with file and line, for an invalid label."""

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[Example]:
        if tables.kind_of_file(path) != "table":
            other = "question" if tables.kind_of_file(path) == "squad" else "tagging"
            raise UserError(f"{path} is a {other} file, but the task is {self.kind}. Use --config.task.kind={other}")
        return labelled.read_table(path, columns, label_required, self.numbered_labels)

    def parse(self, source: Path, records: Sequence[InputRecord]) -> Split[Example]:
        """Texts, or pairs if the task is of pairs; if the checkpoint does not record this, the first record decides."""
        columns = self.columns
        names = [(columns.text, "text"), (columns.text_pair, "text_pair")]
        needed = 2 if columns.text_pair else 1
        if columns.text and not columns.text_pair:
            names.pop()
        items: list[Example] = []
        for record in records:
            first, *second = texts_of(source, record, names, needed)
            if columns.marks and not isinstance(record.content, str):
                borders = [value_of(source, record, (name,)) for name in columns.marks]
                first, *second = labelled.mark_words(source, record.line, (first, *second), borders)
            items.append(Example(first, second[0] if second else None, None, record.line))
            if bool(second) != (items[0].text_pair is not None):
                raise UserError(
                    f"{source} line {record.line} is {'a pair' if second else 'one text'}, but line {items[0].line} is "
                    f"{'one text' if second else 'a pair'}. Give texts or pairs, not both"
                )
        return Split(source, tuple(items), labelled=False)

    def encode(self, split: Split[Example], tokenizer: Tokenizer) -> LabelledRows:
        """One row for each example: [CLS] text [SEP], or [CLS] text [SEP] pair [SEP] with the pair in segment 1.

        Some vocabularies put two separators between the texts. A row over max_length loses pieces from the
        end of its longer text (truncated_lengths).
        """
        paired = split.items[0].text_pair is not None
        seconds = [example.text_pair or "" for example in split.items] if paired else None
        encoded, cut = encode_pairs([example.text for example in split.items], seconds, tokenizer, self.max_length)
        count = len(split.items)
        return LabelledRows(
            **encoded._asdict(),
            labels=self.targets(split),
            label_weights=np.full(count, float(split.labelled), np.float32),
            pad_id=tokenizer.pad_id,
            truncated=int(cut.sum()),
            split=split,
        )

    def targets(self, split: Split[Example]) -> Shaped[np.ndarray, "R *shape"]:
        """The class or the score of each text; 0 without labels."""
        if not split.labelled:
            return np.zeros(len(split.items), self.label_dtype)
        values = [self.label_value(split, example.line, example.label or "") for example in split.items]
        return np.array(values, self.label_dtype)

    def counts(self, rows: LabelledRows) -> dict[str, int]:
        """empty_texts: texts that are empty or white space, counting a pair once."""
        return {"empty_texts": sum(_is_empty(example) for example in rows.split.items)}

    def remarks(self, rows: LabelledRows) -> list[str]:
        found = []
        if empty := self.counts(rows)["empty_texts"]:
            found.append(f"{rows.split.path}: {empty} of {rows.count} examples have an empty text")
        return found + (self.same_labels(rows) if rows.split.labelled else [])

    def same_labels(self, rows: LabelledRows) -> list[str]:
        if not (rows.labels == rows.labels[0]).all():
            return []
        undefined = [name for name in self.metrics if name in UNDEFINED_OF_ONE]
        what = f", so {' and '.join(undefined)} is undefined" if undefined else ""
        return [f"{rows.split.path}: every label is {rows.split.items[0].label!r}{what}"]


@dataclass(frozen=True)
class ClassificationTask(LabelTask[Example, LabelledRows], TextTask):
    """One class for each text or pair of texts.

    positive: the label that f1, precision and recall are of; empty: the second one.
    """

    kind = "classification"
    metric_functions = CLASSIFICATION_METRICS
    label_dtype = np.int32

    positive: str = TaskConfig.positive

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positive and self.labels and self.positive not in self.labels:
            raise UserError(
                f"task.positive is {self.positive!r}, which is not a label of the task: {shown_labels(self.labels)}"
            )

    def labels_in(self, split: Split[Example]) -> set[str]:
        return {example.label for example in split.items if example.label is not None}

    def replace_labels(self, split: Split[Example], names: Mapping[str, str]) -> Split[Example]:
        items = (one._replace(label=one.label and names.get(one.label, one.label)) for one in split.items)
        return replace(split, items=tuple(items))

    def complete(self, train: Split[Example]) -> Task:
        """The task with the labels, class weights and metrics that its training file implies.

        Labels are in the order of the classes that the file names; otherwise sorted, whole numbers first and in
        numerical order. Raises UserError for fewer than two labels, and for so many that the column is likely wrong.
        """
        task = self
        if not task.labels:
            found = {example.label or "" for example in train.items}
            if len(found) < 2:
                raise UserError(f"{train.path}: every label is {found.pop()!r}; classification needs two or more")
            if len(found) > max(50, len(train.items) // 2):
                raise UserError(
                    f"{train.path} has {len(found)} different labels in {len(train.items)} lines; is task.label "
                    f"{task.columns.label!r} the right column? For numbers use --config.task.kind=regression"
                )
            named = found <= set(train.class_names)
            task = replace(task, labels=train.class_names if named else tuple(sorted(found, key=label_order)))
        weights = task.weights_of(train, (example.label or "" for example in train.items))
        return replace(task, class_weight_values=weights).with_metrics()

    def default_metrics(self) -> tuple[str, ...]:
        return ("accuracy", "f1") if self.positive or self.labels == ("0", "1") else ("accuracy", "macro_f1")

    def training_remarks(self, rows: LabelledRows) -> list[str]:
        return header_remarks(self, rows.split)

    def label_value(self, split: Split[Example], line: int, label: str) -> int:
        return check_label(split, line, label, self.labels)

    def objective(self) -> TaskObjective:
        return ClassObjective(len(self.labels), pooling=self.pooling, costs=self.costs, layer_mix=self.layer_mix)

    def measure(self, rows: LabelledRows, answers: Sequence[np.ndarray]) -> dict[str, float]:
        """The metrics, from the logits f32[C] of each row."""
        functions = self.metric_functions
        if self.positive:
            functions = {**functions, **classification_metrics(self.labels.index(self.positive))}
        return compute_metrics(functions, self.metrics, rows.labels, np.stack(answers).argmax(axis=-1))

    def predictions(self, rows: LabelledRows, answers: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """`label`, `score` (its probability) and `scores` of all labels."""
        found = []
        for shares in softmax(np.stack(answers).astype(np.float64), axis=-1):
            best = int(shares.argmax())
            scores = {label: float(share) for label, share in zip(self.labels, shares, strict=True)}
            found.append({"label": self.labels[best], "score": float(shares[best]), "scores": scores})
        return found


@dataclass(frozen=True)
class RegressionTask(ScaledTask[Example, LabelledRows], TextTask):
    """One score for each text or pair of texts."""

    kind = "regression"
    metric_functions = REGRESSION_METRICS
    has_labels = False
    label_dtype = np.float32

    def complete(self, train: Split[Example]) -> Task:
        scores = [self.label_value(train, example.line, example.label or "") for example in train.items]
        return self.with_scale_of(scores).with_metrics()

    def default_metrics(self) -> tuple[str, ...]:
        return ("pearson", "spearman")

    def label_value(self, split: Split[Example], line: int, label: str) -> float:
        value = parse_number(label)
        if not abs(value) <= LARGEST:
            raise UserError(f"{split.path} line {line}: {label!r} is not a number, but the task is a regression")
        return value

    def objective(self) -> TaskObjective:
        scale = self.target_mean, self.target_std
        return ClassObjective(1, regression=True, pooling=self.pooling, layer_mix=self.layer_mix, scale=scale)

    def measure(self, rows: LabelledRows, answers: Sequence[np.ndarray]) -> dict[str, float]:
        """The metrics, from the score f32[1] of each row."""
        return compute_metrics(self.metric_functions, self.metrics, rows.labels, np.stack(answers)[:, 0])

    def predictions(self, rows: LabelledRows, answers: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """`score`, the number."""
        return [{"score": float(value)} for value in np.stack(answers)[:, 0]]


@dataclass(frozen=True)
class TextObjective(TaskObjective):
    """The logits of one vector for each text: what the objectives of the three kinds share."""

    classes: int
    pooling: str = "cls"
    layer_mix: bool = False

    @property
    def heads(self) -> Heads:
        return Heads(pooling=self.pooling, pooler=True, classes=self.classes, layer_mix=self.layer_mix)

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B C"]:
        """Logits of classes or labels, or the standardized score (C = 1)."""
        return class_logits(model, pooled_vectors(model, batch, dropout_key), dropout_key)[:, 0]


@dataclass(frozen=True)
class ClassObjective(TextObjective):
    """Cross-entropy of classes, or the squared error of a score (Devlin et al. 2019, section 4).

    scale: of a regression, the mean and the deviation by which scores are standardized in outputs and loss.
    """

    regression: bool = False
    costs: ClassCosts = PLAIN
    scale: tuple[float, float] = (0.0, 1.0)

    @property
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        return {"task": () if self.regression else ("accuracy",)}

    def terms_of(self, model: Bert, outputs: Float[Array, "B C"], batch: TaskBatch) -> Terms:
        if self.regression:
            mean, deviation = self.scale
            targets = (batch.labels - mean) / deviation
            return {"task": Term(squared_error_sum(outputs[:, 0], targets, batch.label_weights), {})}
        loss, correct = classification_sums(outputs, batch.labels, batch.label_weights, self.costs)
        return {"task": Term(loss, {"accuracy": correct})}

    def soft_sum(
        self, outputs: Float[Array, "B C"], teacher: Float[Array, "B C"], batch: TaskBatch, temperature: float
    ) -> Scalar:
        if self.regression:
            return squared_difference_sum(outputs[:, 0], teacher[:, 0], batch.label_weights)
        return soft_class_sum(outputs, teacher, batch.label_weights, temperature)

    def answers(self, model: Bert, outputs: Float[Array, "B C"], batch: TaskBatch) -> Float[Array, "B C"]:
        """Logits of classes, or the score in the units of the files."""
        mean, deviation = self.scale
        return mean + deviation * outputs if self.regression else outputs

    def counts(self, batch: TaskBatch) -> Counts:
        if self.regression:
            return super().counts(batch)
        return {"task": self.costs.weigh(batch.labels, batch.label_weights).sum()}


def _is_empty(example: Example | LabelSet) -> bool:
    return not example.text.strip() or (example.text_pair is not None and not example.text_pair.strip())


def label_order(label: str) -> tuple[float, str]:
    """The key that sorts whole numbers first and in numerical order, then other labels."""
    return (float(int(label)), label) if label.removeprefix("-").isdecimal() else (math.inf, label)


UNCALIBRATED = 0.5
THRESHOLD = "threshold/"  # the prefix of the metrics that are the thresholds found on dev


@dataclass(frozen=True)
class MultiLabelTask(NamedLabelsTask[Any, LabelledRows], TextTask):
    """Any number of classes for each text or pair of texts, each predicted independently of the others.

    | option | |
    |---|---|
    | threshold | the probability from which a label is predicted; 0: one for each label, calibrated on dev |
    | thresholds | those of the labels, by id, each with the best F1 of its label on dev; empty until calibrated |
    """

    kind = "multilabel"
    unread_columns = ("marks",)
    metric_functions = MULTILABEL_METRICS
    label_dtype = np.int32

    threshold: float = TaskConfig.threshold
    thresholds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.threshold < 1:
            raise UserError(
                f"task.threshold is {self.threshold}; use a probability below 1, or 0 for the best of each label on dev"
            )

    def labels_in(self, split: Split[Any]) -> set[str]:
        return {label for item in split.items if isinstance(item, LabelSet) for label in item.labels or ()}

    def replace_labels(self, split: Split[Any], names: Mapping[str, str]) -> Split[Any]:
        items = (
            item._replace(labels=item.labels and tuple(dict.fromkeys(names.get(one, one) for one in item.labels)))
            for item in split.items
        )
        return replace(split, items=tuple(items))

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[Any]:
        if tables.kind_of_file(path) != "table":
            raise UserError(f"{path} is not a table, but the task is {self.kind}. Give TSV, CSV, JSON lines or Parquet")
        return labelled.read_label_sets(path, columns, label_required, self.numbered_labels)

    def complete(self, train: Split[Any]) -> Task:
        """The task with the labels and metrics that its training file implies.

        Labels are in the order of the columns or the classes that the file names; otherwise sorted. Raises UserError
        for fewer than two labels.
        """
        task = self
        if not task.labels:
            found = self.labels_in(train)
            columns = tuple(name.strip() for name in self.columns.label.split(","))
            named = next((names for names in (train.class_names, columns) if found <= set(names)), None)
            task = replace(task, labels=named or tuple(sorted(found, key=label_order)))
        if len(task.labels) < 2:
            raise UserError(
                f"{train.path} has the labels {list(task.labels)}; a multilabel task needs two or more. For one label "
                "that a text has or not, use --config.task.kind=classification"
            )
        return task.with_metrics()

    def default_metrics(self) -> tuple[str, ...]:
        return ("micro_f1", "macro_f1", "auroc")

    def training_remarks(self, rows: LabelledRows) -> list[str]:
        return header_remarks(self, rows.split)

    def label_value(self, split: Split[Any], line: int, label: str) -> int:
        return check_label(split, line, label, self.labels)

    def targets(self, split: Split[Any]) -> Int32[np.ndarray, "R C"]:
        found = np.zeros((len(split.items), len(self.labels)), np.int32)
        for row, item in enumerate(split.items if split.labelled else ()):
            found[row, [self.label_value(split, item.line, label) for label in item.labels or ()]] = 1
        return found

    def counts(self, rows: LabelledRows) -> dict[str, int]:
        return super().counts(rows) | {"labels": int(rows.labels.sum())}

    def same_labels(self, rows: LabelledRows) -> list[str]:
        """A warning about labels that no text has, or every one."""
        share = rows.labels.mean(axis=0)
        same = [label for label, one in zip(self.labels, share, strict=True) if one in (0, 1)]
        what = ", ".join(same[:5]) + (" ..." if len(same) > 5 else "")
        return [f"{rows.split.path}: no text or every text has {what}, so its AUROC is left out"] if same else []

    def objective(self) -> TaskObjective:
        return MultiLabelObjective(len(self.labels), self.pooling, self.layer_mix)

    def measure(self, rows: LabelledRows, answers: Sequence[np.ndarray]) -> dict[str, float]:
        """The metrics, from the logits f32[C] of each row; and the thresholds (`threshold/LABEL`) calibrated on these
        rows, where the task has none yet."""
        shares = expit(np.stack(answers).astype(np.float64))
        thresholds = self._thresholds(shares, rows.labels > 0)
        found = multilabel_metrics(self.metrics, rows.labels > 0, shares, shares >= thresholds)
        if self.threshold or self.thresholds:
            return found
        return found | dict(zip(self._threshold_names, thresholds.tolist(), strict=True))

    def calibrated(self, metrics: Mapping[str, float]) -> "MultiLabelTask":
        """The task with the thresholds that are best on dev; 1/2 without a dev file."""
        if self.threshold or self.thresholds:
            return self
        return replace(self, thresholds=tuple(metrics.get(name, UNCALIBRATED) for name in self._threshold_names))

    def metric_names(self, dev: Split[Any]) -> tuple[str, ...]:
        calibrated = () if self.threshold or self.thresholds else self._threshold_names
        return (*self.metrics, *calibrated, "task_loss")

    def predictions(self, rows: LabelledRows, answers: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """`labels`, those predicted, `label_scores`, their probabilities, and `scores` of all labels."""
        thresholds = self._thresholds()
        found = []
        for shares in expit(np.stack(answers).astype(np.float64)):
            chosen = np.flatnonzero(shares >= thresholds)
            found.append(
                {
                    "labels": [self.labels[index] for index in chosen],
                    "label_scores": shares[chosen].tolist(),
                    "scores": dict(zip(self.labels, shares.tolist(), strict=True)),
                }
            )
        return found

    @property
    def _threshold_names(self) -> tuple[str, ...]:
        return tuple(THRESHOLD + label for label in self.labels)

    def _thresholds(
        self, shares: Float[np.ndarray, "R C"] | None = None, truth: Bool[np.ndarray, "R C"] | None = None
    ) -> Float[np.ndarray, "C"]:
        """The threshold of each label: the task's, or else the best for the F1 of the label on these rows, or 1/2."""
        if self.threshold or self.thresholds or shares is None or truth is None:
            return np.array(self.thresholds or (self.threshold or UNCALIBRATED,) * len(self.labels))
        return np.array(
            [best_threshold(score, true, int(true.sum())) for score, true in zip(shares.T, truth.T, strict=True)]
        )


@dataclass(frozen=True)
class MultiLabelObjective(TextObjective):
    """The binary cross-entropy of each label, averaged over labels (torch's BCEWithLogitsLoss). `accuracy` is the share
    of right decisions at a probability of 1/2."""

    def terms_of(self, model: Bert, outputs: Float[Array, "B C"], batch: TaskBatch) -> Terms:
        weights = jnp.broadcast_to(batch.label_weights[:, None], outputs.shape) / self.classes
        loss, correct = binary_sums(outputs, batch.labels, weights)
        return {"task": Term(loss, {"accuracy": correct})}

    def soft_sum(
        self, outputs: Float[Array, "B C"], teacher: Float[Array, "B C"], batch: TaskBatch, temperature: float
    ) -> Scalar:
        weights = jnp.broadcast_to(batch.label_weights[:, None], outputs.shape) / self.classes
        return soft_binary_sum(outputs, teacher, weights, temperature)
