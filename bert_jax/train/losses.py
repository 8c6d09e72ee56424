"""Losses of the outputs of heads: weighted sums over everything that has a label.

Logits are converted to float32, and a weight of 0 adds nothing. Losses are never means: the train step divides once,
by a count over the whole global batch. `correct` is the weighted number of correct predictions; a tie between the
label and another class counts as correct.

Classes may have weights and labels may be smoothed (ClassCosts). Losses, `correct` and denominators (ClassCosts.weigh)
then include the class weights, so that their quotient equals torch.nn.functional.cross_entropy(weight=,
label_smoothing=), whose mean divides by the weights of the labels.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bert_jax.model.heads import CRF

# The logit of what cannot be chosen. Finite, so that a filler row in which nothing can be is no NaN.
IMPOSSIBLE = -1e30

Scalar = Float[Array, ""]


@dataclass(frozen=True)
class ClassCosts:
    """How the cost of a class departs from its plain cross-entropy.

    weights    of the classes, in their order; empty: 1 each
    smoothing  the truth is 1 - smoothing of its class and smoothing of the uniform distribution (Szegedy et al. 2016,
               section 7)
    """

    weights: tuple[float, ...] = ()
    smoothing: float = 0.0

    def weigh(self, labels: Int[Array, "*shape"], weights: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Weights of what is labelled, times those of its classes."""
        return weights * jnp.array(self.weights, jnp.float32)[labels] if self.weights else weights


PLAIN = ClassCosts()


def classification_sums(
    logits: Float[Array, "*shape C"],
    labels: Int[Array, "*shape"],
    weights: Float[Array, "*shape"],
    costs: ClassCosts = PLAIN,
) -> tuple[Scalar, Scalar]:
    """Cross-entropy in nats, and correct: of classes, tags, tokens, span classes, relations."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    # The greatest logit is wanted by the softmax anyway; an argmax would be a second, slower pass over the classes.
    top = jax.lax.stop_gradient(logits).max(axis=-1)
    total = jax.nn.logsumexp(logits, axis=-1)
    weighed = costs.weigh(labels, weights)
    loss = ((total - picked) * weighed).sum()
    if costs.smoothing:
        of_class = jnp.array(costs.weights or (1.0,) * logits.shape[-1], jnp.float32) / logits.shape[-1]
        each = total[..., None] - logits
        uniform = jnp.einsum("...c,c->...", each, of_class, precision=jax.lax.Precision.HIGHEST)
        loss = (1 - costs.smoothing) * loss + costs.smoothing * (uniform * weights).sum()
    return loss, ((picked >= top) * weighed).sum()


def binary_sums(
    logits: Float[Array, "*shape"], labels: Int[Array, "*shape"], weights: Float[Array, "*shape"]
) -> tuple[Scalar, Scalar]:
    """Cross-entropy in nats of yes (label 1, probability sigmoid(logit)) and no, and correct by a threshold of 1/2."""
    signed = jnp.where(labels > 0, logits, -logits).astype(jnp.float32)
    return (jax.nn.softplus(-signed) * weights).sum(), ((signed >= 0) * weights).sum()


def squared_error_sum(
    scores: Float[Array, "*shape"], targets: Float[Array, "*shape"], weights: Float[Array, "*shape"]
) -> Scalar:
    """Squared error of the scores of sequences or of tokens."""
    return (jnp.square(scores.astype(jnp.float32) - targets) * weights).sum()


def choice_sums(
    scores: Float[Array, "B S"],
    present: Bool[Array, "B S"],
    labels: Int[Array, "B"],
    weights: Float[Array, "B"],
    smoothing: float = 0.0,
) -> tuple[Scalar, Scalar]:
    """Cross-entropy of the right one among the choices that are present, softmax over their scores, and correct.

    Radford et al. 2018, section 3.3; Devlin et al. 2019, section 4.4 (SWAG). Smoothing is over those that are present.
    """
    masked = jnp.where(present, scores.astype(jnp.float32), IMPOSSIBLE)
    loss, correct = classification_sums(masked, labels, weights)
    if smoothing:
        each = jnp.where(present, jax.nn.logsumexp(masked, axis=-1, keepdims=True) - masked, 0)
        uniform = each.sum(axis=-1) / jnp.maximum(present.sum(axis=-1), 1)
        loss = (1 - smoothing) * loss + smoothing * (uniform * weights).sum()
    return loss, correct


def answer_sums(
    logits: Float[Array, "B T 2"],
    possible: Bool[Array, "B T"],
    starts: Int[Array, "B"],
    ends: Int[Array, "B"],
    weights: Float[Array, "B"],
) -> tuple[Scalar, Scalar]:
    """Half the cross-entropies of an answer's first and last slot, and how often both are guessed.

    Devlin et al. 2019, section 4.2; halved as google-research/bert's run_squad.py does. Where there is no answer, both
    are the slot of [CLS] (section 4.3). possible are the slots that the softmax is over: those of the sequence.
    """
    masked = jnp.where(possible[..., None], logits.astype(jnp.float32), IMPOSSIBLE)
    truth = jnp.stack([starts, ends], axis=-1)
    picked = jnp.take_along_axis(masked, truth[:, None], axis=1)[:, 0]
    right = (picked >= jax.lax.stop_gradient(masked).max(axis=1)).all(axis=-1)
    losses = (jax.nn.logsumexp(masked, axis=1) - picked).mean(axis=-1)
    return (losses * weights).sum(), (right * weights).sum()


def chain_sums(
    chain: CRF,
    logits: Float[Array, "B T C"],
    tags: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    sequence_ids: Int[Array, "B T"],
) -> tuple[Scalar, Scalar]:
    """Minus the log-likelihood of the tags under a linear-chain CRF, and correct tags of the best path.

    Lafferty et al. 2001; Lample et al. 2016, section 2.2. A chain runs through the slots of a sequence that weigh
    anything, in order; their weights are 0 or 1. Divided by the count of these slots it compares with
    classification_sums.
    """
    tagged = weights > 0
    loss = chain.log_partition(logits, tagged, sequence_ids) - chain.score(logits, tags, tagged, sequence_ids)
    best, _ = chain.decode(jax.lax.stop_gradient(logits), tagged, sequence_ids)
    return loss.sum(), ((best == tags) * weights).sum()


def span_sums(
    logits: Float[Array, "B T K C"], labels: Int[Array, "B T K"], weights: Float[Array, "B T K"]
) -> tuple[Scalar, Scalar]:
    """Cross-entropy over all spans up to a length, and correct: C = 1 asks whether it is one, else class 0 is NULL.

    Jurafsky and Martin, Speech and Language Processing, 3rd edition, "Fine-tuning for Span-Based Applications". Weights
    are 0 for what is no span of one sequence (Bert.possible_spans).
    """
    if logits.shape[-1] == 1:
        return binary_sums(logits[..., 0], labels, weights)
    return classification_sums(logits, labels, weights)
