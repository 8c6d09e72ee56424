"""The objective of span tasks: the types of each span, and the relations between two spans."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bert_jax.model.bert import Bert
from bert_jax.model.heads import Heads, SpanHeads, choose_spans, possible_spans, take_spans
from bert_jax.model.layer import gather_positions
from bert_jax.model.task_outputs import relation_logits, span_logits, span_vectors
from bert_jax.tasks.example import TaskBatch
from bert_jax.tasks.kinds.span_rows import PAIRED
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.task_losses import span_sums
from bert_jax.train.losses import binary_sums, classification_sums
from bert_jax.train.objectives import Counts, Term, Terms

# The boundaries and the content (SpanHeads) of the vectors of spans, by the name of task.span_vectors.
SPAN_VECTORS = {
    "endpoints": ("hidden", "mean"),
    "boundary": ("networks", "mean"),
    "content": ("networks", "attention"),
}
# Candidate spans for each word of a row: a tree over n words has fewer than 2n nodes.
CANDIDATES = 2


class SpanOutputs(NamedTuple):
    """The outputs of the heads: W words in each row, spans of up to K words, vectors of size G = 3D."""

    vectors: Any  # f32[B,W,K,G]
    logits: Any  # f32[B,W,K,C], class 0 is none, unless scores are binary; None if spans are given
    relations: Any  # f32[B,P,P,1+Q] between the paired spans, class 0 is none; None without relations


class SpanAnswer(NamedTuple):
    """The arrays from which the spans and relations of a row are decoded.

    | field | dtype, shape | |
    |---|---|---|
    | places | i32[2W] | the best of all spans with a type, best first: (word * K + length - 1) * C + type |
    | scores | f32[2W] | their probabilities; 0 where there is no span |
    | pair_firsts, pair_lengths | i32[P] | the spans between which relations are predicted; length 0: none |
    | relations, relation_scores | i32, f32 [P,P] | from span p to span q: 0 for none, else the relation's id + 1;
      and its probability |

    A field that the task does not need is None.
    """

    places: Any
    scores: Any
    pair_firsts: Any
    pair_lengths: Any
    relations: Any
    relation_scores: Any


@dataclass(frozen=True)
class SpanObjective(TaskObjective):
    """Cross-entropy over all spans of up to `length` words, and over all pairs of a row's true spans.

    Spans: Jurafsky and Martin, Speech and Language Processing, 3rd edition, "Fine-tuning for Span-Based Applications";
    spans with and without a type weigh the same. The vector of a span is computed from the hidden states of the first
    pieces of its words. With binary scores, the losses of a span's types are summed. Relations: trained between true
    spans and predicted between predicted ones (Zhong and Chen 2021, section 3.2), from the vectors of Luan et al.
    2018; they have a separate loss term.
    """

    length: int
    types: int
    binary: bool
    relations: int  # the number of relation labels; 0: none are predicted
    given: bool  # spans are part of the input
    vectors: str = "endpoints"  # one of SPAN_VECTORS
    relation_threshold: float = 0.0  # the least probability of a predicted relation; 0: that of none

    @property
    def heads(self) -> Heads:
        classes = 0 if self.given else self.types + (not self.binary)
        relations = self.relations + 1 if self.relations else 0
        boundaries, content = SPAN_VECTORS[self.vectors]
        return Heads(spans=SpanHeads(self.length, boundaries, content, classes, relations))

    @property
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        terms = ("task", "relation") if self.relations and not self.given else ("task",)
        return dict.fromkeys(terms, ("accuracy",))

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> SpanOutputs:
        labels = batch.labels
        hidden = gather_positions(model.encode(batch, dropout_key).last, labels.word_slots)
        vectors = span_vectors(model, hidden, dropout_key)
        logits = None if self.given else span_logits(model, vectors, dropout_key)
        relations = None
        if self.relations:
            paired = take_spans(vectors, labels.pair_firsts, jnp.maximum(labels.pair_lengths, 1))
            relations = relation_logits(model, paired, dropout_key)
        return SpanOutputs(vectors, logits, relations)

    def terms_of(self, model: Bert, outputs: SpanOutputs, batch: TaskBatch) -> Terms:
        labels, weights = batch.labels, batch.label_weights
        terms: Terms = {}
        if not self.given:
            if self.binary:
                by_type = jnp.broadcast_to(weights[..., None], outputs.logits.shape)
                loss, _ = binary_sums(outputs.logits, labels.types, by_type)
                right = ((outputs.logits >= 0) == (labels.types > 0)).all(axis=-1)
                terms["task"] = Term(loss, {"accuracy": (right * weights).sum()})
            else:
                loss, correct = span_sums(outputs.logits, labels.types, weights)
                terms["task"] = Term(loss, {"accuracy": correct})
        if self.relations:
            loss, correct = classification_sums(outputs.relations, labels.relations, labels.relation_weights)
            terms["task" if self.given else "relation"] = Term(loss, {"accuracy": correct})
        return terms

    def counts(self, batch: TaskBatch) -> Counts:
        """`task`, the spans, and `relation`, the pairs; where spans are given, `task` is the pairs."""
        if self.given:
            return {"task": batch.labels.relation_weights.sum()}
        spans = {"task": batch.label_weights.sum()}
        return spans | ({"relation": batch.labels.relation_weights.sum()} if self.relations else {})

    def answers(self, model: Bert, outputs: SpanOutputs, batch: TaskBatch) -> SpanAnswer:
        labels = batch.labels
        if self.given:
            return SpanAnswer(
                None, None, labels.pair_firsts, labels.pair_lengths, *self.relations_of(outputs.relations)
            )
        possible = possible_spans(labels.words, self.length)
        shares = jnp.where(possible[..., None], self._shares(outputs.logits), 0)
        flat = shares.reshape(shares.shape[0], -1)
        scores, places = jax.lax.top_k(flat, min(CANDIDATES * labels.words.shape[1], flat.shape[1]))
        if not self.relations:
            return SpanAnswer(places, scores, None, None, None, None)
        firsts, lengths, exists = choose_spans(shares.max(axis=-1), possible, PAIRED)
        relations = relation_logits(model, take_spans(outputs.vectors, firsts, lengths))
        return SpanAnswer(places, scores, firsts, jnp.where(exists, lengths, 0), *self.relations_of(relations))

    def _shares(self, logits: Float[Array, "B W K C"]) -> Float[Array, "B W K S"]:
        """The probability of each of S types. With classes, all but the best are 0, so that a span has one type."""
        if self.binary:
            return jax.nn.sigmoid(logits)
        shares = jax.nn.softmax(logits, axis=-1)[..., 1:]
        return jnp.where(shares >= shares.max(axis=-1, keepdims=True), shares, 0)

    def relations_of(self, logits: Float[Array, "B P P C"]) -> tuple[Int[Array, "B P P"], Float[Array, "B P P"]]:
        """The most probable relation of each pair and its probability; 0 and that of none where none is predicted."""
        shares = jax.nn.softmax(logits, axis=-1)
        none, best = shares[..., 0], shares[..., 1:].max(axis=-1)
        predicted = best >= self.relation_threshold if self.relation_threshold else best > none
        relations = jnp.where(predicted, 1 + shares[..., 1:].argmax(axis=-1), 0)
        return relations.astype(jnp.int32), jnp.where(predicted, best, none)
