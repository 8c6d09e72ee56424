"""Opens the teacher of a distillation, and makes a pretraining objective learn from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.command import UserError
from bert_jax.config import DistillConfig, ModelConfig, PretrainConfig
from bert_jax.data.shards import Dataset
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import paths
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads import Heads
from bert_jax.train.objectives import DistilledMaskedLM, DistilledObjective, MaskedLMObjective, Objective
from bert_jax.train.objectives.distilled import TEACHER, Teacher
from bert_jax.vocabulary import Vocabulary


@dataclass(frozen=True)
class Distilled:
    """What a run with a teacher trains: its objective, the teacher's parameters by path, and a line about it."""

    objective: DistilledObjective
    constants: dict[str, np.ndarray]
    note: str


def open_teacher(config: DistillConfig, vocabulary: Vocabulary) -> LoadedModel:
    """Opens the teacher. Raises UserError for another tokenizer, and whenever open_checkpoint does."""
    loaded = open_checkpoint(config.teacher)
    if loaded.vocabulary.content_hash != vocabulary.content_hash:
        raise UserError(
            f"distill.teacher={config.teacher} has another tokenizer than the student, so it reads other ids. Use a "
            f"teacher with the same tokenizer, or build the student's data with --tokenizer={config.teacher}"
        )
    return loaded


def distilled(
    kind: type[DistilledObjective],
    base: Objective,
    config: DistillConfig,
    student: ModelConfig,
    loaded: LoadedModel,
    heads: Heads,
    **options: Any,
) -> Distilled:
    """An objective with a teacher, whose outputs are those of `heads`.

    Raises UserError where the checkpoint lacks a parameter of these heads, for layers that cannot be compared, and for
    a causal model with one that is not, since they see other tokens.
    """
    teacher = loaded.model
    if teacher.causal != student.causal or teacher.directions != student.directions:
        kinds = ["causal" if one.causal else "bidirectional" for one in (teacher, student)]
        raise UserError(
            f"distill.teacher={config.teacher} is {kinds[0]}, with the encoder {teacher.encoder}, but the student is "
            f"{kinds[1]}, with the encoder {student.encoder}. Use a teacher that sees the same tokens"
        )
    pairs = config.pairs(student.layers, teacher.layers)
    projection = teacher.width if pairs and teacher.width != student.width else 0
    wanted = paths.flatten(abstract_params(teacher, heads))
    if missing := [path for path in wanted if path not in loaded.params]:
        raise UserError(
            f"distill.teacher={config.teacher} lacks {missing[0]}, which its soft targets need. Use a teacher that has "
            "it, or only its hidden states: --config.distill.soft_weight=0 --config.distill.hidden_weight=1"
        )
    count = sum(leaf.size for leaf in wanted.values())
    return Distilled(
        kind(base, Teacher(teacher, heads), config, pairs, projection, **options),
        {f"{TEACHER}/{path}": loaded.params[path] for path in wanted},
        f"teacher: {config.teacher}, {teacher.layers} layers of width {teacher.width}, {count:,} parameters",
    )


def distilled_pretraining(
    config: PretrainConfig,
    student: ModelConfig,
    objective: Objective,
    vocabulary: Vocabulary,
    datasets: Sequence[Dataset],
) -> Distilled | None:
    """The pretraining objective with the teacher of config.distill; None without one.

    Raises UserError for an objective that is not masked language modeling, for a teacher that does not read these rows,
    and for keys that have no effect.
    """
    settings = config.distill
    settings.check_unused()
    if not settings.teacher:
        return None
    if not isinstance(objective, MaskedLMObjective):
        raise UserError(
            f"distill.teacher is set, but config.objective is {config.objective}: pretraining distils masked language "
            "models. Use --config.objective=mlm, or omit distill.teacher"
        )
    if settings.soft_weight and config.model.logits_at_once:
        raise UserError(
            f"model.logits_at_once is {config.model.logits_at_once}, but soft targets are of the whole vocabulary. Use "
            "--config.model.logits_at_once=0, and more microbatches to save memory"
        )
    loaded = open_teacher(settings, vocabulary)
    longest = max(data.seq_len for data in datasets)
    if longest > loaded.model.max_positions:
        raise UserError(
            f"the rows have {longest} positions, but distill.teacher={settings.teacher} supports only "
            f"{loaded.model.max_positions}. Build shorter rows, or use another teacher"
        )
    if settings.soft_weight and not loaded.heads.mlm:
        raise UserError(
            f"distill.teacher={settings.teacher} has no masked-language-model head, so it gives no soft targets. Use "
            "one that has, or only its hidden states: --config.distill.soft_weight=0 --config.distill.hidden_weight=1"
        )
    heads = Heads(mlm=bool(settings.soft_weight))
    return distilled(DistilledMaskedLM, objective, settings, student, loaded, heads, words=vocabulary.vocab_size)
