"""Update directions: Adam, per-tensor trust ratios (LAMB, StableAdamW), and Muon.

One array holds several tensors: layers are stacked, [L, ...], queries, keys and values share [.., 3, N, H], and the
halves of a gated feed-forward share [.., 2, F]. Optimizers that take a tensor's norm or orthogonalize a matrix treat
these tensors separately, so that updates equal those of a model with a module per tensor. own_axes and hidden_matrices
distinguish axes that index tensors from axes within one.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from bert_jax.config import OptimizerConfig
from bert_jax.train import rules, sharding

# For one layer, without the leading layer axis: a path pattern, the number of axes, then the axis that indexes fused
# parts (or None), the matrix's input axes and its output axes.
_MATRICES: tuple[tuple[str, int, tuple[int | None, tuple[int, ...], tuple[int, ...]]], ...] = (
    (r"attention/qkv/kernel$", 4, (1, (0,), (2, 3))),  # [D, 3, N, H]
    (r"attention/output/kernel$", 3, (None, (0, 1), (2,))),  # [N, H, D]
    (r"feed_forward/input/kernel$", 3, (1, (0,), (2,))),  # [D, 2, F], gated
    (r"feed_forward/input/kernel$", 2, (None, (0,), (1,))),  # [D, F]
    (r"feed_forward/output/kernel$", 2, (None, (0,), (1,))),  # [F, D]
)
_PARTS_OF_BIASES = ((r"attention/qkv/bias$", 3), (r"feed_forward/input/bias$", 2))  # [3, N, H]; [2, F], gated


class Matrices(NamedTuple):
    """How to read an array as a batch of matrices."""

    parts: tuple[int, ...]  # the axes that index the matrices
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        return (*self.parts, *self.inputs, *self.outputs)

    def sizes(self, array: Array) -> tuple[int, int]:
        rows, columns = (math.prod(array.shape[axis] for axis in group) for group in (self.inputs, self.outputs))
        return rows, columns


def hidden_matrices(path: str, ndim: int) -> Matrices | None:
    """Returns the matrix layout of an encoder attention or feed-forward kernel, or None for any other parameter."""
    if rules.stack_path(path) is None:
        return None
    # The table is for one layer. In a stack, every axis comes one later, and axis 0 indexes matrices, too.
    for pattern, axes, (part, inputs, outputs) in _MATRICES:
        if ndim == axes + 1 and re.search(pattern, path):
            parts = (0,) if part is None else (0, part + 1)
            return Matrices(parts, tuple(axis + 1 for axis in inputs), tuple(axis + 1 for axis in outputs))
    return None


def own_axes(path: str, ndim: int) -> tuple[int, ...]:
    """Returns the axes within one tensor; a norm over them gives one value for each tensor of the array."""
    parts = set() if rules.stack_path(path) is None else {0}
    if matrices := hidden_matrices(path, ndim):
        parts = set(matrices.parts)
    elif parts and any(ndim == axes + 1 and re.search(pattern, path) for pattern, axes in _PARTS_OF_BIASES):
        parts.add(1)
    return tuple(axis for axis in range(ndim) if axis not in parts)


def map_by_path(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Maps function(path, leaf, *other_leaves) over trees; paths are written as in bert_jax.model.layers."""
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return jax.tree_util.tree_map_with_path(lambda keys, *leaves: function(name(keys), *leaves), tree, *others)


UpdateCounts = Mapping[str, Array] | None


def scale_by_adam(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns the transformation from gradients to Adam's direction (Kingma and Ba 2015, algorithm 1).

    The direction is first moment / (sqrt(second moment) + epsilon), and the state optax.ScaleByAdamState.

    Without config.bias_correction, moments that start at zero are used as they are, as in google-research/bert,
    optimization.py, AdamWeightDecayOptimizer. Step t is then (1 - beta1^t) / sqrt(1 - beta2^t) times as long: with
    beta1=0.9 and beta2=0.999, three to seven times in the first hundred steps (Zhang et al. 2021, section 4, describe
    the effect on fine-tuning).

    `update` accepts `update_counts`, by which it corrects the bias of parameters that begin to train after the first
    step (train/rules.py): how many updates a parameter has had, by path, this one included.
    """
    corrected = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)

    def update(
        gradients: Any,
        state: optax.ScaleByAdamState,
        params: Any = None,
        *,
        update_counts: UpdateCounts = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        # The usual case is optax's own.
        if config.bias_correction and update_counts is None:
            return corrected.update(gradients, state, params)
        # The same in steps, since optax neither leaves the bias nor counts updates by parameter.
        mean = optax.tree.update_moment(gradients, state.mu, config.beta1, 1)
        square = optax.tree.update_moment_per_elem_norm(gradients, state.nu, config.beta2, 2)
        following = optax.ScaleByAdamState(state.count + 1, mean, square)
        if config.bias_correction:
            mean = _without_bias(mean, config.beta1, following.count, update_counts)
        divisor = corrected_square(config, following, update_counts)
        direction = jax.tree.map(lambda first, second: first / (jnp.sqrt(second) + config.epsilon), mean, divisor)
        return direction, following

    return optax.GradientTransformationExtraArgs(corrected.init, update)


def corrected_square(config: OptimizerConfig, state: optax.ScaleByAdamState, update_counts: UpdateCounts = None) -> Any:
    """Returns the second moment whose square root divided the last direction."""
    return _without_bias(state.nu, config.beta2, state.count, update_counts) if config.bias_correction else state.nu


def _without_bias(moment: Any, decay: float, count: Array, update_counts: UpdateCounts) -> Any:
    if update_counts is None:
        return optax.tree.bias_correction(moment, decay, count)
    # By path, since a part of the parameters, as Muon leaves to Adam, has only some of the paths.
    return map_by_path(lambda path, leaf: leaf / (1 - decay ** update_counts[path]), moment)


def scale_by_trust_ratio() -> optax.GradientTransformation:
    """Multiplies each tensor's update by |parameter| / |update| (You et al. 2020, algorithm 2, with phi the identity).

    optax.scale_by_trust_ratio takes one norm of a whole stack instead, and also scales biases.
    """

    def norm(array: Array, axes: tuple[int, ...]) -> Array:
        return jnp.sqrt(jnp.square(array.astype(jnp.float32)).sum(axis=axes, keepdims=True))

    def scale(path: str, update: Array, param: Array) -> Array:
        # google-research/albert, lamb_optimizer.py, leaves out parameters without weight decay: biases and norms.
        if any(re.search(pattern, path) for pattern in rules.BIASES_AND_NORMS):
            return update
        axes = own_axes(path, update.ndim)
        length, step = norm(param, axes), norm(update, axes)
        # The divisor is never 0, since both branches of a `where` are computed.
        ratio = length / jnp.where(step > 0, step, 1.0)
        return update * jnp.where((length > 0) & (step > 0), ratio, 1.0)

    return optax.stateless(lambda updates, params: map_by_path(scale, updates, params))


def scale_by_stable_adam(config: OptimizerConfig, decays: dict[str, Any]) -> optax.GradientTransformation:
    """Returns StableAdamW: Adam's step plus weight decay, divided by max(1, RMS) (Wortsman et al. 2023, algorithm 2).

    RMS is the root mean square of g / max(sqrt(u), epsilon) over one tensor (own_axes), where u is the second moment.
    It exceeds 1 if gradients are larger than their history predicts, as before a loss spike. This replaces clipping by
    the gradient norm. The state is optax.ScaleByAdamState.
    """
    adam = scale_by_adam(config)

    def update(
        gradients: Any, state: Any, params: Any = None, *, update_counts: UpdateCounts = None, **_: Any
    ) -> tuple[Any, Any]:
        # Weight decay is inside the division, so this transformation adds it itself.
        direction, following = adam.update(gradients, state, params, update_counts=update_counts)
        squares = corrected_square(config, following, update_counts)

        def stable(path: str, change: Array, gradient: Array, square: Array, param: Array, decay: Any) -> Array:
            # The square of max(sqrt(u), epsilon), without a root.
            relative = jnp.square(gradient) / jnp.maximum(square, config.epsilon**2)
            rms = jnp.sqrt(relative.mean(axis=own_axes(path, gradient.ndim), keepdims=True))
            return (change + decay * param) / jnp.maximum(1.0, rms)

        return map_by_path(stable, direction, gradients, squares, params, decays), following

    return optax.GradientTransformationExtraArgs(adam.init, update)


# Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon), section "Newton-Schulz": a quintic with coefficients
# that maximize its slope at 0, iterated five times.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
SMALLEST_NORM = 1e-7
# Liu et al. 2025 (Moonlight), section 2.2, equation 4: matches the root mean square of AdamW's updates.
UPDATE_SCALE = 0.2


class MuonState(NamedTuple):
    mu: Any  # exponential moving averages of the gradients


def scale_by_muon(momentum: float) -> optax.GradientTransformation:
    """Returns the transformation that orthogonalizes hidden matrices' Nesterov momentum.

    The result equals torch.optim.Muon with adjust_lr_fn="match_rms_adamw" on each matrix, except that torch computes in
    bfloat16, as Jordan 2024 does. optax.contrib.muon differs in its first steps because it corrects the bias in both
    terms of the momentum.
    """

    def init(params: Any) -> MuonState:
        return MuonState(optax.tree.zeros_like(params))

    def update(gradients: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        mean = jax.tree.map(lambda old, new: momentum * old + (1 - momentum) * new, state.mu, gradients)
        # Nesterov: the average as it would be if the same gradient came again.
        ahead = jax.tree.map(lambda old, new: momentum * old + (1 - momentum) * new, mean, gradients)
        # [K, R, C] for each array, R <= C. Every device orthogonalizes its share of the matrices. Matrices of one shape
        # are divided together, since the layers of one parameter alone are often fewer than the devices.
        leaves, structure = jax.tree.flatten(map_by_path(_stacked, ahead))
        by_shape: dict[tuple[int, int], list[int]] = {}
        for number, stack in enumerate(leaves):
            by_shape.setdefault(stack.shape[1:], []).append(number)
        for numbers in by_shape.values():
            ends = np.cumsum([len(leaves[number]) for number in numbers])[:-1]
            together = sharding.divided(orthogonalize, jnp.concatenate([leaves[number] for number in numbers]))
            for number, part in zip(numbers, jnp.split(together, ends), strict=True):
                leaves[number] = part
        return map_by_path(_unstacked, ahead, jax.tree.unflatten(structure, leaves)), MuonState(mean)

    return optax.GradientTransformation(init, update)


def orthogonalize(matrices: Float[Array, "... R C"]) -> Float[Array, "... R C"]:
    """Approximates U V^T for each matrix U S V^T: singular values become 0.68 to 1.16 (Jordan 2024).

    Singular values below 1/200 of the Frobenius norm stay smaller, and a zero matrix stays zero.
    """
    first, third, fifth = COEFFICIENTS
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT  # gives the smaller Gram matrix
    norm = jnp.sqrt(jnp.square(x).sum(axis=(-2, -1), keepdims=True))
    # The iteration needs singular values of at most 1, and the Frobenius norm bounds them all.
    x = x / jnp.maximum(norm, SMALLEST_NORM)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = first * x + (third * gram + fifth * (gram @ gram)) @ x
    return x if wide else x.mT


def _stacked(path: str, array: Array) -> Float[Array, "K R C"]:
    """Returns an array's matrices, one after another, with no more rows than columns."""
    axes = hidden_matrices(path, array.ndim)
    assert axes, f"{path} is no hidden matrix"
    rows, columns = axes.sizes(array)
    stack = array.transpose(axes.order).reshape(-1, rows, columns)
    return stack if rows <= columns else stack.mT


def _unstacked(path: str, array: Array, stack: Float[Array, "K R C"]) -> Array:
    """Scales the updates of an array's matrices, and gives them its shape."""
    axes = hidden_matrices(path, array.ndim)
    assert axes
    rows, columns = axes.sizes(array)
    ordered = (stack if rows <= columns else stack.mT).reshape([array.shape[axis] for axis in axes.order])
    # The factor of Liu et al. 2025 lets one learning rate, warmup and weight decay suit these matrices and the
    # parameters that AdamW updates; Jordan's, sqrt(max(1, out / in)), requires a separate learning rate.
    return UPDATE_SCALE * math.sqrt(max(rows, columns)) * ordered.transpose(np.argsort(axes.order))
