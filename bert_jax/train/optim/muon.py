"""Muon: momentum, each matrix of it made orthogonal (Jordan 2024, https://kellerjordan.github.io/posts/muon)."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from bert_jax.train.optim.tensors import Matrices, hidden_matrices, map_by_path

# Jordan 2024, "Newton-Schulz": a quintic whose slope at 0 is as steep as it goes, and five steps of it.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
SMALLEST_NORM = 1e-7
# Liu et al. 2025 (Moonlight), section 2.2, equation 4: the root mean square of an update is then about AdamW's.
UPDATE_SCALE = 0.2


class MuonState(NamedTuple):
    mu: Any  # running means of gradients


def scale_by_muon(momentum: float) -> optax.GradientTransformation:
    """Of arrays that are hidden matrices (tensors.hidden_matrices): the orthogonal part of their Nesterov momentum.

    Each matrix [in, out] is times 0.2 sqrt(max(in, out)) (Liu et al. 2025), so that one learning rate, warmup and
    weight decay serve it and what AdamW updates beside it; Jordan's own factor, sqrt(max(1, out / in)), wants a rate
    of its own. Equal to torch.optim.Muon with adjust_lr_fn="match_rms_adamw" on each matrix, but that this one
    computes in float32 (in bfloat16 passes where that is the platform's default). optax.contrib.muon corrects the bias
    of the two terms of the momentum, so its first steps are others.
    """

    def init(params: Any) -> MuonState:
        return MuonState(optax.tree.zeros_like(params))

    def update(gradients: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        mean = jax.tree.map(lambda old, new: momentum * old + (1 - momentum) * new, state.mu, gradients)
        ahead = jax.tree.map(lambda old, new: momentum * old + (1 - momentum) * new, mean, gradients)
        return map_by_path(_orthogonal_update, ahead), MuonState(mean)

    return optax.GradientTransformation(init, update)


def orthogonalize(matrices: Float[Array, "... R C"]) -> Float[Array, "... R C"]:
    """U V^T of each matrix U S V^T, roughly: all but its small singular values become 0.68 to 1.16 (Jordan 2024).

    Those below a two-hundredth of the Frobenius norm stay smaller; a matrix of zeros stays as it is.
    """
    first, third, fifth = COEFFICIENTS
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT  # the smaller Gram matrix
    norm = jnp.sqrt(jnp.square(x).sum(axis=(-2, -1), keepdims=True))
    x = x / jnp.maximum(norm, SMALLEST_NORM)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = first * x + (third * gram + fifth * (gram @ gram)) @ x
    return x if wide else x.mT


def _orthogonal_update(path: str, momentum: Array) -> Array:
    axes = hidden_matrices(path, momentum.ndim)
    if axes is None:
        raise ValueError(f"{path} is no hidden matrix: Muon does not update it")
    rows, columns = (math.prod(momentum.shape[axis] for axis in group) for group in (axes.inputs, axes.outputs))
    order = _order(axes)
    apart = momentum.transpose(order)
    update = orthogonalize(apart.reshape(-1, rows, columns)).reshape(apart.shape)
    return UPDATE_SCALE * math.sqrt(max(rows, columns)) * update.transpose(_inverse(order))


def _order(axes: Matrices) -> tuple[int, ...]:
    return (*axes.parts, *axes.inputs, *axes.outputs)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(axis) for axis in range(len(order)))
