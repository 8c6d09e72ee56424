"""Builds the pretraining objective that config.objective names.

First comes PhasedObjective, which lets next tokens and masked tokens follow one another in a run; then the checks of a
configuration, and the table OBJECTIVES, which extensions join.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxtyping import PRNGKeyArray

from bert_jax.config import ENCODERS, ModelConfig, PretrainConfig
from bert_jax.data import schedules
from bert_jax.data.example import Batch
from bert_jax.data.manifest import OBJECTIVES as OBJECTIVES_OF_SHARDS
from bert_jax.data.schedules import StepSchedule
from bert_jax.data.shards import Dataset
from bert_jax.errors import UserError
from bert_jax.model import bert
from bert_jax.model.heads.config import Heads
from bert_jax.model.heads.tokens import generator_config
from bert_jax.model.runtime import Runtime
from bert_jax.tokenization.vocabulary import Vocabulary
from bert_jax.train.objectives.diffusion import DiffusionObjective
from bert_jax.train.objectives.language_modeling import MASK_FIELDS, CausalLMObjective, MaskedLMObjective
from bert_jax.train.objectives.objective import Counts, Objective, Terms
from bert_jax.train.objectives.replaced_tokens import ReplacedTokensObjective

CAUSAL, MASKED = "causal", "mlm"  # the objectives that share all parameters


class NextTokenBatch(Batch):
    """A batch of a causal phase. Its type tells the phase, since phases compile programs of their own."""

    predicts: ClassVar = "next tokens"


class MaskedTokenBatch(Batch):
    """A batch of a masked phase."""

    predicts: ClassVar = "masked tokens"


TYPES: Mapping[str, type[Batch]] = {CAUSAL: NextTokenBatch, MASKED: MaskedTokenBatch}

View = Callable[[bool], bert.Bert]


@dataclass(frozen=True)
class PhasedObjective(Objective):
    """Next tokens in some phases of a run (lm) and masked tokens in others (mlm), e.g. causal first, then masked.

    All phases train the encoder and the masked-token head. In a causal phase the encoder attends to earlier positions
    only, and the head predicts the next token. Ettin's decoders have the same head as its encoders, and are trained
    further as encoders, and the encoders as decoders (Weller et al. 2025, ModernBertDecoderForCausalLM in
    transformers). AntLM alternates between both losses and attention masks in one model, which is otherwise the same
    (Yu et al. 2024). Next-sentence prediction is not supported: its parameters would get no gradient in a causal phase,
    while weight decay would shrink them.

    A batch's type tells its phase (batch_at). Other batches count as masked.
    """

    phases: StepSchedule[str]  # `causal` or `mlm` by the step from which it applies; the last one is mlm
    z_loss: float = field(default=0.0, kw_only=True)

    heads = Heads(mlm=True)
    batch_fields = (*MASK_FIELDS, "cls_positions")

    @property
    def changes(self) -> tuple[int, ...]:
        return self.phases.steps

    @property
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        metrics: dict[str, tuple[str, ...]] = {}
        for name in self.phases.values:
            metrics |= self._objective(name == CAUSAL).term_metrics
        return metrics

    @property
    def term_weights(self) -> Mapping[str, float]:
        return self._objective(False).term_weights

    def batch_at(self, step: int, batch: Batch) -> Batch:
        return TYPES[self.phases.at(step)](*batch)

    def predictions(self, batch: Any) -> int:
        return batch.input_ids.shape[-1] if is_causal(batch) else super().predictions(batch)

    def counts(self, batch: Batch) -> Counts:
        return self._objective(is_causal(batch)).counts(batch)

    def bind(self, config: ModelConfig, params: dict[str, Any], runtime: Runtime) -> View:
        """Returns the model, as a function of whether it is causal."""
        return lambda causal: bert.bind(dataclasses.replace(config, causal=causal), self.heads, params, runtime)

    def apply(self, model: View, batch: Batch, dropout_key: PRNGKeyArray | None) -> Terms:
        causal = is_causal(batch)
        return self._objective(causal).apply(model(causal), batch, dropout_key)

    def _objective(self, causal: bool) -> Objective:
        if causal:
            return CausalLMObjective(z_loss=self.z_loss)
        return MaskedLMObjective(next_sentence=False, z_loss=self.z_loss)


def is_causal(batch: Any) -> bool:
    """Whether a batch belongs to a causal phase."""
    return isinstance(batch, NextTokenBatch)


# The pretraining objectives by name. Pretraining, evaluation and planning all call `pretraining_objective`.


AUTO = "auto"
WITH_MASKS = ("mlm", "replaced_tokens", "diffusion")  # objectives that predict tokens from both sides
WITH_Z_LOSS = (MASKED, CAUSAL)
WITHOUT_GENERATOR = (AUTO, MASKED, CAUSAL, "diffusion")
EXAMPLE = "{0: causal, 5000: mlm}"


@dataclass(frozen=True)
class ShardTraits:
    """The properties of a data set that an objective depends on."""

    name: str  # for messages
    labelled: bool  # whether its sequences have next-sentence labels
    mask_unit: str  # token, word, ngram, span or infill
    vocabulary: Vocabulary | None = None  # None in a plan without shards
    held_out: bool = False  # whether it is only measured

    @classmethod
    def of(cls, dataset: Dataset, vocabulary: Vocabulary, held_out: bool = False) -> "ShardTraits":
        return cls(str(dataset.directory), dataset.labelled, dataset.masking.unit, vocabulary, held_out)


Build = Callable[[PretrainConfig, ModelConfig, Sequence[ShardTraits]], Objective]


def pretraining_objective(config: PretrainConfig, model: ModelConfig, shards: Sequence[ShardTraits]) -> Objective:
    """Builds config.objective for a model and the data sets of all phases, followed by the held-out ones.

    `auto` is the encoder's own objective (EncoderKind.objective), else causal for a causal model, and mlm for any
    other. {STEP: NAME} is a PhasedObjective. Raises UserError for an unknown name, and for an objective that
    does not fit the model, the configuration or the shards.
    """
    size, weight, name = config.generator_size, config.replaced_weight, config.objective
    if not 0 <= config.z_loss < math.inf:
        raise UserError(f"config.z_loss is {config.z_loss}; use a weight such as 1e-4, or 0 for none")
    if not 0 < size <= 1:
        raise UserError(f"config.generator_size is {size}; use a share above 0 and up to 1, such as 0.25")
    if not 0 <= weight < math.inf:
        raise UserError(f"config.replaced_weight is {weight}; use a weight of at least 0, such as 50")
    if isinstance(name, dict) or name in WITHOUT_GENERATOR:
        check_no_generator(config)
    if isinstance(name, dict):
        return _phased(config, name, model, shards)
    if name == AUTO:
        name = ENCODERS[model.encoder].objective or ("causal" if model.causal else "mlm")
    if name not in OBJECTIVES:
        choices = ", ".join((AUTO, *OBJECTIVES))
        raise UserError(f"unknown config.objective {name!r}; choose from {choices}{_shards_hint(name)}")
    if config.z_loss and name not in WITH_Z_LOSS:
        allowed = " and ".join(WITH_Z_LOSS)
        raise UserError(
            f"config.z_loss is {config.z_loss:g}, but it applies only to config.objective={allowed}, not to {name}; "
            "leave it out"
        )
    if model.directions > 1 and name in WITH_MASKS:
        raise UserError(
            f"config.objective is {name}, but the directions of model.encoder={model.encoder} do not see each other, "
            "and predict next and previous tokens; use --config.objective=auto"
        )
    return OBJECTIVES[name](config, model, shards)


def _shards_hint(name: str) -> str:
    hint = f". {name} is an objective of shards: bert-jax build-examples --objective {name}"
    return hint if name in OBJECTIVES_OF_SHARDS else ""


def _phased(
    config: PretrainConfig, objectives: dict[int, str], model: ModelConfig, shards: Sequence[ShardTraits]
) -> Objective:
    phases = schedules.read_steps(objectives, "config.objective", EXAMPLE)
    start, choices = f"config.objective is {objectives}", f"choose from {CAUSAL}, {MASKED}"
    for name in phases.values:
        if name not in OBJECTIVES:
            raise UserError(f"{start}: unknown {name!r}; {choices}{_shards_hint(name)}")
        if name not in TYPES:
            raise UserError(f"{start}, but {name} trains other parameters than the other phases; {choices}")
    if phases.values[-1] != MASKED:
        raise UserError(
            f"{start}, and its last phase is {phases.values[-1]}. End with {MASKED}, such as {EXAMPLE}, or train a "
            "causal model: --config.objective=causal --config.model.causal=true"
        )
    if model.encoder != "transformer":
        raise UserError(
            f"{start}, whose phases set the attention mask, but model.encoder={model.encoder} has no attention; use "
            "--config.model.encoder=transformer"
        )
    if model.causal:
        raise UserError(f"{start}, but the model is causal in all phases; use --config.model.causal=false")
    trained_alone = "that loss would have parameters that causal phases do not train"
    if config.span_boundary:
        raise UserError(f"{start}, but config.span_boundary is set: {trained_alone}; leave it out")
    if config.next_sentence and (labelled := [part.name for part in shards if part.labelled and not part.held_out]):
        advice = "use --config.next_sentence=false"
        raise UserError(f"{start}, but {labelled[0]} has labelled pairs: {trained_alone}; {advice}")
    if CAUSAL in phases.values:
        check_text(objectives, shards)
    if best := config.checkpoint.best:
        raise UserError(f"checkpoint.best={best} compares evaluations of the whole run, but {start}; leave it out")
    return PhasedObjective(phases, z_loss=config.z_loss)


def _masked_lm(config: PretrainConfig, model: ModelConfig, shards: Sequence[ShardTraits]) -> Objective:
    if model.causal:
        raise UserError(
            "config.objective is mlm, but the model is causal and sees only earlier tokens; use "
            "--config.objective=auto, or --config.model.causal=false"
        )
    for part in shards:
        if config.span_boundary and part.mask_unit != "span":
            raise UserError(
                f"config.span_boundary needs masked spans, but {part.name} masks by {part.mask_unit}; build the "
                "examples with --mask_unit span"
            )
    next_sentence = config.next_sentence and shards[0].labelled
    return MaskedLMObjective(next_sentence, config.span_boundary, z_loss=config.z_loss)


def _causal_lm(config: PretrainConfig, model: ModelConfig, shards: Sequence[ShardTraits]) -> Objective:
    if not model.causal:
        raise UserError(
            "config.objective is causal, but the model is bidirectional and sees the tokens that it would predict; use "
            "--config.objective=auto, or --config.model.causal=true"
        )
    check_no_masks(config, "a causal model predicts next tokens, and none of them is masked")
    check_text("causal", shards)
    return CausalLMObjective(z_loss=config.z_loss)


def _replaced_tokens(config: PretrainConfig, model: ModelConfig, shards: Sequence[ShardTraits]) -> Objective:
    if model.causal:
        raise UserError("config.objective is replaced_tokens, but the model is causal; use --config.model.causal=false")
    if config.span_boundary:
        raise UserError(
            "config.span_boundary predicts masked tokens, and the model of config.objective=replaced_tokens sees none; "
            "leave it out"
        )
    if not model.tied_output:
        advice = "use --config.model.tied_output=true"
        raise UserError(f"the generator of config.objective=replaced_tokens predicts by the token table; {advice}")
    check_text("replaced_tokens", shards)
    width = round(model.width * config.generator_size)
    if not width:
        raise UserError(
            f"config.generator_size is {config.generator_size:g}, less than one dimension of model.width={model.width}"
            "; use a larger share, such as 0.25"
        )
    generator_config(model, width)
    return ReplacedTokensObjective(generator=width, weight=config.replaced_weight)


def _diffusion(config: PretrainConfig, model: ModelConfig, shards: Sequence[ShardTraits]) -> Objective:
    if model.causal:
        raise UserError("config.objective is diffusion, but the model is causal; use --config.model.causal=false")
    check_no_masks(config, "config.objective=diffusion samples its own mask rates and masks")
    check_text("diffusion", shards)
    vocabulary = shards[0].vocabulary
    if vocabulary is None:  # a plan without shards, whose step costs the same for any ids
        return DiffusionObjective(special_ids=(), mask_id=0)
    if not vocabulary.has_mask:
        raise UserError(
            f"config.objective=diffusion masks tokens, but the vocabulary of {shards[0].name} has no mask token; "
            "rebuild the examples with another --tokenizer"
        )
    return DiffusionObjective(tuple(map(int, vocabulary.special_ids)), int(vocabulary.mask_id))


def check_no_generator(config: PretrainConfig) -> None:
    """Raises UserError if keys of replaced_tokens are set for another objective."""
    for key in ("generator_size", "replaced_weight"):
        if getattr(config, key) != getattr(PretrainConfig, key):
            raise UserError(
                f"config.{key} is {getattr(config, key):g}, but config.objective is {config.objective}; it applies to "
                f"replaced_tokens only. Leave it out, or set --config.{key}={getattr(PretrainConfig, key):g}"
            )


def check_no_masks(config: PretrainConfig, reason: str) -> None:
    """Raises UserError, with the reason, for mask options if the objective ignores the masks of the shards."""
    if config.span_boundary or config.data.mask_rate is not None or config.data.mask_schedule:
        raise UserError(
            f"{reason}; leave out config.span_boundary, data.mask_rate and data.mask_schedule "
            "(--config.data.mask_rate=none unsets that of a recipe)"
        )


def check_text(objective: str | dict[int, str], shards: Sequence[ShardTraits]) -> None:
    """Raises UserError for infilled shards: their batches lack tokens that the objective restores or predicts."""
    for part in shards:
        if part.mask_unit == "infill":
            raise UserError(
                f"config.objective={objective} needs every token of a text, but batches of {part.name} lack those of "
                "infilled spans; build the examples with another --mask_unit than infill"
            )


# An extension adds its own entry here; config.objective then takes its name.
OBJECTIVES: dict[str, Build] = {
    "mlm": _masked_lm,
    "causal": _causal_lm,
    "replaced_tokens": _replaced_tokens,
    "diffusion": _diffusion,
}
