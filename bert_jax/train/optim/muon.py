"""Muon: momentum whose matrices are orthogonalized (Jordan 2024, https://kellerjordan.github.io/posts/muon)."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from bert_jax.train.optim.tensors import Matrices, hidden_matrices, map_by_path

# Jordan 2024, section "Newton-Schulz": a quintic with coefficients that maximize its slope at 0, iterated five times.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
SMALLEST_NORM = 1e-7
# Liu et al. 2025 (Moonlight), section 2.2, equation 4: matches the root mean square of AdamW's updates.
UPDATE_SCALE = 0.2


class MuonState(NamedTuple):
    """The optimizer state: mu holds the exponential moving averages of the gradients."""

    mu: Any


def scale_by_muon(momentum: float) -> optax.GradientTransformation:
    """Returns the transformation that orthogonalizes the Nesterov momentum of hidden matrices.

    Every array must consist of hidden matrices (tensors.hidden_matrices); otherwise the update
    raises ValueError. Each update [in, out] is multiplied by 0.2 sqrt(max(in, out)) (Liu et al.
    2025), so that one learning rate, warmup and weight decay suit both these matrices and the
    parameters that AdamW updates. Jordan's factor, sqrt(max(1, out / in)), requires a separate
    learning rate.

    The result equals that of torch.optim.Muon with adjust_lr_fn="match_rms_adamw" on each matrix,
    except that this implementation computes in float32 (in bfloat16 passes where that is the
    platform's default). optax.contrib.muon differs in its first steps because it corrects the bias
    of both terms of the momentum.
    """

    def init(params: Any) -> MuonState:
        return MuonState(optax.tree.zeros_like(params))

    def update(gradients: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        mean = jax.tree.map(lambda old, new: momentum * old + (1 - momentum) * new, state.mu, gradients)
        ahead = jax.tree.map(lambda old, new: momentum * old + (1 - momentum) * new, mean, gradients)
        return map_by_path(_orthogonal_update, ahead), MuonState(mean)

    return optax.GradientTransformation(init, update)


def orthogonalize(matrices: Float[Array, "... R C"]) -> Float[Array, "... R C"]:
    """Approximates U V^T for each matrix U S V^T: singular values become 0.68 to 1.16 (Jordan 2024).

    Singular values below 1/200 of the Frobenius norm stay smaller, and a zero matrix stays zero.
    """
    first, third, fifth = COEFFICIENTS
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT  # gives the smaller Gram matrix
    norm = jnp.sqrt(jnp.square(x).sum(axis=(-2, -1), keepdims=True))
    x = x / jnp.maximum(norm, SMALLEST_NORM)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = first * x + (third * gram + fifth * (gram @ gram)) @ x
    return x if wide else x.mT


def _orthogonal_update(path: str, momentum: Array) -> Array:
    axes = hidden_matrices(path, momentum.ndim)
    if axes is None:
        raise ValueError(f"{path} is not a hidden matrix; Muon updates only attention and feed-forward kernels")
    rows, columns = (math.prod(momentum.shape[axis] for axis in group) for group in (axes.inputs, axes.outputs))
    order = _order(axes)
    stacked = momentum.transpose(order)  # the axes that count matrices come first
    update = orthogonalize(stacked.reshape(-1, rows, columns)).reshape(stacked.shape)
    return UPDATE_SCALE * math.sqrt(max(rows, columns)) * update.transpose(_inverse(order))


def _order(axes: Matrices) -> tuple[int, ...]:
    return (*axes.parts, *axes.inputs, *axes.outputs)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(axis) for axis in range(len(order)))
