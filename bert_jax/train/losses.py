"""What pretraining learns from: masked tokens and next sentences, as sums whose denominators are counted apart.

Never a mean: the train step divides once, by the counts over the whole global batch, so that no mesh, microbatch
or short row changes the gradient (law 3).
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bert_jax.data.example import Batch
from bert_jax.model.bert import Bert
from bert_jax.model.heads import Heads

Sums = dict[str, Array]


@runtime_checkable
class Objective(Protocol):
    """A loss: terms with denominators that follow from the batch alone, and sums that follow from the model."""

    @property
    def heads(self) -> Heads:
        """The heads that the model needs for it."""

    def counts(self, batch: Any) -> Sums:
        """The denominator of each term, by the term's name; float32."""

    def sums(self, model: Bert, batch: Any, dropout_key: Array | None) -> Sums:
        """`<term>_loss`, and any other `<term>_<metric>`, summed over the batch; float32."""


@dataclass(frozen=True)
class PretrainingObjective:
    """Masked language model plus next-sentence prediction, their means added (Devlin et al. 2019, section 3.1).

    The labels may be those of sentence order (ALBERT; Lan et al. 2020, section 3.1): head and loss are the same.
    next_sentence is False for shards without labels (full_sentences), as in RoBERTa (Liu et al. 2019, section 4.2): the
    term then counts nothing and adds nothing.
    """

    next_sentence: bool = True

    @property
    def heads(self) -> Heads:
        return Heads(mlm=True, next_sentence=self.next_sentence, pooler=self.next_sentence)

    def counts(self, batch: Batch) -> Sums:
        labelled = batch.next_sentence_weight.sum() if self.next_sentence else jnp.zeros(())
        return {"mlm": batch.masked_weights.sum(), "nsp": labelled}

    def sums(self, model: Bert, batch: Batch, dropout_key: Array | None) -> Sums:
        # Only what is predicted from is computed in the last layer.
        slots = jnp.concatenate([batch.masked_positions, batch.cls_positions], axis=1)
        vectors = model.encode_at(batch, slots, dropout_key)
        masked, first = jnp.split(vectors, [batch.masked_positions.shape[1]], axis=1)
        loss, correct = classification_sums(model.vocabulary_logits(masked), batch.masked_ids, batch.masked_weights)
        sums = {"mlm_loss": loss, "mlm_correct": correct, "nsp_loss": jnp.zeros(()), "nsp_correct": jnp.zeros(())}
        if self.next_sentence:
            logits = model.next_sentence_logits(model.pool(first))
            loss, correct = classification_sums(logits, batch.next_sentence_label, batch.next_sentence_weight)
            sums |= {"nsp_loss": loss, "nsp_correct": correct}
        return sums


def classification_sums(
    logits: Float[Array, "*shape C"], labels: Int[Array, "*shape"], weights: Float[Array, "*shape"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weighted sums of cross-entropy in nats, and of right guesses (a tie of the truth with another is right)."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    # The greatest logit is wanted by the softmax anyway; an argmax would be a second, slower pass over the classes.
    top = jax.lax.stop_gradient(logits).max(axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    return (losses * weights).sum(), ((picked >= top) * weights).sum()


def total_loss(sums: Sums, counts: Sums) -> Float[Array, ""]:
    """The loss that is descended: each term's sum over its count, added."""
    return sum((sums[f"{term}_loss"] / jnp.maximum(count, 1.0) for term, count in counts.items()), jnp.float32(0))


def means(sums: Sums, counts: Sums) -> Sums:
    """Metrics by name: `loss`, and `<term>_<metric>` with `correct` read as `accuracy`; NaN where nothing counted."""
    metrics = {"loss": total_loss(sums, counts)}
    for name, value in sums.items():
        count = counts[name.split("_", 1)[0]]
        metrics[name.replace("_correct", "_accuracy")] = jnp.where(count > 0, value / jnp.maximum(count, 1.0), jnp.nan)
    return metrics
