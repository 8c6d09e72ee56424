"""The causal objective: each token from those before it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bert_jax.data.example import Batch
from bert_jax.model.bert import Bert
from bert_jax.model.head_outputs import vocabulary_product
from bert_jax.model.heads import Heads
from bert_jax.train.losses import VocabularySums, vocabulary_sums
from bert_jax.train.objectives.objective import Counts, Likelihood, Objective, Term, Terms
from bert_jax.train.objectives.z_loss import z_counts, z_metrics, z_terms, z_weights


@dataclass(frozen=True)
class CausalLMObjective(Objective):
    """Each token of a sequence from those before it (lm; Radford et al. 2018, section 3.1).

    No sequence sees another. The first token of a sequence is given; its last ([SEP]) is predicted like any other.
    The masks of a batch are undone, so shards of any kind serve.

    z_loss  the weight of the z-loss (z_loss.py)
    """

    z_loss: float = field(default=0.0, kw_only=True)

    @property
    def heads(self) -> Heads:
        return Heads(lm=True)

    @property
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        return {"lm": ("accuracy",), **z_metrics(self.z_loss)}

    @property
    def term_weights(self) -> Mapping[str, float]:
        return z_weights(self.z_loss)

    @property
    def batch_fields(self) -> tuple[str, ...]:
        return ("masked_positions", "masked_ids", "masked_weights")

    @property
    def likelihoods(self) -> Mapping[str, Likelihood]:
        return {"lm": Likelihood("", with_special=True)}

    def counts(self, batch: Batch) -> Counts:
        counts = {"lm": continues(batch.sequence_ids).sum()}
        return counts | z_counts(self.z_loss, counts, "lm")

    def apply(self, model: Bert, batch: Batch, dropout_key: PRNGKeyArray | None) -> Terms:
        text = unmasked(batch)
        hidden = model.encode(batch._replace(input_ids=text), dropout_key).last
        sums = token_sums(model, hidden[:, :-1], text[:, 1:], continues(batch.sequence_ids))
        return {"lm": Term(sums.loss, {"accuracy": sums.correct})} | z_terms(self.z_loss, sums)


def unmasked(batch: Batch) -> Int[Array, "B T"]:
    """The ids of a batch with the original tokens at masked positions."""
    length = batch.input_ids.shape[1]
    # A filler prediction gets a position outside the row, which the scatter drops.
    positions = jnp.where(batch.masked_weights > 0, batch.masked_positions, length)
    rows = jnp.arange(len(positions))[:, None]
    return jnp.asarray(batch.input_ids).at[rows, positions].set(batch.masked_ids, mode="drop")


def token_sums(
    model: Bert, hidden: Float[Array, "B T D"], ids: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> VocabularySums:
    """vocabulary_sums of a token for each position."""
    return vocabulary_sums(vocabulary_product(model, hidden), ids, weights)


def continues(sequence_ids: Int[Array, "B T"]) -> Float[Array, "B T-1"]:
    """1 where a position belongs to the same sequence as the one before it."""
    same = (sequence_ids[:, 1:] == sequence_ids[:, :-1]) & (sequence_ids[:, 1:] > 0)
    return same.astype(jnp.float32)
