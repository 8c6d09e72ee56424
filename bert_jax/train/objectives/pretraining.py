"""Builds the pretraining objective named by config.objective.

First comes PhasedObjective, which lets next tokens and masked tokens follow one another in a run; then the checks of a
configuration, and the table OBJECTIVES, which extensions join.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxtyping import PRNGKeyArray

from bert_jax.config import (
    CausalLM,
    MaskedLM,
    ModelConfig,
    ObjectiveConfig,
    Phases,
    PretrainConfig,
    ReplacedTokens,
)
from bert_jax.data import schedules
from bert_jax.data.example import Batch
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
    """A batch in a causal phase. Its type tells the phase, since phases compile different programs."""

    predicts: ClassVar = "next tokens"


class MaskedTokenBatch(Batch):
    """A batch in a masked phase."""

    predicts: ClassVar = "masked tokens"


TYPES: Mapping[str, type[Batch]] = {CAUSAL: NextTokenBatch, MASKED: MaskedTokenBatch}

View = Callable[[bool], bert.Bert]


@dataclass(frozen=True)
class PhasedObjective(Objective):
    """Next tokens in some phases of a run (lm) and masked tokens in others (mlm), e.g. causal first, then masked.

    All phases train the encoder and the masked-token head. In a causal phase the encoder attends to earlier positions
    only, and the head predicts the next token, as when Ettin trains its encoders further as decoders (Weller et al.
    2025, ModernBertDecoderForCausalLM in transformers), or AntLM alternates between both losses and attention masks (Yu
    et al. 2024). Next-sentence prediction is not supported: its parameters would get no gradient in a causal phase,
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
        # The terms of all phases: each step has those of its own.
        metrics: dict[str, tuple[str, ...]] = {}
        for name in self.phases.values:
            metrics |= self._objective(name == CAUSAL).term_metrics
        return metrics

    @property
    def term_weights(self) -> Mapping[str, float]:
        # Both objectives weight the same z-loss and nothing else.
        return self._objective(False).term_weights

    def batch_at(self, step: int, batch: Batch) -> Batch:
        # The type is a part of the pytree's structure, so jit compiles a program for each phase.
        return TYPES[self.phases.at(step)](*batch)

    def predictions(self, batch: Any) -> int:
        return batch.input_ids.shape[-1] if is_causal(batch) else super().predictions(batch)

    def last_positions(self, batch: Any) -> int | None:
        return self._objective(is_causal(batch)).last_positions(batch)

    def counts(self, batch: Batch) -> Counts:
        return self._objective(is_causal(batch)).counts(batch)

    def bind(self, config: ModelConfig, params: dict[str, Any], runtime: Runtime) -> View:
        """Returns the model, as a function of whether it is causal."""
        # Both views have the same parameters. Only the one that the batch needs is bound.
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


WITH_MASKS = ("mlm", "replaced_tokens", "diffusion")  # objectives that predict tokens from both sides
EXAMPLE = "{0: causal, 5000: mlm}"


@dataclass(frozen=True)
class ShardTraits:
    """A data set's properties, as far as an objective depends on them."""

    name: str  # for messages
    labelled: bool  # whether its sequences have next-sentence labels
    mask_unit: str  # token, word, ngram, span or infill
    vocabulary: Vocabulary | None = None  # None in a plan without shards
    held_out: bool = False  # whether it is only measured

    @classmethod
    def of(cls, dataset: Dataset, vocabulary: Vocabulary, held_out: bool = False) -> "ShardTraits":
        return cls(str(dataset.directory), dataset.labelled, dataset.masking.unit, vocabulary, held_out)


# Makes an objective from the options of its kind, the model, the data sets and the whole configuration.
Build = Callable[[Any, ModelConfig, Sequence[ShardTraits], PretrainConfig], Objective]


def pretraining_objective(config: PretrainConfig, model: ModelConfig, shards: Sequence[ShardTraits]) -> Objective:
    """Builds config.objective. Pretraining, evaluation and planning all call it.

    Args:
        shards: all phases' data sets, followed by the held-out ones.

    Raises:
        UserError: the objective does not fit the model, the configuration or the shards.
    """
    options = resolved(config.objective, model)
    if model.directions > 1 and options.kind in WITH_MASKS:
        raise UserError(
            f"config.objective is {options.kind}, but the directions of model.encoder={model.encoder.kind} do not see "
            "each other, and predict next and previous tokens; use --config.objective=auto"
        )
    return OBJECTIVES[options.kind](options, model, shards, config)


def resolved(options: ObjectiveConfig, model: ModelConfig) -> ObjectiveConfig:
    """Resolves `auto` for a model; returns any other objective as it is."""
    if options.kind != "auto":
        return options
    # The encoder's own objective, else next tokens for a causal model and masked tokens for any other.
    return ObjectiveConfig.kinds[model.encoder.objective or (CAUSAL if model.causal else MASKED)]()


def _phased(options: Phases, model: ModelConfig, shards: Sequence[ShardTraits], config: PretrainConfig) -> Objective:
    phases = schedules.read_steps(options.phases, "config.objective.phases", EXAMPLE)
    last, unknown = phases.values[-1], [name for name in phases.values if name not in TYPES]
    problem = ""
    if unknown:
        problem = f": {unknown[0]!r} cannot be a phase; choose from {CAUSAL}, {MASKED}"
    elif last != MASKED:
        problem = (
            f", and its last phase is {last}. End with {MASKED}, such as {EXAMPLE}, or train a causal model: "
            "--config.objective=causal --config.model.causal=true"
        )
    elif model.encoder.kind != "transformer":
        problem = (
            f", whose phases set the attention mask, but model.encoder={model.encoder.kind} has no attention. Use "
            "--config.model.encoder=transformer"
        )
    elif model.causal:
        problem = ", but the model is causal in all phases; use --config.model.causal=false"
    elif best := config.checkpoint.best:  # phases measure different losses
        problem = f", but checkpoint.best={best} compares evaluations of the whole run; leave it out"
    if problem:
        raise UserError(f"config.objective.phases is {options.phases}{problem}")
    # A causal phase undoes masks, which works for all masks except infilled spans.
    if CAUSAL in phases.values:
        check_text("phases", shards)
    return PhasedObjective(phases, z_loss=options.z_loss)


def _masked_lm(
    options: MaskedLM, model: ModelConfig, shards: Sequence[ShardTraits], config: PretrainConfig
) -> Objective:
    _check_causal(options, model, False)
    for part in shards:
        if options.span_boundary and part.mask_unit != "span":
            raise UserError(
                f"config.objective.span_boundary needs masked spans, but {part.name} masks by {part.mask_unit}; build "
                "the examples with --mask_unit span"
            )
    # All phases have one kind of sequences (PhasedLoader checks it), so the first data set shows which.
    next_sentence = options.next_sentence and shards[0].labelled
    return MaskedLMObjective(next_sentence, options.span_boundary, z_loss=options.z_loss)


def _causal_lm(
    options: CausalLM, model: ModelConfig, shards: Sequence[ShardTraits], config: PretrainConfig
) -> Objective:
    _check_causal(options, model, True)
    check_no_masks(config, "a causal model predicts next tokens, and none of them is masked")
    check_text("causal", shards)
    return CausalLMObjective(z_loss=options.z_loss)


def _replaced_tokens(
    options: ReplacedTokens, model: ModelConfig, shards: Sequence[ShardTraits], config: PretrainConfig
) -> Objective:
    _check_causal(options, model, False)
    # The generator has no output matrix of its own (heads/tokens.py).
    if not model.tied_output:
        advice = "use --config.model.tied_output=true"
        raise UserError(f"the generator of config.objective=replaced_tokens predicts by the token table; {advice}")
    check_text("replaced_tokens", shards)
    width = round(model.width * options.generator_size)
    if not width:
        raise UserError(
            f"config.objective.generator_size is {options.generator_size:g}, less than one dimension of "
            f"model.width={model.width}; use a larger share, such as 0.25"
        )
    # Called for its refusals only.
    generator_config(model, width)
    return ReplacedTokensObjective(generator=width, weight=options.replaced_weight)


def _diffusion(
    options: ObjectiveConfig, model: ModelConfig, shards: Sequence[ShardTraits], config: PretrainConfig
) -> Objective:
    _check_causal(options, model, False)
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


def _check_causal(options: ObjectiveConfig, model: ModelConfig, causal: bool) -> None:
    """Refuses a model that does not see the tokens that an objective needs, or sees those that it predicts."""
    if model.causal != causal:
        direction = "causal and sees only earlier tokens" if model.causal else "bidirectional and sees its answers"
        raise UserError(
            f"config.objective is {options.kind}, but the model is {direction}. Use --config.objective=auto, or "
            f"--config.model.causal={str(causal).lower()}"
        )


def check_no_masks(config: PretrainConfig, reason: str) -> None:
    """Raises UserError, with the reason, for mask rates if the objective ignores the masks of the shards."""
    if config.data.masking.kind != "shards":
        raise UserError(f"{reason}; leave out data.masking")
    if config.data.mask_rate is not None or config.data.mask_schedule:
        raise UserError(
            f"{reason}; leave out data.mask_rate and data.mask_schedule (--config.data.mask_rate=none unsets that of a "
            "recipe)"
        )


def check_text(objective: str, shards: Sequence[ShardTraits]) -> None:
    """Raises UserError for infilled shards: their batches lack tokens that the objective restores or predicts."""
    for part in shards:
        if part.mask_unit == "infill":
            raise UserError(
                f"config.objective={objective} needs every token of a text, but batches of {part.name} lack those of "
                "infilled spans; build the examples with another --mask_unit than infill"
            )


# By kind of config.objective. An extension defines a kind (bert_jax.config.ObjectiveConfig) and adds its entry.
OBJECTIVES: dict[str, Build] = {
    "mlm": _masked_lm,
    "causal": _causal_lm,
    "replaced_tokens": _replaced_tokens,
    "diffusion": _diffusion,
    "phases": _phased,
}
