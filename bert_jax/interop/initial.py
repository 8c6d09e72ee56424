"""Prepares a run's architecture, initial parameters and teacher.

A run calls `open_initial`, `architecture` and `initial_params` in this order. `distilled` and `distilled_pretraining`
add a teacher to its objective.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.config import DistillConfig, ModelConfig, PretrainConfig, TrainConfig
from bert_jax.data.shards import Dataset
from bert_jax.errors import UserError
from bert_jax.interop.family import ARCHITECTURE_FIELDS
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import layers, sizes
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads.config import Heads
from bert_jax.storage.files import as_typed
from bert_jax.tokenization.vocabulary import Vocabulary
from bert_jax.train import distributed
from bert_jax.train.objectives import DistilledMaskedLM, DistilledObjective, MaskedLMObjective, Objective
from bert_jax.train.objectives.distilled import TEACHER, Teacher
from bert_jax.train.rules import ENCODER_STACK
from bert_jax.train.workdir import checkpoint_folder, read_config

# ModernBERT has one dense layer and norm before any head: new -> old. Fine-tuning starts from the layer that the masked
# language model was pretrained with.
_BEFORE_HEADS = {"pooler/dense": "mlm_head/transform", "pooler/norm": "mlm_head/norm"}

# Heads whose outputs stand for labels, by the task's key for these labels.
_RELATION_HEADS = ("span_relations",)
_LABEL_HEADS = {
    "labels": ("classifier", "tagger", "crf", "question_head", "span_classifier", *_RELATION_HEADS),
    "relation_labels": _RELATION_HEADS,
}


def open_initial(config: TrainConfig) -> LoadedModel | None:
    """Opens init_from with its init_layers; returns None for a run from scratch.

    Raises:
        UserError: init_layers is set without init_from, or open_checkpoint or with_layers refuses.
    """
    if config.init_from:
        loaded = open_checkpoint(config.init_from, config.init_average, average_key="init_average")
        return with_layers(loaded, config.init_layers) if config.init_layers else loaded
    if config.init_layers and not getattr(config, "branch_from", ""):  # a branch has the layers of its trunk
        raise UserError(
            f"init_layers is {config.init_layers}, but init_from is not set. Name the checkpoint that has the layers "
            "with --config.init_from=CHECKPOINT, or omit init_layers"
        )
    return None


def architecture(config: PretrainConfig, vocab_size: int, loaded: LoadedModel | None) -> ModelConfig:
    """The recipe's architecture, or with the preset `checkpoint`, the checkpoint's with the recipe's changes.

    Args:
        config: The recipe.
        vocab_size: The vocabulary's size, for all other presets.
        loaded: The result of open_initial.

    Raises:
        UserError: The preset `checkpoint` has no checkpoint, or ModelConfig refuses the options.
    """
    if config.model.preset != sizes.FROM_CHECKPOINT:
        return sizes.model_config(config.model, vocab_size)
    # A branch restores the state of its trunk, so it has the trunk's architecture.
    if config.branch_from:
        workdir = checkpoint_folder(config.branch_from).parent.parent
        return sizes.with_options(read_config(workdir).model, config.model)
    if loaded is None:
        raise UserError("model.preset is checkpoint, but init_from is not set; set --config.init_from=CHECKPOINT")
    return sizes.with_options(loaded.model, config.model)


def with_layers(loaded: LoadedModel, layers: Sequence[int]) -> LoadedModel:
    """Selects some layers of a checkpoint, numbered from 0.

    A student that starts from every second layer of its teacher learns faster than one with random layers (DistilBERT;
    Sanh et al. 2019, section 3).

    Raises:
        UserError: Layers do not exist or are not in ascending order, or a layer's new place changes its attention or
            its norm.
    """
    model, origin = loaded.model, loaded.origin or "the checkpoint"
    # Whether a layer has global attention, and a first norm, depends on its place.
    kinds = [(model.is_global(layer), layer == 0 and model.norm == "pre_but_first") for layer in range(model.layers)]
    problem = ""
    if model.encoder.kind != "transformer":
        problem = f", but {origin} has an encoder {model.encoder.kind}, not a Transformer. Omit it"
    elif list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < model.layers:
        problem = f"; use ascending numbers from 0 to {model.layers - 1}, the last layer of {origin}"
    elif [kinds[layer] for layer in layers] != kinds[: len(layers)]:
        problem = (
            f", but other layers of {origin} would then have global attention or no first norm. Take whole groups of "
            f"{model.global_every} layers, with layer 0 first"
        )
    if problem:
        raise UserError(f"init_layers is {tuple(layers)}{problem}")
    params = dict(loaded.params)
    for path, value in params.items():
        # A parameter that all layers share is stored once, [1, ...].
        shared = model.shared_layers != "none" and len(value) == 1
        if path.startswith(ENCODER_STACK) and len(value) == model.layers and not shared:
            params[path] = value[list(layers)]
    return dataclasses.replace(loaded, model=dataclasses.replace(model, layers=len(layers)), params=params)


def initial_params(
    loaded: LoadedModel,
    model: ModelConfig,
    heads: Heads,
    vocabulary: Vocabulary,
    task: Mapping[str, Any] | None = None,
    report: Callable[[str], None] = distributed.note,
) -> dict[str, np.ndarray]:
    """Selects the checkpoint's parameters that fit a run, by path; the run initializes the others randomly.

    These are the heads that the checkpoint lacks, has with another number of classes, or was fine-tuned with for a task
    of another kind or with other labels than `task`. One line reports them.

    Raises:
        UserError: The checkpoint has another architecture or another tokenizer.
    """
    origin, problem = loaded.origin or "the checkpoint", ""
    if loaded.vocabulary.content_hash != vocabulary.content_hash:
        problem = f"was trained with another tokenizer than this run's data. Build them with --tokenizer={origin}"
    for name in ARCHITECTURE_FIELDS:
        there, here = getattr(loaded.model, name), getattr(model, name)
        if not (model.encoder.computes_as(loaded.model.encoder) if name == "encoder" else there == here):
            # The architecture comes first: another tokenizer often means another size of its vocabulary, too.
            problem = (
                f"has another architecture: {name} is {there}, but the configuration has {here}. Change config.model"
            )
            break
    if problem:
        raise UserError(f"{origin} {problem}, or set init_from to another checkpoint")
    expected = layers.flatten(abstract_params(model, heads))
    params = dict(loaded.params)
    if model.pooler == "transform":
        for new, old in _BEFORE_HEADS.items():
            for path, value in loaded.params.items():
                if path.startswith(old + layers.SEPARATOR):
                    # A pooler that the checkpoint already has takes precedence.
                    params.setdefault(path.replace(old, new), value)

    # A head with as many outputs may still have other labels: its outputs would then mean something else.
    reason = "not in the checkpoint"
    if task and loaded.task:
        other_kind = task["kind"] != loaded.task["kind"]
        for key, names in _LABEL_HEADS.items():
            if other_kind or tuple(task.get(key) or ()) != tuple(loaded.task.get(key) or ()):
                params = {path: value for path, value in params.items() if path.split(layers.SEPARATOR)[0] not in names}
                labels = ", ".join(loaded.task.get(key) or ["scores"])
                reason += f" or specific to its task ({loaded.task['name']}: {labels:.80})"
                break
    # Shapes can still differ in the number of classes.
    params = {p: value for p, value in params.items() if p in expected and expected[p].shape == value.shape}
    if fresh := [path for path in expected if path not in params]:
        report(f"starting from {as_typed(origin)}; initialized randomly, since {reason}: {', '.join(fresh)}")
    return params


@dataclass(frozen=True)
class Distilled:
    """A run's objective with a teacher, the teacher's parameters by path, and a line that describes it."""

    objective: DistilledObjective
    constants: dict[str, np.ndarray]
    note: str


def open_teacher(config: DistillConfig, vocabulary: Vocabulary) -> LoadedModel:
    """Opens the teacher.

    Raises:
        UserError: It has another tokenizer, or open_checkpoint refuses it.
    """
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
    """Adds a teacher to an objective; `heads` compute its outputs.

    Raises:
        UserError: Layers cannot be compared, or only one of the two models is causal, so they see different tokens.
    """
    teacher = loaded.model
    if teacher.causal != student.causal or teacher.directions != student.directions:
        kinds = ["causal" if model.causal else "bidirectional" for model in (teacher, student)]
        raise UserError(
            f"distill.teacher={config.teacher} is {kinds[0]}, with the encoder {teacher.encoder.kind}, but the student "
            f"is {kinds[1]}, with the encoder {student.encoder.kind}. Use a teacher that sees the same tokens"
        )
    pairs = config.pairs(student.layers, teacher.layers)
    # Hidden states of another width are compared after a projection, which is trained along with the student.
    projection = teacher.width if pairs and teacher.width != student.width else 0
    # Heads that give no target would only take memory.
    params = {path: loaded.params[path] for path in layers.flatten(abstract_params(teacher, heads))}
    count = sum(value.size for value in params.values())
    return Distilled(
        kind(base, Teacher(teacher, heads), config, pairs, projection, **options),
        {f"{TEACHER}/{path}": value for path, value in params.items()},
        f"teacher: {config.teacher}, {teacher.layers} layers of width {teacher.width}, {count:,} parameters",
    )


def distilled_pretraining(
    config: PretrainConfig,
    student: ModelConfig,
    objective: Objective,
    vocabulary: Vocabulary,
    datasets: Sequence[Dataset],
) -> Distilled | None:
    """Adds the teacher of config.distill to a pretraining objective; returns None without one.

    Raises:
        UserError: The objective is not masked language modeling, the teacher cannot read these rows or gives no soft
            targets, or keys have no effect.
    """
    settings = config.distill
    settings.check_unused()
    if not settings.teacher:
        return None
    problem = ""
    if not isinstance(objective, MaskedLMObjective):
        problem = (
            f"distill.teacher is set, but config.objective is {config.objective.kind}: pretraining distils masked "
            "language models. Use --config.objective=mlm, or omit distill.teacher"
        )
    elif settings.soft_weight and config.model.logits_at_once:
        problem = (
            f"model.logits_at_once is {config.model.logits_at_once}, but soft targets are of the whole vocabulary. Use "
            "--config.model.logits_at_once=0, and more microbatches to save memory"
        )
    if problem:  # before the teacher is read, which may take minutes
        raise UserError(problem)
    loaded = open_teacher(settings, vocabulary)
    longest = max(data.seq_len for data in datasets)
    if longest > loaded.model.max_positions:
        problem = (
            f"supports only {loaded.model.max_positions} positions, but the rows have {longest}. Build shorter rows, "
            "or use another teacher"
        )
    elif settings.soft_weight and not loaded.heads.mlm:
        problem = (
            "has no masked-language-model head, so it gives no soft targets. Use one that has, or only its hidden "
            "states: --config.distill.soft_weight=0 --config.distill.hidden_weight=1"
        )
    if problem:
        raise UserError(f"distill.teacher={settings.teacher} {problem}")
    heads = Heads(mlm=bool(settings.soft_weight))
    return distilled(DistilledMaskedLM, objective, settings, student, loaded, heads, words=vocabulary.vocab_size)
