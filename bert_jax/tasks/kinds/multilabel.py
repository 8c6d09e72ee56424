"""Multi-label classification: any number of classes for each text or pair of texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32
from scipy.special import expit

from bert_jax.config import TaskConfig
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import class_logits
from bert_jax.tasks.kinds.classification import TextTask, label_order
from bert_jax.tasks.labels import NamedLabelsTask, check_label, header_remarks
from bert_jax.tasks.metrics import MULTILABEL_METRICS, best_threshold, multilabel_metrics
from bert_jax.tasks.reading import tables, texts
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.rows import LabelledRows, LabelSet, Split, TaskBatch
from bert_jax.tasks.task import Task, TaskObjective, pooled_vectors
from bert_jax.train.losses import Scalar, binary_sums, soft_binary_sum
from bert_jax.train.objectives import Term, Terms

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
        return texts.read_label_sets(path, columns, label_required, self.numbered_labels)

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
        """A warning about a first line that looks like a header."""
        return header_remarks(self, rows.split)

    def label_value(self, split: Split[Any], line: int, label: str) -> int:
        return check_label(split, line, label, self.labels)

    def targets(self, split: Split[Any]) -> Int32[np.ndarray, "R C"]:
        """1 for each label that a text has, else 0."""
        found = np.zeros((len(split.items), len(self.labels)), np.int32)
        for row, item in enumerate(split.items if split.labelled else ()):
            found[row, [self.label_value(split, item.line, label) for label in item.labels or ()]] = 1
        return found

    def counts(self, rows: LabelledRows) -> dict[str, int]:
        """Also counts labels: those of all texts."""
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
class MultiLabelObjective(TaskObjective):
    """The binary cross-entropy of each label, averaged over labels (torch's BCEWithLogitsLoss). `accuracy` is the share
    of right decisions at a probability of 1/2."""

    classes: int
    pooling: str = "cls"
    layer_mix: bool = False

    @property
    def heads(self) -> Heads:
        return Heads(pooling=self.pooling, pooler=True, classes=self.classes, layer_mix=self.layer_mix)

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B C"]:
        """Logits of the labels."""
        return class_logits(model, pooled_vectors(model, batch, dropout_key), dropout_key)[:, 0]

    def terms_of(self, model: Bert, outputs: Float[Array, "B C"], batch: TaskBatch) -> Terms:
        weights = jnp.broadcast_to(batch.label_weights[:, None], outputs.shape) / self.classes
        loss, correct = binary_sums(outputs, batch.labels, weights)
        return {"task": Term(loss, {"accuracy": correct})}

    @property
    def has_soft_targets(self) -> bool:
        return True

    def soft_sum(
        self, outputs: Float[Array, "B C"], teacher: Float[Array, "B C"], batch: TaskBatch, temperature: float
    ) -> Scalar:
        weights = jnp.broadcast_to(batch.label_weights[:, None], outputs.shape) / self.classes
        return soft_binary_sum(outputs, teacher, weights, temperature)
