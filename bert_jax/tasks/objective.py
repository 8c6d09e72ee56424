"""What fine-tuning learns from: one term, `task`, as a sum and a count."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from bert_jax.model.bert import Bert
from bert_jax.model.heads import Heads
from bert_jax.tasks.example import TaskBatch
from bert_jax.tasks.table import Task
from bert_jax.train.losses import Sums, classification_sums, squared_error_sum


@dataclass(frozen=True)
class TaskObjective:
    """Cross-entropy of classes or of the words' tags, or the squared error of a score (Devlin et al. 2019, section 4).

    Label id 0 counts like any other; what weighs 0 (fillers, slots that start no word) adds nothing.
    """

    kind: str
    classes: int
    pooling: str = "cls"

    @property
    def heads(self) -> Heads:
        if self.kind == "tagging":
            return Heads(tags=self.classes)
        return Heads(pooling=self.pooling, pooler=True, classes=self.classes)

    def counts(self, batch: TaskBatch) -> Sums:
        return {"task": batch.label_weights.sum()}

    def sums(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Sums:
        return self.sums_of(self.outputs(model, batch, dropout_key), batch)

    def outputs(
        self, model: Bert, batch: TaskBatch, dropout_key: Array | None
    ) -> Float[Array, "B C"] | Float[Array, "B T C"]:
        """Logits of classes (or the score, C = 1) by row, or logits of tags by slot; float32."""
        hidden = model.encode(batch, dropout_key).last
        if self.kind == "tagging":
            return model.tag_logits(hidden, dropout_key)
        first_slot = jnp.zeros((hidden.shape[0], 1), jnp.int32)  # one sequence a row: its [CLS] is in slot 0
        vectors = model.sequence_vectors(hidden, batch.sequence_ids, first_slot)
        return model.class_logits(vectors, dropout_key)[:, 0]

    def sums_of(self, outputs: Float[Array, "..."], batch: TaskBatch) -> Sums:
        """The sums that follow from outputs."""
        if self.kind == "regression":
            return {"task_loss": squared_error_sum(outputs[:, 0], batch.labels, batch.label_weights)}
        loss, correct = classification_sums(outputs, batch.labels, batch.label_weights)
        return {"task_loss": loss, "task_correct": correct}


def objective_of(task: Task) -> TaskObjective:
    """The objective of a task whose labels are known."""
    return TaskObjective(task.kind, task.classes, task.pooling)
