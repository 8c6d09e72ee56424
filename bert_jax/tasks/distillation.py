"""Fine-tuning a student with a teacher (bert_jax/train/objectives/distilled.py): any checkpoint of the same task."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from bert_jax.command import UserError
from bert_jax.config import FinetuneConfig, ModelConfig
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.teacher import Distilled, distilled, open_teacher
from bert_jax.model.heads import Heads
from bert_jax.tasks import kept_head
from bert_jax.tasks.example import TaskBatch
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.task import Task
from bert_jax.train.losses import Scalar
from bert_jax.train.objectives import DistilledObjective, Terms
from bert_jax.train.objectives.distilled import SOFT, Pair
from bert_jax.vocabulary import Vocabulary

# The heads whose outputs are soft targets: these fields of both models must be equal.
OUTPUTS = ("classes", "choices", "tags", "question")


@dataclass(frozen=True)
class DistilledTask(DistilledObjective):
    """A task with a teacher: the soft term is TaskObjective.soft_sum, a mean over whatever has a label."""

    base: TaskObjective

    def soft_count(self, batch: TaskBatch) -> Float[Array, ""]:
        return batch.label_weights.sum()

    def compare(self, models: Pair, batch: TaskBatch, dropout_key: PRNGKeyArray | None) -> tuple[Terms, Scalar]:
        outputs = self.base.outputs(models.student, batch, dropout_key)
        terms = self.base.terms_of(models.student, outputs, batch)
        if SOFT not in self.term_metrics:
            return terms, jnp.zeros(())
        targets = self.base.outputs(models.teacher, batch, None)
        return terms, self.base.soft_sum(outputs, targets, batch, self.config.temperature)


def distilled_task(
    config: FinetuneConfig, student: ModelConfig, task: Task, vocabulary: Vocabulary
) -> Distilled | None:
    """The objective of a task with the teacher of config.distill; None without one.

    Raises UserError for a teacher of another task, with other labels or another tokenizer, for a kind of task without
    soft targets, and for keys that have no effect.
    """
    settings, base = config.distill, task.objective()
    settings.check_unused()
    if not settings.teacher:
        return None
    if settings.positions != "masked":
        raise UserError(
            f"distill.positions is {settings.positions}, which is for pretraining; a task compares what has a label. "
            "Omit it"
        )
    loaded = open_teacher(settings, vocabulary)
    if loaded.model.max_positions < task.max_length:
        raise UserError(
            f"task.max_length is {task.max_length}, but distill.teacher={settings.teacher} has "
            f"{loaded.model.max_positions} positions; use --config.task.max_length={loaded.model.max_positions}"
        )
    heads = Heads()
    if settings.soft_weight:
        loaded = _of_the_task(loaded, task, base, settings.teacher)
        heads = loaded.heads
    return distilled(DistilledTask, base, settings, student, loaded, heads)


def _of_the_task(loaded: LoadedModel, task: Task, base: TaskObjective, path: str) -> LoadedModel:
    """The teacher, with the outputs of its head in the order of the task's labels, and in the task's scale.

    Raises UserError for a task without soft targets, and for a teacher with other outputs.
    """
    advice = "learn from its hidden states alone: --config.distill.soft_weight=0 --config.distill.hidden_weight=1"
    if not base.has_soft_targets:
        crf = " with crf" if base.heads.crf else ""
        raise UserError(f"a task of kind {task.kind}{crf} has no soft targets for distill.teacher; {advice}")
    if not loaded.task or loaded.task["kind"] != task.kind:
        what = f"a model of a task of kind {loaded.task['kind']}" if loaded.task else "no model of a task"
        raise UserError(
            f"distill.teacher={path} is {what}, but the task is of kind {task.kind}. Use a teacher that was fine-tuned "
            f"for it, or {advice}"
        )
    if loaded.heads.crf:
        raise UserError(
            f"distill.teacher={path} has a CRF, which predicts tags jointly, so it has no soft targets for each word. "
            f"Use a teacher without one, or {advice}"
        )
    loaded = kept_head.with_labels_of(loaded, task)
    theirs, ours = (tuple(labels or ()) for labels in ((loaded.task or {}).get("labels"), getattr(task, "labels", ())))
    if theirs != ours or any(getattr(loaded.heads, name) != getattr(base.heads, name) for name in OUTPUTS):
        raise UserError(
            f"distill.teacher={path} has the labels {', '.join(theirs) or 'none'}, but the task has "
            f"{', '.join(ours) or 'none'}. Use a teacher with the same labels, name them by task.labels and "
            f"task.label_map, or {advice}"
        )
    return loaded
