"""What fine-tuning learns from: one term, `task`, as a sum and a count, and what a row's answer is decoded from."""

import abc
from typing import Any

from jaxtyping import Array

from bert_jax.model.bert import Bert
from bert_jax.model.heads import Heads
from bert_jax.tasks.example import TaskBatch
from bert_jax.train.losses import Sums


class TaskObjective(abc.ABC):
    """The loss of a kind of task (train.losses.Objective), by what its heads say of a batch.

    Label id 0 counts like any other; what weighs 0 (fillers, slots without a label) adds nothing. Made anew from the
    same task it is equal and has the same hash, so that compiled programs are shared.
    """

    @property
    @abc.abstractmethod
    def heads(self) -> Heads:
        """The heads that the model needs for it."""

    @abc.abstractmethod
    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Any:
        """What the heads say: float32 arrays [B, ...], one or a tree of them. Without a key nothing drops out."""

    @abc.abstractmethod
    def sums_of(self, model: Bert, outputs: Any, batch: TaskBatch) -> Sums:
        """`task_loss`, and `task_correct` where there is a right and a wrong, summed over the batch."""

    def answers(self, model: Bert, outputs: Any, batch: TaskBatch) -> Any:
        """What the host decodes each row's answer from: arrays [B, ...], as small as can be; outputs by default."""
        return outputs

    def counts(self, batch: TaskBatch) -> Sums:
        """The denominator of the term."""
        return {"task": batch.label_weights.sum()}

    def sums(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Sums:
        """sums_of(outputs)."""
        return self.sums_of(model, self.outputs(model, batch, dropout_key), batch)
