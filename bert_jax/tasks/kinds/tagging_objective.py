"""The objective of tagging: the loss of the tags of a row's words, and the tags that are predicted."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bert_jax.model.bert import Bert
from bert_jax.model.heads import Heads
from bert_jax.model.heads.crf import Allowed, allowed_by
from bert_jax.model.heads.tag_scheme import Scheme
from bert_jax.model.task_outputs import encode_for_task, tag_logits
from bert_jax.tasks.example import TaskBatch
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.task_losses import chain_sums
from bert_jax.train.losses import PLAIN, ClassCosts, Scalar, classification_sums
from bert_jax.train.objectives import Counts, Term, Terms
from bert_jax.train.soft_losses import soft_class_sum

HIGHEST = jax.lax.Precision.HIGHEST


class TagLabels(NamedTuple):
    """The value of TaskBatch.labels."""

    tags: Any  # i32[B,T]
    words: Any  # i32[B,T]: number of the piece's word in its row, from 1, labelled or not; 0: no word
    whole: Any  # bool[B,2]: whether the row begins and ends where its sentence does


class TagAnswer(NamedTuple):
    """The prediction for the word that starts at each position of a row."""

    tags: Any  # i32[T]: ids
    scores: Any  # f32[T]: their probabilities; with a CRF, that of all paths with this tag here


@dataclass(frozen=True)
class TagObjective(TaskObjective):
    """Cross-entropy of the tags of the pieces that are trained (Devlin et al. 2019, section 5.3).

    With crf, minus the log-likelihood of the tags of a row's words (Lample et al. 2016, section 2.2).
    """

    tags: int
    decode: str = "first"
    crf: bool = False
    costs: ClassCosts = PLAIN
    layer_mix: bool = False
    scheme: Scheme | None = None  # of the tags of a crf; None: any tag may follow any other

    @property
    def heads(self) -> Heads:
        return Heads(tags=self.tags, crf=self.crf, layer_mix=self.layer_mix)

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B T C"]:
        """Logits of the tags at each position."""
        return tag_logits(model, encode_for_task(model, batch, dropout_key), dropout_key)

    def terms_of(self, model: Bert, outputs: Float[Array, "B T C"], batch: TaskBatch) -> Terms:
        tags, weights = batch.labels.tags, batch.label_weights
        if self.crf:
            allowed = allowed_by(self.scheme, batch.labels.whole)
            loss, correct = chain_sums(model.head("crf"), outputs, tags, weights, batch.sequence_ids, allowed)
        else:
            loss, correct = classification_sums(outputs, tags, weights, self.costs)
        return {"task": Term(loss, {"accuracy": correct})}

    def counts(self, batch: TaskBatch) -> Counts:
        return {"task": self.costs.weigh(batch.labels.tags, batch.label_weights).sum()}

    @property
    def has_soft_targets(self) -> bool:
        return not self.crf

    def soft_sum(
        self, outputs: Float[Array, "B T C"], teacher: Float[Array, "B T C"], batch: TaskBatch, temperature: float
    ) -> Scalar:
        return soft_class_sum(outputs, teacher, batch.label_weights, temperature)

    def answers(self, model: Bert, outputs: Float[Array, "B T C"], batch: TaskBatch) -> TagAnswer:
        """The predicted tag and its probability at each position, [B, T]."""
        if self.crf:
            return _best_path(model, outputs, batch, allowed_by(self.scheme, batch.labels.whole))
        shares = jax.nn.softmax(outputs, axis=-1)
        if self.decode == "mean":
            shares = _word_means(shares, batch.labels.words)
        return TagAnswer(shares.argmax(axis=-1).astype(jnp.int32), shares.max(axis=-1))


def _best_path(model: Bert, logits: Float[Array, "B T C"], batch: TaskBatch, allowed: Allowed | None) -> TagAnswer:
    words = batch.labels.words
    first_pieces = (words > 0) & (words != jnp.pad(words[:, :-1], ((0, 0), (1, 0))))

    def log_partition(logits: Float[Array, "B T C"]) -> Float[Array, ""]:
        return model.head("crf").log_partition(logits, first_pieces, batch.sequence_ids, allowed).sum()

    path, _ = model.head("crf").decode(logits, first_pieces, batch.sequence_ids, allowed)
    # The derivative of the log-partition by a tag's logit is the probability of the tag there.
    marginals = jax.grad(log_partition)(logits)
    return TagAnswer(path, jnp.take_along_axis(marginals, path[..., None], axis=-1)[..., 0])


def _word_means(shares: Float[Array, "B T C"], words: Int[Array, "B T"]) -> Float[Array, "B T C"]:
    """At each position, the mean over all positions of the same word."""
    same = (words[:, :, None] == words[:, None, :]).astype(shares.dtype)
    return jnp.einsum("bts,bsc->btc", same, shares, precision=HIGHEST) / same.sum(axis=-1, keepdims=True)
