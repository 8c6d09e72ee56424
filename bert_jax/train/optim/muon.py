"""Muon: momentum whose matrices are orthogonalized (Jordan 2024, https://kellerjordan.github.io/posts/muon)."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from bert_jax.train import mesh_placement
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

    On several devices, each orthogonalizes its share of the matrices. Matrices of one shape are
    divided together, since the layers of one parameter alone are often fewer than the devices.

    The result equals that of torch.optim.Muon with adjust_lr_fn="match_rms_adamw" on
    each matrix, except that torch computes in bfloat16, as Jordan 2024 does. optax.contrib.muon
    differs in its first steps because it corrects the bias of both terms of the momentum.
    """

    def init(params: Any) -> MuonState:
        return MuonState(optax.tree.zeros_like(params))

    def update(gradients: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        mean = jax.tree.map(lambda old, new: momentum * old + (1 - momentum) * new, state.mu, gradients)
        ahead = jax.tree.map(lambda old, new: momentum * old + (1 - momentum) * new, mean, gradients)
        return _orthogonal_updates(ahead), MuonState(mean)

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


def _orthogonal_updates(momenta: Any) -> Any:
    """The update of each array of hidden matrices, by the optimizer's tree; see scale_by_muon."""
    stacks = map_by_path(_stacked, momenta)
    leaves, structure = jax.tree.flatten(stacks)
    by_shape: dict[tuple[int, int], list[int]] = {}
    for number, stack in enumerate(leaves):
        by_shape.setdefault(stack.shape[1:], []).append(number)
    for numbers in by_shape.values():
        sizes = [len(leaves[number]) for number in numbers]
        together = mesh_placement.divided(orthogonalize, jnp.concatenate([leaves[n] for n in numbers]))
        parts = jnp.split(together, np.cumsum(sizes)[:-1])
        for number, part in zip(numbers, parts, strict=True):
            leaves[number] = part
    return map_by_path(_unstacked, momenta, jax.tree.unflatten(structure, leaves))


def _stacked(path: str, array: Array) -> Float[Array, "K R C"]:
    """The matrices of an array, one after another, with no more rows than columns."""
    axes = hidden_matrices(path, array.ndim)
    if axes is None:
        raise ValueError(f"{path} is not a hidden matrix; Muon updates only attention and feed-forward kernels")
    rows, columns = _sizes(axes, array)
    stack = array.transpose(_order(axes)).reshape(-1, rows, columns)
    return stack if rows <= columns else stack.mT


def _unstacked(path: str, array: Array, stack: Float[Array, "K R C"]) -> Array:
    """The scaled updates of the matrices of an array, with its shape."""
    axes = hidden_matrices(path, array.ndim)
    assert axes
    rows, columns = _sizes(axes, array)
    order = _order(axes)
    ordered = (stack if rows <= columns else stack.mT).reshape([array.shape[axis] for axis in order])
    return UPDATE_SCALE * math.sqrt(max(rows, columns)) * ordered.transpose(_inverse(order))


def _sizes(axes: Matrices, array: Array) -> tuple[int, int]:
    rows, columns = (math.prod(array.shape[axis] for axis in group) for group in (axes.inputs, axes.outputs))
    return rows, columns


def _order(axes: Matrices) -> tuple[int, ...]:
    return (*axes.parts, *axes.inputs, *axes.outputs)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(axis) for axis in range(len(order)))
