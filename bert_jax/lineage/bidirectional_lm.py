"""ELMo's objective: predicts a token from the tokens before it, and from the tokens after it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import PRNGKeyArray

from bert_jax.config import ModelConfig, ObjectiveConfig, PretrainConfig
from bert_jax.data.example import Batch
from bert_jax.errors import UserError
from bert_jax.lineage.encoders import by_direction
from bert_jax.model.bert import Bert
from bert_jax.model.heads.config import Heads
from bert_jax.train.objectives.language_modeling import continues, token_sums, unmasked
from bert_jax.train.objectives.objective import Counts, Likelihood, Objective, Term, Terms
from bert_jax.train.objectives.pretraining import ShardTraits, check_no_masks, check_text


@dataclass(frozen=True)
class BidirectionalLMObjective(Objective):
    """Adds the log likelihoods of a forward and a backward language model (Peters et al. 2018, section 3.1).

    forward_lm predicts a token from the tokens before it, as the causal objective does, and backward_lm from the
    tokens after it; losses are in nats per token. A sequence's first token has no term in forward_lm, its last none in
    backward_lm. Both directions share token embeddings and output matrix. The masks of a batch are undone, so
    it takes shards of any kind.
    """

    @property
    def heads(self) -> Heads:
        return Heads(lm=True)

    @property
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        return {"forward_lm": ("accuracy",), "backward_lm": ("accuracy",)}

    @property
    def predicts_all(self) -> bool:
        return True

    @property
    def batch_fields(self) -> tuple[str, ...]:
        return ("masked_positions", "masked_ids", "masked_weights")

    @property
    def likelihoods(self) -> Mapping[str, Likelihood]:
        # Each direction begins with one end of every sequence, [CLS] or the last [SEP], and does not predict it.
        return {term: Likelihood(f"{term}_", with_special=True) for term in ("forward_lm", "backward_lm")}

    def counts(self, batch: Batch) -> Counts:
        count = continues(batch.sequence_ids).sum()
        return {"forward_lm": count, "backward_lm": count}

    def apply(self, model: Bert, batch: Batch, dropout_key: PRNGKeyArray | None) -> Terms:
        # Shards may be masked: both directions read and predict the original tokens.
        text = unmasked(batch)
        forward, backward = by_direction(model.encode(batch._replace(input_ids=text), dropout_key).last)
        # weights[:, i] is 1 if tokens i and i + 1 are of one sequence, so both directions use the same weights.
        weights = continues(batch.sequence_ids)
        sums = {
            "forward_lm": token_sums(model, forward[:, :-1], text[:, 1:], weights),
            "backward_lm": token_sums(model, backward[:, 1:], text[:, :-1], weights),
        }
        return {name: Term(total.loss, {"accuracy": total.correct}) for name, total in sums.items()}


@dataclass(frozen=True)
class BidirectionalLM(ObjectiveConfig, kind="bidirectional_lm"):
    """Predicts next and previous tokens (ELMo)."""


def bidirectional_lm(
    options: BidirectionalLM, model: ModelConfig, shards: Sequence[ShardTraits], config: PretrainConfig
) -> Objective:
    """Makes the objective (OBJECTIVES).

    Raises:
        UserError: the encoder has one direction, an option of masking is set, or shards hold infilled text.
    """
    if model.directions == 1:
        raise UserError(
            f"config.objective is bidirectional_lm, but model.encoder={model.encoder.kind} has no second direction. "
            "Use --config.model.encoder=bilstm, or --config.objective=auto"
        )
    check_no_masks(config, "config.objective=bidirectional_lm predicts all tokens, and none of them is masked")
    check_text("bidirectional_lm", shards)
    return BidirectionalLMObjective()
