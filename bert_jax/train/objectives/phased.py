"""Objectives that follow one another in a run: next tokens and masked tokens, predicted by one model."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxtyping import PRNGKeyArray

from bert_jax.config import ModelConfig
from bert_jax.data.example import Batch
from bert_jax.data.schedules import StepSchedule
from bert_jax.model import bert
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.train.objectives.language_modeling import MASK_FIELDS, CausalLMObjective, MaskedLMObjective
from bert_jax.train.objectives.objective import Counts, Objective, Terms

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
