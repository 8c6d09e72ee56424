"""The base class of fine-tuning objectives: one loss term, `task`, and the arrays that predictions are decoded from."""

import abc
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from bert_jax.model.bert import Bert
from bert_jax.model.task_outputs import encode_for_task, sequence_vectors
from bert_jax.tasks.example import TaskBatch
from bert_jax.train.losses import Scalar
from bert_jax.train.objectives import Counts, Objective, Terms


class TaskObjective(Objective):
    """The objective of a kind of task.

    Label id 0 counts like any other. A weight of 0 (fillers, positions without a label) adds nothing.
    """

    @property
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        return {"task": ("accuracy",)}

    @abc.abstractmethod
    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Any:
        """The outputs of the heads: float32 arrays [B, ...], one or a tree of them. Without a key, dropout is off."""

    @abc.abstractmethod
    def terms_of(self, model: Bert, outputs: Any, batch: TaskBatch) -> Terms:
        """The terms of the loss from the outputs: `task`, with `accuracy` where predictions are right or wrong."""

    def answers(self, model: Bert, outputs: Any, batch: TaskBatch) -> Any:
        """The arrays [B, ...] from which the host decodes each row's answer, as small as possible; by default the
        outputs."""
        return outputs

    @property
    def has_soft_targets(self) -> bool:
        """Whether a student can learn from the outputs of a teacher (soft_sum)."""
        return False

    def soft_sum(self, outputs: Any, teacher: Any, batch: TaskBatch, temperature: float) -> Scalar:
        """The difference of both models' outputs, summed with the label weights, at a temperature where they are
        distributions (bert_jax/train/soft_losses.py). Only where has_soft_targets."""
        raise NotImplementedError(f"{type(self).__name__} has no soft targets")

    def counts(self, batch: TaskBatch) -> Counts:
        return {"task": batch.label_weights.sum()}

    def apply(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Terms:
        return self.terms_of(model, self.outputs(model, batch, dropout_key), batch)


def pooled_vectors(model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B 1 D"]:
    """The vector of the one sequence of each row, whose [CLS] is at position 0."""
    hidden = encode_for_task(model, batch, dropout_key)
    return sequence_vectors(model, hidden, batch.sequence_ids, jnp.zeros((hidden.shape[0], 1), jnp.int32))
