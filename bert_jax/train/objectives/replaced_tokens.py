"""Replaced token detection: a generator fills masked tokens, and the model finds those that it replaced (ELECTRA)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from bert_jax.data.example import Batch
from bert_jax.model.bert import Bert
from bert_jax.model.dropout import content_seeds, derived_seeds, gumbel, numbered_seeds
from bert_jax.model.heads.config import Heads
from bert_jax.model.layers import child_key
from bert_jax.model.outputs import generator_logits, replaced_token_logits
from bert_jax.train.losses import binary_sums, classification_sums
from bert_jax.train.objectives.language_modeling import ACCURACY, MASK_FIELDS, unmasked
from bert_jax.train.objectives.objective import Counts, Objective, Term, Terms


class SeededBatch(NamedTuple):
    """A training batch with its samples' seeds."""

    batch: Batch
    sample_seeds: Any  # u32[B,M,2], one for each prediction


@dataclass(frozen=True)
class ReplacedTokensObjective(Objective):
    """Masked tokens by the generator (mlm), and replaced tokens by the model (rtd; Clark et al. 2020, section 3.1).

    Each masked token is replaced by a sample of the generator's distribution, through which no gradient flows; a sample
    equal to the original token counts as original. The model says of every token whether it was replaced.

    Samples follow from the run's seed, the step, and the sequence's number in the batch, on any mesh, for any
    number of microbatches, and in packed and padded rows alike. In evaluation they follow from the sequence's tokens,
    so that they depend neither on the row nor on the batch.
    """

    generator: int  # its width
    # Of the rtd term in the loss: "we searched for the best value of lambda out of [1, 10, 20, 50, 100]" (Clark et al.
    # 2020, section 3.1 and appendix A: 50).
    weight: float = 50.0

    term_metrics: ClassVar = {"mlm": ACCURACY, "rtd": ("accuracy", "replaced")}
    batch_fields = MASK_FIELDS

    @property
    def heads(self) -> Heads:
        return Heads(replaced_tokens=True, generator=self.generator)

    @property
    def term_weights(self) -> Mapping[str, float]:
        return {"rtd": self.weight}

    def counts(self, batch: Batch) -> Counts:
        # All tokens are classified, special ones and unmasked ones included.
        tokens = (batch.sequence_ids > 0).sum().astype(jnp.float32)
        return {"mlm": batch.masked_weights.sum(), "rtd": tokens}

    def corrupt(self, batch: Batch, key: PRNGKeyArray) -> SeededBatch:
        # Seeds are made from the whole batch, and travel with its rows into microbatches and to devices.
        seeds = numbered_seeds(child_key(key, "samples"), batch.sequence_ids)
        return SeededBatch(batch, _at_predictions(batch, seeds))

    def apply(self, model: Bert, batch: Batch | SeededBatch, dropout_key: PRNGKeyArray | None) -> Terms:
        if isinstance(batch, SeededBatch):
            batch, seeds = batch
        else:
            assert dropout_key is None, "in training, corrupt is called first"
            seeds = _at_predictions(batch, content_seeds(batch.input_ids, batch.sequence_ids, batch.positions))
        logits = generator_logits(model, batch, batch.masked_positions, dropout_key)
        # The generator is trained like any masked language model, on the same masks.
        loss, correct = classification_sums(logits, batch.masked_ids, batch.masked_weights)
        # Sampling is not differentiated, so the generator is not trained to fool the model (Clark et al. 2020).
        sampled = sample(jax.lax.stop_gradient(logits), seeds)
        ids, replaced = replace(batch, sampled)
        # Both parts get the same key; the generator's streams have names of their own (outputs.generator_logits).
        hidden = model.encode(batch._replace(input_ids=ids), dropout_key).last
        real = (batch.sequence_ids > 0).astype(jnp.float32)
        labels = replaced.astype(jnp.int32)
        rtd, rtd_correct = binary_sums(replaced_token_logits(model, hidden), labels, real)
        return {
            "mlm": Term(loss, {"accuracy": correct}),
            "rtd": Term(rtd, {"accuracy": rtd_correct, "replaced": labels.sum().astype(jnp.float32)}),
        }


def _at_predictions(batch: Batch, seeds: UInt32[Array, "B T 2"]) -> UInt32[Array, "B M 2"]:
    """Returns the predictions' seeds, from their sequences' seeds and their positions."""
    return jnp.take_along_axis(derived_seeds(seeds, batch.positions), batch.masked_positions[..., None], axis=1)


def sample(logits: Float[Array, "B M V"], seeds: UInt32[Array, "B M 2"]) -> Int[Array, "B M"]:
    """Samples a token per position from its logits' softmax, by Gumbel noise."""
    # The padding of the vocabulary has logits of -inf, so no noise makes it the largest.
    return jnp.argmax(logits + gumbel(seeds, logits.shape), axis=-1).astype(jnp.int32)


def replace(batch: Batch, sampled: Int[Array, "B M"]) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """Puts these tokens at the masked positions; returns the ids, and which of them are not the original."""
    # With the samples as the original tokens, undoing the masks fills them in.
    text = unmasked(batch)
    filled = unmasked(batch._replace(masked_ids=sampled))
    return filled, filled != text
