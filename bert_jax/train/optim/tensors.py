"""Distinguishes the axes of an array that index separate tensors from the axes within one tensor.

The parameters of all layers are stacked in arrays [L, ...]; queries, keys and values share one
array [.., 3, N, H], and so do the two halves of a gated feed-forward [.., 2, F]. Optimizers that
take the norm of a tensor or orthogonalize a matrix treat each of these tensors separately, so that
their updates equal those of a model with a module per tensor.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from bert_jax.train import rules

# For one layer, without the leading layer axis: a path pattern, the number of axes, and then the axis that indexes
# fused parts (or None), the input axes and the output axes of the matrix.
_MATRICES: tuple[tuple[str, int, tuple[int | None, tuple[int, ...], tuple[int, ...]]], ...] = (
    (r"attention/qkv/kernel$", 4, (1, (0,), (2, 3))),  # [D, 3, N, H]
    (r"attention/output/kernel$", 3, (None, (0, 1), (2,))),  # [N, H, D]
    (r"feed_forward/input/kernel$", 3, (1, (0,), (2,))),  # [D, 2, F], gated
    (r"feed_forward/input/kernel$", 2, (None, (0,), (1,))),  # [D, F]
    (r"feed_forward/output/kernel$", 2, (None, (0,), (1,))),  # [F, D]
)
_PARTS_OF_BIASES = ((r"attention/qkv/bias$", 3), (r"feed_forward/input/bias$", 2))  # [3, N, H]; [2, F], gated


class Matrices(NamedTuple):
    """How an array is read as a batch of matrices: the axes that index them, their input and their output axes."""

    parts: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def hidden_matrices(path: str, ndim: int) -> Matrices | None:
    """Returns the matrix layout of an encoder attention or feed-forward kernel, or None for any other parameter."""
    if rules.stack_of(path) is None:
        return None
    for pattern, axes, (part, inputs, outputs) in _MATRICES:
        if ndim == axes + 1 and re.search(pattern, path):
            parts = (0,) if part is None else (0, part + 1)
            return Matrices(parts, tuple(axis + 1 for axis in inputs), tuple(axis + 1 for axis in outputs))
    return None


def own_axes(path: str, ndim: int) -> tuple[int, ...]:
    """Returns the axes within one tensor; a norm over them gives one value for each tensor of the array."""
    parts = set() if rules.stack_of(path) is None else {0}
    if matrices := hidden_matrices(path, ndim):
        parts = set(matrices.parts)
    elif parts and any(ndim == axes + 1 and re.search(pattern, path) for pattern, axes in _PARTS_OF_BIASES):
        parts.add(1)
    return tuple(axis for axis in range(ndim) if axis not in parts)


def map_by_path(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Maps function(path, leaf, *other_leaves) over trees; paths are written as in bert_jax.model.paths."""

    def with_path(keys: Any, *leaves: Any) -> Any:
        return function(jax.tree_util.keystr(keys, simple=True, separator="/"), *leaves)

    return jax.tree_util.tree_map_with_path(with_path, tree, *others)
