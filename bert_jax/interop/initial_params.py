"""Selects the parameters of a checkpoint from which a new run starts."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.interop.family import ARCHITECTURE_FIELDS
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import paths
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads import Heads
from bert_jax.storage.local import as_typed
from bert_jax.train import distributed
from bert_jax.vocabulary import Vocabulary

# ModernBERT applies one dense layer and norm before whichever head it has, so a fine-tuned head's
# layer starts from the one that the masked language model was pretrained with.
_BEFORE_HEADS = {"pooler/dense": "mlm_head/transform", "pooler/norm": "mlm_head/norm"}

# Heads whose outputs have a meaning only through the labels of their task.
_RELATION_HEADS = ("span_relations",)
_LABEL_HEADS = ("classifier", "tagger", "crf", "question_head", "span_classifier", *_RELATION_HEADS)
_LABELS, _RELATIONS = "labels", "relation_labels"  # keys of a task


def initial_params(
    loaded: LoadedModel,
    model: ModelConfig,
    heads: Heads,
    vocabulary: Vocabulary,
    task: Mapping[str, Any] | None = None,
    report: Callable[[str], None] = distributed.note,
) -> dict[str, np.ndarray]:
    """Returns, by path, the parameters of a checkpoint that fit a run with this model, heads and vocabulary.

    A head that the checkpoint lacks, or has with another number of classes, is initialized randomly, as are all heads
    with labels if `task` differs in its `kind` or `labels` from the task that the checkpoint was fine-tuned for, and
    the head of relations if only `relation_labels` differ. This is reported in one line. Raises UserError for
    another architecture or another tokenizer.
    """
    origin = loaded.origin or "the checkpoint"
    check_architecture(loaded.model, model, origin)
    if loaded.vocabulary.content_hash != vocabulary.content_hash:
        raise UserError(
            f"{origin} was trained with another tokenizer than the one of this run's data. Build the data with "
            f"--tokenizer={origin}, or set init_from to another checkpoint"
        )
    wanted = paths.flatten(abstract_params(model, heads))
    held = dict(loaded.params)
    if model.pooler == "transform":
        held = _renamed(held, _BEFORE_HEADS) | held
    reason = "not in the checkpoint"
    if task and loaded.task and (key := _first_difference(task, loaded.task)):
        dropped = _RELATION_HEADS if key == _RELATIONS else _LABEL_HEADS
        held = {path: value for path, value in held.items() if path.split(paths.SEPARATOR)[0] not in dropped}
        labels = ", ".join(loaded.task.get(key) or ["scores"])
        reason += f" or specific to its task ({loaded.task['name']}: {labels:.80})"
    found = {path: value for path, value in held.items() if path in wanted and wanted[path].shape == value.shape}
    if fresh := [path for path in wanted if path not in found]:
        report(f"starting from {as_typed(origin)}; initialized randomly, since {reason}: {', '.join(fresh)}")
    return found


def check_architecture(got: ModelConfig, wanted: ModelConfig, origin: str = "the checkpoint") -> None:
    """Raises UserError, naming the field, if a checkpoint's architecture differs from the configured one."""
    for name in ARCHITECTURE_FIELDS:
        if getattr(got, name) != getattr(wanted, name):
            raise UserError(
                f"{origin} has another architecture: {name} is {getattr(got, name)}, but the configuration has "
                f"{getattr(wanted, name)}. Change config.model, or set init_from to another checkpoint"
            )


def _renamed(params: Mapping[str, np.ndarray], folders: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Returns the parameters below some folders under other paths; folders maps the new folder to the old one."""
    return {
        path.replace(old, new): value
        for new, old in folders.items()
        for path, value in params.items()
        if path.startswith(old + paths.SEPARATOR)
    }


def _first_difference(task: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Returns the key of the labels that two tasks do not share; empty: tasks of one kind with equal labels."""
    if task["kind"] != other["kind"]:
        return _LABELS
    return next((key for key in (_LABELS, _RELATIONS) if tuple(task.get(key) or ()) != tuple(other.get(key) or ())), "")
