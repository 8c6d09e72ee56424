"""Loss functions of fine-tuning tasks; conventions as in bert_jax.train.losses."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bert_jax.model.heads.crf import CRF, IMPOSSIBLE, Allowed
from bert_jax.train.losses import Scalar, binary_sums, classification_sums


def squared_error_sum(
    scores: Float[Array, "*shape"], targets: Float[Array, "*shape"], weights: Float[Array, "*shape"]
) -> Scalar:
    """Returns the weighted sum of squared errors between scores and targets, for sequences or tokens."""
    return (jnp.square(scores.astype(jnp.float32) - targets) * weights).sum()


def choice_sums(
    scores: Float[Array, "B S"],
    present: Bool[Array, "B S"],
    labels: Int[Array, "B"],
    weights: Float[Array, "B"],
    smoothing: float = 0.0,
) -> tuple[Scalar, Scalar]:
    """Returns the cross-entropy of the correct choice and `correct`, with a softmax over the scores of present choices.

    Source: Radford et al. 2018, section 3.3; Devlin et al. 2019, section 4.4 (SWAG). Label
    smoothing is uniform over the present choices.
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
    """Returns the mean of the start and end cross-entropies, and how often both positions are predicted correctly.

    Source: Devlin et al. 2019, section 4.2; the mean of the two is taken as in google-research/bert,
    run_squad.py. For a question without an answer, start and end are the position of [CLS]
    (section 4.3). `possible` marks the positions of the sequence, over which the softmax is taken.
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
    allowed: Allowed | None = None,
) -> tuple[Scalar, Scalar]:
    """Returns the negative log-likelihood of the tags under a linear-chain CRF, and `correct` for the best path.

    Source: Lafferty et al. 2001; Lample et al. 2016, section 2.2. Weights are 0 or 1, and the chain
    of a sequence consists of its positions with weight 1, in order. Divided by the number of these
    positions, the loss is comparable with that of classification_sums. The tags are among the allowed ones.
    """
    tagged = weights > 0
    loss = chain.log_partition(logits, tagged, sequence_ids, allowed)
    loss -= chain.score(logits, tags, tagged, sequence_ids, allowed)
    best, _ = chain.decode(jax.lax.stop_gradient(logits), tagged, sequence_ids, allowed)
    return loss.sum(), ((best == tags) * weights).sum()


def span_sums(
    logits: Float[Array, "B T K C"], labels: Int[Array, "B T K"], weights: Float[Array, "B T K"]
) -> tuple[Scalar, Scalar]:
    """Returns the cross-entropy and `correct` over all spans up to the maximum length K.

    With C = 1 the loss is binary: span or no span. With C > 1 it is a softmax over span classes,
    of which class 0 is NULL. Weights are 0 for spans that do not lie within one sequence
    (Bert.possible_spans). Source: Jurafsky and Martin, Speech and Language Processing, 3rd edition,
    "Fine-tuning for Span-Based Applications".
    """
    if logits.shape[-1] == 1:
        return binary_sums(logits[..., 0], labels, weights)
    return classification_sums(logits, labels, weights)
