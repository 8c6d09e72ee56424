"""Fits the head of a fine-tuned checkpoint to a task with the same labels in another order, or another scale."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.target_scale import with_target_scale
from bert_jax.model import paths
from bert_jax.tasks.kinds.target_scale import ScaledTask
from bert_jax.tasks.label_names import permutation
from bert_jax.tasks.task import Task

# The heads of each kind that have one output for each label, in their order.
HEADS = {"classification": ("classifier",), "multilabel": ("classifier",), "tagging": ("tagger", "crf")}


def with_labels_of(loaded: LoadedModel, task: Task) -> LoadedModel:
    """The checkpoint with the task's labels and the outputs of its head in their order, where the labels are the same.

    They are the same if the kinds are and label_names.permutation pairs them. A regression gets the task's scale of
    targets. Other checkpoints are returned as they are.
    """
    if isinstance(task, ScaledTask):
        return with_target_scale(loaded, task.target_mean, task.target_std)
    if not loaded.task or loaded.task["kind"] != task.kind or task.kind not in HEADS or not task.labels:
        return loaded
    order = permutation(task.labels, tuple(loaded.task.get("labels") or ()))
    if order is None:
        return loaded
    params = _reordered(loaded.params, HEADS[task.kind], order)
    return dataclasses.replace(loaded, params=params, task={**loaded.task, "labels": list(task.labels)})


def _reordered(params: Mapping[str, np.ndarray], heads: Sequence[str], order: Sequence[int]) -> dict[str, np.ndarray]:
    found = dict(params)
    for path in params:
        if path.split(paths.SEPARATOR)[0] in heads:
            found[path] = found[path].take(order, axis=-1)
            if path == "crf/transitions":  # [from, to]
                found[path] = found[path].take(order, axis=0)
    return found
