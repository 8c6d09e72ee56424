"""The objectives of language models: masked tokens with next sentences and span boundaries, and next tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bert_jax.data.example import Batch
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert
from bert_jax.model.heads.config import Heads
from bert_jax.model.heads.tokens import SPAN_PLACES
from bert_jax.model.outputs import next_sentence_logits, pool_vectors, span_boundary_product, vocabulary_product
from bert_jax.train.losses import VocabularySums, classification_sums, vocabulary_sums
from bert_jax.train.objectives.objective import Counts, Likelihood, Objective, Term, Terms

ACCURACY = ("accuracy",)
MASK_FIELDS = ("masked_positions", "masked_ids", "masked_weights")  # of a batch
# The z-loss keeps the normalizer of the vocabulary's softmax near 1, with a weight (objective.z_loss): "we use an
# auxiliary loss of z_loss = 1e-4 * log^2 Z to encourage the softmax normalizer log(Z) to be close to 0" (Chowdhery et
# al. 2022, PaLM, section 5). The term is the mean of log^2 Z over an objective's predictions, and is logged as z_loss
# without its weight. With a weight of 0 there is no term.
Z = "z"


def z_entry(weight: float, value: Any) -> dict[str, Any]:
    """Returns the z-loss's entry in an objective's metrics, weights, counts or terms."""
    return {Z: value} if weight else {}


@dataclass(frozen=True)
class MaskedLMObjective(Objective):
    """Masked language modeling (mlm), next sentence prediction (nsp) and the span boundary objective (sbo).

    Args:
        next_sentence: predicts the next sentence, too (Devlin et al. 2019, section 3.1), or the sentence order (ALBERT;
            Lan et al. 2020, section 3.1), by the shards' labels. False for shards without labels, as in RoBERTa (Liu et
            al. 2019, section 4.2): the term then counts nothing and adds nothing.
        span_boundary: predicts each token of a masked span also from the positions around the span (SpanBERT; Joshi et
            al. 2020, section 3.2). Needs shards with masked spans, or raises UserError.
        z_loss: the weight of mlm's z-loss.
    """

    next_sentence: bool = True
    span_boundary: bool = False
    z_loss: float = field(default=0.0, kw_only=True)

    @property
    def heads(self) -> Heads:
        following = self.next_sentence
        return Heads(mlm=True, span_boundary=self.span_boundary, next_sentence=following, pooler=following)

    @property
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        terms = ("mlm", *("nsp",) * self.next_sentence, *("sbo",) * self.span_boundary)
        return {**dict.fromkeys(terms, ACCURACY), **z_entry(self.z_loss, ())}

    @property
    def term_weights(self) -> Mapping[str, float]:
        return z_entry(self.z_loss, self.z_loss)

    @property
    def batch_fields(self) -> tuple[str, ...]:
        spans = ("span_left", "span_right", "span_offsets") if self.span_boundary else ()
        return (*MASK_FIELDS, "cls_positions", *spans)

    def counts(self, batch: Batch) -> Counts:
        # nsp is always a term. Without labels its count is 0, so that it adds nothing and has no metrics.
        labelled = batch.next_sentence_weight.sum() if self.next_sentence else jnp.zeros(())
        counts = {"mlm": batch.masked_weights.sum(), "nsp": labelled}
        if self.span_boundary:
            counts["sbo"] = _predictable_weights(batch).sum()
        return counts | z_entry(self.z_loss, counts["mlm"])

    def last_positions(self, batch: Any) -> int | None:
        around = ("span_left", "span_right") if self.span_boundary else ()
        return sum(getattr(batch, name).shape[-1] for name in ("masked_positions", "cls_positions", *around))

    def apply(self, model: Bert, batch: Batch, dropout_key: PRNGKeyArray | None) -> Terms:
        # The last layer is computed only at positions that a head reads.
        vectors = model.encode_at(batch, jnp.concatenate(self.positions(batch), axis=1), dropout_key)
        return self.loss_terms(model, vectors, batch)

    def positions(self, batch: Batch) -> list[Int[Array, "B _"]]:
        """Returns the positions read by the heads: masked ones, [CLS], and positions around spans."""
        around = [batch.span_left, batch.span_right] if self.span_boundary else []
        return [batch.masked_positions, batch.cls_positions, *around]

    def loss_terms(self, model: Bert, vectors: Float[Array, "B K D"], batch: Batch) -> Terms:
        """Computes the terms from the last layer's vectors at `positions`, one group after another."""
        # The groups in the order of `positions`: M masked tokens, S starts, and twice M around spans.
        ends = np.cumsum([part.shape[1] for part in self.positions(batch)])[:-1]
        masked, first, *around = jnp.split(vectors, ends, axis=1)
        sums = vocabulary_sums(vocabulary_product(model, masked), batch.masked_ids, batch.masked_weights)
        none = Term(jnp.zeros(()), {"accuracy": jnp.zeros(())})
        terms = {"mlm": Term(sums.loss, {"accuracy": sums.correct}), "nsp": none}
        if self.next_sentence:
            logits = next_sentence_logits(model, pool_vectors(model, first))
            loss, correct = classification_sums(logits, batch.next_sentence_label, batch.next_sentence_weight)
            terms["nsp"] = Term(loss, {"accuracy": correct})
        if self.span_boundary:
            left, right = around
            product = span_boundary_product(model, left, right, batch.span_offsets)
            of_spans = vocabulary_sums(product, batch.masked_ids, _predictable_weights(batch))
            terms["sbo"] = Term(of_spans.loss, {"accuracy": of_spans.correct})
        return terms | z_entry(self.z_loss, Term(sums.squares, {}))


def _predictable_weights(batch: Batch) -> Float[Array, "B M"]:
    """Weights tokens by whether the span boundary head has an embedding for their offset in the span."""
    if batch.span_offsets is None:
        raise UserError(
            "the span boundary objective needs masked spans; build the shards with --mask_unit=span, or set "
            "config.objective.span_boundary=false"
        )
    return batch.masked_weights * (batch.span_offsets <= SPAN_PLACES)


@dataclass(frozen=True)
class CausalLMObjective(Objective):
    """Each token of a sequence from those before it (lm; Radford et al. 2018, section 3.1).

    No sequence sees another. The first token of a sequence is given; its last ([SEP]) is predicted like any other.
    Masks are undone, so shards of any kind serve.
    """

    heads = Heads(lm=True)
    batch_fields = MASK_FIELDS
    likelihoods: ClassVar = {"lm": Likelihood("", with_special=True)}

    z_loss: float = field(default=0.0, kw_only=True)

    @property
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        return {"lm": ACCURACY, **z_entry(self.z_loss, ())}

    @property
    def term_weights(self) -> Mapping[str, float]:
        return z_entry(self.z_loss, self.z_loss)

    def counts(self, batch: Batch) -> Counts:
        counts = {"lm": continues(batch.sequence_ids).sum()}
        return counts | z_entry(self.z_loss, counts["lm"])

    def apply(self, model: Bert, batch: Batch, dropout_key: PRNGKeyArray | None) -> Terms:
        # The state at position i predicts token i + 1.
        text = unmasked(batch)
        hidden = model.encode(batch._replace(input_ids=text), dropout_key).last
        sums = token_sums(model, hidden[:, :-1], text[:, 1:], continues(batch.sequence_ids))
        return {"lm": Term(sums.loss, {"accuracy": sums.correct})} | z_entry(self.z_loss, Term(sums.squares, {}))


def unmasked(batch: Batch) -> Int[Array, "B T"]:
    """Returns a batch's ids with the original tokens at masked positions."""
    length = batch.input_ids.shape[1]
    # A filler prediction gets a position outside the row, which the scatter drops.
    positions = jnp.where(batch.masked_weights > 0, batch.masked_positions, length)
    rows = jnp.arange(len(positions))[:, None]
    return jnp.asarray(batch.input_ids).at[rows, positions].set(batch.masked_ids, mode="drop")


def token_sums(
    model: Bert, hidden: Float[Array, "B T D"], ids: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> VocabularySums:
    """Returns vocabulary_sums for one token per position."""
    return vocabulary_sums(vocabulary_product(model, hidden), ids, weights)


def continues(sequence_ids: Int[Array, "B T"]) -> Float[Array, "B T-1"]:
    """Marks positions that belong to the same sequence as the position before them."""
    same = (sequence_ids[:, 1:] == sequence_ids[:, :-1]) & (sequence_ids[:, 1:] > 0)
    return same.astype(jnp.float32)
