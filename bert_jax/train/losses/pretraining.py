"""What pretraining learns from: masked tokens, spans from their boundaries, next sentences; or next tokens."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bert_jax.command import UserError
from bert_jax.data.example import Batch
from bert_jax.model.bert import Bert
from bert_jax.model.heads import SPAN_PLACES, Heads
from bert_jax.train.losses.labels import classification_sums
from bert_jax.train.losses.terms import Sums

SLOTS_AT_ONCE = 128  # of each row, whose next tokens are predicted together where memory is saved


@dataclass(frozen=True)
class PretrainingObjective:
    """Masked language model, and what goes with it, their means added.

    next_sentence  its prediction (Devlin et al. 2019, section 3.1). The labels may be those of sentence order (ALBERT;
                   Lan et al. 2020, section 3.1): head and loss are the same. False for shards without labels
                   (full_sentences), as in RoBERTa (Liu et al. 2019, section 4.2): the term then counts nothing and adds
                   nothing.
    span_boundary  each token of a masked span again, from the slots around the span (SpanBERT; Joshi et al. 2020,
                   section 3.2). Needs shards with masks of spans, or raises UserError.
    """

    next_sentence: bool = True
    span_boundary: bool = False

    @property
    def heads(self) -> Heads:
        return Heads(
            mlm=True,
            span_boundary=self.span_boundary,
            next_sentence=self.next_sentence,
            pooler=self.next_sentence,
        )

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of what is measured by it."""
        terms = ("mlm", *("nsp",) * self.next_sentence, *("sbo",) * self.span_boundary)
        return _metrics(terms)

    def counts(self, batch: Batch) -> Sums:
        labelled = batch.next_sentence_weight.sum() if self.next_sentence else jnp.zeros(())
        counts = {"mlm": batch.masked_weights.sum(), "nsp": labelled}
        return counts | ({"sbo": _in_reach(batch).sum()} if self.span_boundary else {})

    def sums(self, model: Bert, batch: Batch, dropout_key: Array | None) -> Sums:
        # Only what is predicted from is computed in the last layer.
        slots = [batch.masked_positions, batch.cls_positions]
        if self.span_boundary:
            slots += [batch.span_left, batch.span_right]
        vectors = model.encode_at(batch, jnp.concatenate(slots, axis=1), dropout_key)
        ends = np.cumsum([part.shape[1] for part in slots])[:-1]
        masked, first, *around = jnp.split(vectors, ends, axis=1)
        loss, correct = classification_sums(model.vocabulary_logits(masked), batch.masked_ids, batch.masked_weights)
        sums = {"mlm_loss": loss, "mlm_correct": correct, "nsp_loss": jnp.zeros(()), "nsp_correct": jnp.zeros(())}
        if self.next_sentence:
            logits = model.next_sentence_logits(model.pool(first))
            loss, correct = classification_sums(logits, batch.next_sentence_label, batch.next_sentence_weight)
            sums |= {"nsp_loss": loss, "nsp_correct": correct}
        if self.span_boundary:
            left, right = around
            logits = model.span_boundary_logits(left, right, batch.span_offsets)
            loss, correct = classification_sums(logits, batch.masked_ids, _in_reach(batch))
            sums |= {"sbo_loss": loss, "sbo_correct": correct}
        return sums


def _in_reach(batch: Batch) -> Float[Array, "B M"]:
    """The weights of predictions that have a place in the span boundary head."""
    if batch.span_offsets is None:
        raise UserError(
            "the span boundary objective needs masks of spans; build the shards with --mask_unit=span, or leave it out"
        )
    return batch.masked_weights * (batch.span_offsets <= SPAN_PLACES)


@dataclass(frozen=True)
class CausalObjective:
    """Each token of a sequence from those before it (Radford et al. 2018, section 3.1); no sequence sees another.

    The first token of a sequence is given, its last ([SEP]) is predicted like any other. Whatever masks the batch has
    are undone, so shards of any kind serve.
    """

    @property
    def heads(self) -> Heads:
        return Heads(lm=True)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of what is measured by it."""
        return _metrics(("lm",))

    def counts(self, batch: Batch) -> Sums:
        return {"lm": _continues(batch.sequence_ids).sum()}

    def sums(self, model: Bert, batch: Batch, dropout_key: Array | None) -> Sums:
        text = unmasked(batch)
        hidden = model.encode(batch._replace(input_ids=text), dropout_key).last
        loss, correct = _token_sums(model, hidden[:, :-1], text[:, 1:], _continues(batch.sequence_ids))
        return {"lm_loss": loss, "lm_correct": correct}


def _metrics(terms: tuple[str, ...]) -> tuple[str, ...]:
    return ("loss", *(f"{term}_{name}" for term in terms for name in ("loss", "accuracy")))


def _token_sums(
    model: Bert, hidden: Float[Array, "B T D"], ids: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """classification_sums of the tokens after each slot.

    Logits of every slot, [B,T,V] in float32, are the largest array of a step by far. Where memory is saved, those of
    a few slots are there at a time, and the backward pass computes them again.
    """

    def sums(hidden: Array, ids: Array, weights: Array) -> tuple[Array, Array]:
        return classification_sums(model.vocabulary_logits(hidden), ids, weights)

    if model.lm_head.runtime.keeps_logits:
        return sums(hidden, ids, weights)

    def by_slots(values: Array) -> Array:  # [B, T, ...] to [T/K, B, K, ...]: each device keeps its rows
        missing = -values.shape[1] % SLOTS_AT_ONCE
        padded = jnp.pad(values, [(0, 0), (0, missing)] + [(0, 0)] * (values.ndim - 2))
        return padded.reshape(len(values), -1, SLOTS_AT_ONCE, *values.shape[2:]).swapaxes(0, 1)

    def add(total: tuple[Array, Array], part: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], None]:
        return jax.tree.map(jnp.add, total, jax.checkpoint(sums)(*part)), None

    parts = (by_slots(hidden), by_slots(ids), by_slots(weights))
    return jax.lax.scan(add, (jnp.zeros(()), jnp.zeros(())), parts)[0]


def unmasked(batch: Batch) -> Int[Array, "B T"]:
    """The ids of a batch with the truth where it was masked."""
    length = batch.input_ids.shape[1]
    slots = jnp.where(batch.masked_weights > 0, batch.masked_positions, length)  # a filler's is no slot: dropped
    rows = jnp.arange(len(slots))[:, None]
    return jnp.asarray(batch.input_ids).at[rows, slots].set(batch.masked_ids, mode="drop")


def _continues(sequence_ids: Int[Array, "B T"]) -> Float[Array, "B T-1"]:
    """1 where a slot is of the same sequence as the one before it."""
    same = (sequence_ids[:, 1:] == sequence_ids[:, :-1]) & (sequence_ids[:, 1:] > 0)
    return same.astype(jnp.float32)
