"""A fine-tuning task of its own: ordered classes, such as one to five stars, with a loss and a metric for their order.

It shows the three parts of a kind of task that differ from classification: a metric, an objective and a decoder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import softmax

from bert_jax.config import ClassificationConfig
from bert_jax.tasks.kinds.classification import ClassificationTask, ClassObjective
from bert_jax.tasks.metrics import CLASSIFICATION_METRICS, Metric, compute_metrics
from bert_jax.tasks.registry import KINDS
from bert_jax.train.objectives import Term


def weighted_kappa(truth: np.ndarray, guess: np.ndarray) -> float:
    """Cohen's kappa with quadratic weights (Cohen 1968): 1 for equal ranks, 0 for the agreement of chance."""
    chance = ((truth[:, None] - guess[None, :]) ** 2).mean()
    return float(1 - ((truth - guess) ** 2).mean() / chance) if chance else float("nan")


@dataclass(frozen=True)
class OrdinalObjective(ClassObjective):
    """The squared difference between the label and the expected class."""

    def terms_of(self, model, outputs, batch):
        expected = jax.nn.softmax(outputs) @ jnp.arange(self.classes, dtype=jnp.float32)
        loss = ((expected - batch.labels) ** 2 * batch.label_weights).sum()
        correct = ((jnp.round(expected) == batch.labels) * batch.label_weights).sum()
        return {"task": Term(loss, {"accuracy": correct})}


@dataclass(frozen=True)
class OrdinalConfig(ClassificationConfig, kind="ordinal"):
    """The keys of config.task for this kind: those of classification."""


@dataclass(frozen=True)
class OrdinalTask(ClassificationTask):
    """Classes whose ids are ranks: labels are sorted as numbers, or in the order in which a named task lists them."""

    kind = "ordinal"
    known_metrics: ClassVar[Mapping[str, Metric]] = {**CLASSIFICATION_METRICS, "weighted_kappa": weighted_kappa}

    def default_metrics(self):
        return ("weighted_kappa", "accuracy")

    def objective(self):
        return OrdinalObjective(len(self.labels), pooling=self.pooling)

    def ranks(self, answers):
        return np.round(softmax(np.stack(answers), axis=-1) @ np.arange(len(self.labels))).astype(np.int32)

    def measure(self, rows, answers):
        return compute_metrics(self.known_metrics, self.metrics, rows.labels, self.ranks(answers))

    def predictions(self, rows, answers):
        classes = super().predictions(rows, answers)
        labels = [self.labels[rank] for rank in self.ranks(answers)]
        return [one | {"label": x, "score": one["scores"][x]} for one, x in zip(classes, labels, strict=True)]


KINDS[OrdinalTask.kind] = OrdinalTask
