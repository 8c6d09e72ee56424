"""Objectives for a student that also learns from a teacher's outputs (soft targets) and hidden states.

The teacher's parameters are constants of the run: they are bound next to the student's, sharded by the same rules, and
neither trained nor saved. The teacher has no dropout. Held-out rows are measured by the objective without the teacher.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from bert_jax.config import DistillConfig, ModelConfig
from bert_jax.config.training import Pairs
from bert_jax.model import bert
from bert_jax.model.bert import Bert
from bert_jax.model.heads.basic import HIDDEN_PROJECTION
from bert_jax.model.heads.config import Heads
from bert_jax.model.heads.structured import IMPOSSIBLE
from bert_jax.model.outputs import vocabulary_logits
from bert_jax.model.runtime import Runtime
from bert_jax.model.transformer import Encoded, gather_positions
from bert_jax.shapes import padded_vocabulary
from bert_jax.train.losses import Scalar, hidden_sum, soft_class_sum
from bert_jax.train.objectives.language_modeling import MaskedLMObjective
from bert_jax.train.objectives.objective import Counts, Objective, Term, Terms

TEACHER = "teacher"  # the first component of the paths of the teacher's parameters
SOFT, HIDDEN = "soft", "hidden"  # the terms of the loss


@dataclass(frozen=True)
class Teacher:
    """The architecture of a teacher, and the heads whose outputs are soft targets."""

    model: ModelConfig
    heads: Heads


class Pair(NamedTuple):
    """Both models, bound to their parameters."""

    student: Bert
    teacher: Bert


@dataclass(frozen=True)
class DistilledObjective(Objective):
    """An objective, times hard_weight, and two terms by which its student learns from a teacher (DistillConfig).

    soft     T^2 KL(teacher || student) of the distributions that the subclass compares, at temperature T
    hidden   the distance of hidden states, summed over `pairs` of layers, at all tokens. If the widths differ, a
             projection of the student's is trained, too (heads.hidden_projection)

    Each term is a mean: soft over the compared positions, hidden over tokens. A subclass computes the objective's terms
    and the soft sum with one forward pass of each model (`compare`).
    """

    base: Any  # the objective without a teacher
    teacher: Teacher
    config: DistillConfig = field(hash=False)  # pairs of layers are a dict; jit's cache compares them by ==
    pairs: Pairs = ()
    projection: int = 0  # the teacher's width, if hidden states are projected to it

    @abc.abstractmethod
    def compare(self, models: Pair, batch: Any, dropout_key: PRNGKeyArray | None) -> tuple[Terms, Scalar]:
        """Returns the base objective's terms, and the soft sum, which is not read if soft_weight is 0."""

    @abc.abstractmethod
    def soft_count(self, batch: Any) -> Float[Array, ""]:
        """Returns the denominator of the soft term."""

    @property
    def heads(self) -> Heads:
        return replace(self.base.heads, hidden_projection=self.projection)

    @property
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        return {**self.base.term_metrics, **dict.fromkeys(self._weights, ())}

    @property
    def _weights(self) -> dict[str, float]:
        """The weights of the teacher's terms."""
        weights = {SOFT: self.config.soft_weight, HIDDEN: self.config.hidden_weight}
        return {name: weight for name, weight in weights.items() if weight}

    @property
    def term_weights(self) -> Mapping[str, float]:
        hard, own = self.config.hard_weight, self.base.term_weights
        # hard_weight scales the objective as a whole, so it multiplies the weights that the objective gives its own
        # terms.
        return {name: hard * own.get(name, 1.0) for name in self.base.term_metrics} | self._weights

    @property
    def evaluated(self) -> Objective:
        return self.base

    def evaluated_params(self, params: dict[str, Any]) -> dict[str, Any]:
        # The projection serves training only, and the objective without a teacher has no such head.
        return {name: part for name, part in params.items() if name != HIDDEN_PROJECTION}

    @property
    def predicts_all(self) -> bool:
        return self.base.predicts_all

    @property
    def compares_rows(self) -> bool:
        return self.base.compares_rows

    @property
    def batch_fields(self) -> tuple[str, ...]:
        return self.base.batch_fields

    def extend_batch(self, batch: Any) -> Any:
        return self.base.extend_batch(batch)

    def corrupt(self, batch: Any, key: PRNGKeyArray) -> Any:
        return self.base.corrupt(batch, key)

    def bind(self, config: ModelConfig, params: dict[str, Any], runtime: Runtime) -> Pair:
        own = {name: part for name, part in params.items() if name != TEACHER}
        # The teacher needs no savings of a backward pass, and no kernel that was chosen for the student.
        forward_only = replace(runtime, frozen_layers=0, remat="none", attention="auto", logits_at_once=0)
        return Pair(
            bert.bind(config, self.heads, own, runtime),
            bert.bind(self.teacher.model, self.teacher.heads, params[TEACHER], forward_only),
        )

    def counts(self, batch: Any) -> Counts:
        counts = dict(self.base.counts(batch))
        if SOFT in self._weights:
            counts[SOFT] = self.soft_count(batch)
        if HIDDEN in self._weights:
            counts[HIDDEN] = (batch.sequence_ids > 0).sum().astype(jnp.float32)
        return counts

    def apply(self, model: Pair, batch: Any, dropout_key: PRNGKeyArray | None) -> Terms:
        # The models report the states of all layers as they compute them, so that no pass is repeated.
        encoded: dict[str, tuple[Any, Encoded]] = {}
        if self.pairs:
            model.student.watch(lambda *seen: encoded.update(student=seen))
            model.teacher.watch(lambda *seen: encoded.update(teacher=seen))
        terms, soft = self.compare(model, batch, dropout_key)
        if SOFT in self._weights:
            terms = terms | {SOFT: Term(soft, {})}
        if HIDDEN in self._weights:
            read, ours = encoded["student"]  # the rows of the batch, or their parts, such as single choices
            if "teacher" not in encoded:  # a comparison without soft targets does not run the teacher
                model.teacher.encode(read)
            theirs = encoded["teacher"][1]
            total, real = jnp.zeros(()), (read.sequence_ids > 0).astype(jnp.float32)
            for own_layer, layer in self.pairs:
                states = _states(ours, own_layer)
                if self.projection:
                    states = model.student.head(HIDDEN_PROJECTION)(states)
                total += hidden_sum(self.config.hidden_loss, states, _states(theirs, layer), real)
            terms = terms | {HIDDEN: Term(total, {})}
        return terms


@dataclass(frozen=True)
class DistilledMaskedLM(DistilledObjective):
    """Masked language modeling with a teacher (DistilBERT; Sanh et al. 2019, section 3).

    The soft term compares the vocabulary's tokens, at masked positions or at all (config.positions), as in
    distiller.py of huggingface/transformers, whose restrict_ce_to_mask is the former.
    """

    base: MaskedLMObjective
    words: int = 0  # the size of the vocabulary; either model may have further rows in its table

    @property
    def predicts_all(self) -> bool:
        return SOFT in self._weights and self.config.positions == "all"

    def last_positions(self, batch: Any) -> int | None:
        return None if self.pairs or self.predicts_all else self.base.last_positions(batch)

    def soft_count(self, batch: Any) -> Float[Array, ""]:
        return self._soft_weights(batch).sum()

    def compare(self, models: Pair, batch: Any, dropout_key: PRNGKeyArray | None) -> tuple[Terms, Scalar]:
        wanted = self.base.positions(batch)
        # Groups come in the order of `positions`, masked tokens first, so the first columns of `vectors` are theirs.
        groups = jnp.concatenate(wanted, axis=1)
        student, teacher = models
        if not self.pairs and not self.predicts_all:  # the last layers are computed at the predicted positions only
            vectors = student.encode_at(batch, groups, dropout_key)
            masked = vectors[:, : wanted[0].shape[1]]
            theirs = teacher.encode_at(batch, batch.masked_positions)
        else:
            hidden = student.encode(batch, dropout_key).last
            vectors, masked = gather_positions(hidden, groups), hidden
            theirs = teacher.encode(batch).last
            if not self.predicts_all:
                masked, theirs = (gather_positions(states, batch.masked_positions) for states in (hidden, theirs))
        terms = self.base.loss_terms(student, vectors, batch)
        if SOFT not in self._weights:
            return terms, jnp.zeros(())
        logits, targets = self._logits(student, masked), self._logits(teacher, theirs)
        return terms, soft_class_sum(logits, targets, self._soft_weights(batch), self.config.temperature)

    def _soft_weights(self, batch: Any) -> Float[Array, "B M"]:
        if self.predicts_all:
            return (batch.sequence_ids > 0).astype(jnp.float32)
        return (batch.masked_weights > 0).astype(jnp.float32)

    def _logits(self, model: Bert, states: Float[Array, "B M D"]) -> Float[Array, "B M V"]:
        """Returns equally many finite logits for both models; table rows beyond the vocabulary get no probability."""
        logits = vocabulary_logits(model, states)[..., : padded_vocabulary(self.words)]
        # Finite in place of -inf: the divergence multiplies differences of logits by probabilities, and 0 times
        # infinity is NaN.
        return jnp.where(jnp.arange(logits.shape[-1]) < self.words, logits, IMPOSSIBLE)


def _states(encoded: Encoded, layer: int) -> Float[Array, "B T D"]:
    """Returns the hidden states after a layer, counted from 1; 0: the embeddings."""
    if layer == 0:
        return encoded.embeddings
    assert encoded.layers is not None, "Bert.watch asks for all layers"
    return encoded.layers[layer - 1]
