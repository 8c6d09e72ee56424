"""Losses over the vectors of texts, whose negatives are the other rows of the whole global batch.

Under shard_map each device holds its own rows; it gathers the vectors of all rows, and computes the loss of its own.
The gradient of a gathered vector is the sum of those that all devices compute, so loss and gradient are the same on any
mesh. R is the number of rows of the whole batch, S the texts of a row: an anchor, a positive and hard negatives.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bert_jax.model.heads.pooling import unit_vectors
from bert_jax.model.placement import Placement
from bert_jax.tasks.task_losses import IMPOSSIBLE
from bert_jax.train.losses import Scalar


class TextVectors(NamedTuple):
    """The vectors of the rows that a device holds."""

    vectors: Float[Array, "B S D"]
    present: Bool[Array, "B S"]
    weights: Float[Array, "B"]  # 0 for a filler
    numbers: Int[Array, "B"]  # of the rows in their file


def contrastive_sums(own: TextVectors, placement: Placement, scale: float, symmetric: bool) -> tuple[Scalar, Scalar]:
    """Returns the summed cross-entropy of finding each anchor's positive, and how many have the highest score alone.

    The candidates of an anchor are the positives and the hard negatives of all rows of the batch; a score is the
    cosine times scale (van den Oord et al. 2018, section 2.3; Henderson et al. 2017, section 4.4, with in-batch
    negatives). With symmetric, the loss is the mean of this one and that of finding each positive's anchor among all
    anchors (Radford et al. 2021, figure 3). This is MultipleNegativesRankingLoss of sentence-transformers. Where a row
    is in the batch twice, as at the end of an epoch, neither is a candidate of the other.
    """
    units = unit_vectors(own.vectors)
    rows = placement.gather_rows(units)
    real = placement.gather_rows(own.present & (own.weights > 0)[:, None])
    first, _ = placement.row_numbers(units.shape[0])
    right = first + jnp.arange(units.shape[0])
    numbers = placement.gather_rows(own.numbers)
    itself = jnp.arange(len(numbers))[None] == right[:, None]
    other = itself | (numbers[None] != own.numbers[:, None])
    candidates = jnp.swapaxes(rows[:, 1:], 0, 1).reshape(-1, rows.shape[-1])  # all positives come first
    possible = jnp.tile(other, rows.shape[1] - 1) & real[:, 1:].T.reshape(1, -1)
    scores = _scores(units[:, 0], candidates, possible, scale)
    picked = jnp.take_along_axis(scores, right[:, None], axis=1)[:, 0]
    losses = jax.nn.logsumexp(scores, axis=1) - picked
    if symmetric:
        backward = _scores(units[:, 1], rows[:, 0], other & real[None, :, 0], scale)
        losses = (losses + jax.nn.logsumexp(backward, axis=1) - picked) / 2
    others = jnp.arange(scores.shape[1])[None] != right[:, None]
    highest = jnp.where(others, jax.lax.stop_gradient(scores), IMPOSSIBLE).max(axis=1)
    correct = picked > highest  # false where a score is NaN
    return (losses * own.weights).sum(), (correct * own.weights).sum()


def cosent_sum(own: TextVectors, targets: Float[Array, "B"], placement: Placement, scale: float) -> Scalar:
    """Returns log(1 + sum exp(scale * (s_i - s_j))) over all pairs of rows with target_i < target_j, times the rows.

    s is the cosine of a row's two texts (Huang et al. 2024, CoSENT, section 3.3). The loss belongs to the batch as a
    whole: each row counts as an equal share of it, so that dividing by the number of rows gives the loss.
    """
    units = unit_vectors(own.vectors)
    cosines = (units[:, 0] * units[:, 1]).sum(axis=-1)
    scores, labels, weights = (placement.gather_rows(leaf) for leaf in (scale * cosines, targets, own.weights))
    ordered = (labels[:, None] < labels[None, :]) & (weights[:, None] > 0) & (weights[None, :] > 0)
    differences = jnp.where(ordered, scores[:, None] - scores[None, :], IMPOSSIBLE)
    loss = jax.nn.logsumexp(jnp.append(differences.ravel(), 0.0))
    return loss * own.weights.sum()


def truncations(own: TextVectors, dimensions: Sequence[int]) -> list[TextVectors]:
    """Returns the vectors themselves, or the first d dimensions of them for each d of dimensions.

    The sum of a loss over them trains vectors whose beginnings are vectors, too (Kusupati et al. 2022, Matryoshka).
    """
    return [own._replace(vectors=own.vectors[..., :size]) for size in dimensions] or [own]


def _scores(
    anchors: Float[Array, "B D"], candidates: Float[Array, "K D"], possible: Bool[Array, "B K"], scale: float
) -> Float[Array, "B K"]:
    products = jnp.einsum("bd,kd->bk", anchors, candidates, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(possible, scale * products, IMPOSSIBLE)
