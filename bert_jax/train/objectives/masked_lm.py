"""The objective of BERT and its encoder family: masked tokens, next sentences, span boundaries."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bert_jax.command import UserError
from bert_jax.data.example import Batch
from bert_jax.model.bert import Bert
from bert_jax.model.head_outputs import (
    next_sentence_logits,
    pool_vectors,
    span_boundary_product,
    vocabulary_product,
)
from bert_jax.model.heads import SPAN_PLACES, Heads
from bert_jax.train.losses import classification_sums, vocabulary_sums
from bert_jax.train.objectives.objective import Counts, Objective, Term, Terms
from bert_jax.train.objectives.z_loss import z_counts, z_metrics, z_terms, z_weights

ACCURACY = ("accuracy",)


@dataclass(frozen=True)
class MaskedLMObjective(Objective):
    """Masked language modeling (mlm), next sentence prediction (nsp) and the span boundary objective (sbo).

    next_sentence  adds the prediction of the next sentence (Devlin et al. 2019, section 3.1). The labels may be those
                   of sentence order (ALBERT; Lan et al. 2020, section 3.1): head and loss are the same. False for
                   shards without labels (full_sentences), as in RoBERTa (Liu et al. 2019, section 4.2), and with
                   config.next_sentence=false: the term then counts nothing and adds nothing.
    span_boundary  predicts each token of a masked span also from the positions around the span (SpanBERT; Joshi et
                   al. 2020, section 3.2). Needs shards with masked spans, or raises UserError.
    z_loss         the weight of the z-loss of mlm (z_loss.py)
    """

    next_sentence: bool = True
    span_boundary: bool = False
    z_loss: float = field(default=0.0, kw_only=True)

    @property
    def heads(self) -> Heads:
        return Heads(
            mlm=True,
            span_boundary=self.span_boundary,
            next_sentence=self.next_sentence,
            pooler=self.next_sentence,
        )

    @property
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        terms = ("mlm", *("nsp",) * self.next_sentence, *("sbo",) * self.span_boundary)
        return {**dict.fromkeys(terms, ACCURACY), **z_metrics(self.z_loss)}

    @property
    def term_weights(self) -> Mapping[str, float]:
        return z_weights(self.z_loss)

    @property
    def batch_fields(self) -> tuple[str, ...]:
        fields = ("masked_positions", "masked_ids", "masked_weights", "cls_positions")
        return (*fields, "span_left", "span_right", "span_offsets") if self.span_boundary else fields

    def counts(self, batch: Batch) -> Counts:
        labelled = batch.next_sentence_weight.sum() if self.next_sentence else jnp.zeros(())
        counts = {"mlm": batch.masked_weights.sum(), "nsp": labelled}
        if self.span_boundary:
            counts["sbo"] = _predictable_weights(batch).sum()
        return counts | z_counts(self.z_loss, counts, "mlm")

    def apply(self, model: Bert, batch: Batch, dropout_key: PRNGKeyArray | None) -> Terms:
        # The last layer is computed only at the positions that a head reads.
        vectors = model.encode_at(batch, jnp.concatenate(self.positions(batch), axis=1), dropout_key)
        return self.terms_of(model, vectors, batch)

    def positions(self, batch: Batch) -> list[Int[Array, "B _"]]:
        """The positions of each row that the heads read: the masked ones, those of [CLS], those around spans."""
        around = [batch.span_left, batch.span_right] if self.span_boundary else []
        return [batch.masked_positions, batch.cls_positions, *around]

    def terms_of(self, model: Bert, vectors: Float[Array, "B K D"], batch: Batch) -> Terms:
        """The terms of the loss from the last layer's vectors at `positions`, one group after another."""
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
        return terms | z_terms(self.z_loss, sums)


def _predictable_weights(batch: Batch) -> Float[Array, "B M"]:
    """The weights of the tokens whose offset in their span the span boundary head has an embedding for."""
    if batch.span_offsets is None:
        raise UserError(
            "the span boundary objective needs masked spans; build the shards with --mask_unit=span, or set "
            "config.span_boundary=false"
        )
    return batch.masked_weights * (batch.span_offsets <= SPAN_PLACES)
