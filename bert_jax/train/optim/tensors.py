"""Which axes of an array count the tensors that papers speak of, and which are a tensor's own.

A layer's parameters are slices of a stack [L, ...]; queries, keys and values are one array [.., 3, N, H], and so are
the two halves of a gated feed-forward [.., 2, F]. An optimizer that takes a norm of a tensor, or orthogonalizes a
matrix, means each of them for itself, so that its updates are those of a model with a module for each.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from bert_jax.train import rules

# Of one layer, without the leading axis: the axis of parts (or none), the axes into the matrix and out of it.
_MATRICES: tuple[tuple[str, int, tuple[int | None, tuple[int, ...], tuple[int, ...]]], ...] = (
    (r"attention/qkv/kernel$", 4, (1, (0,), (2, 3))),  # [D, 3, N, H]
    (r"attention/output/kernel$", 3, (None, (0, 1), (2,))),  # [N, H, D]
    (r"feed_forward/input/kernel$", 3, (1, (0,), (2,))),  # [D, 2, F], gated
    (r"feed_forward/input/kernel$", 2, (None, (0,), (1,))),  # [D, F]
    (r"feed_forward/output/kernel$", 2, (None, (0,), (1,))),  # [F, D]
)
_PARTS_OF_BIASES = ((r"attention/qkv/bias$", 3), (r"feed_forward/input/bias$", 2))  # [3, N, H]; [2, F], gated


class Matrices(NamedTuple):
    """An array as matrices: the axes that count them, those into each and those out of it."""

    parts: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def hidden_matrices(path: str, ndim: int) -> Matrices | None:
    """How a kernel of the encoder's attention or feed-forward lies in its array; None for any other parameter."""
    if rules.stack_of(path) is None:
        return None
    for pattern, axes, (part, inputs, outputs) in _MATRICES:
        if ndim == axes + 1 and re.search(pattern, path):
            parts = (0,) if part is None else (0, part + 1)
            return Matrices(parts, tuple(axis + 1 for axis in inputs), tuple(axis + 1 for axis in outputs))
    return None


def own_axes(path: str, ndim: int) -> tuple[int, ...]:
    """The axes of an array that are a tensor's own: a norm over them is one of each tensor."""
    parts = set() if rules.stack_of(path) is None else {0}
    if matrices := hidden_matrices(path, ndim):
        parts = set(matrices.parts)
    elif parts and any(ndim == axes + 1 and re.search(pattern, path) for pattern, axes in _PARTS_OF_BIASES):
        parts.add(1)
    return tuple(axis for axis in range(ndim) if axis not in parts)


def map_by_path(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """jax.tree.map of function(path, leaf, ...), a path being as in bert_jax.model.paths."""

    def with_path(keys: Any, *leaves: Any) -> Any:
        return function(jax.tree_util.keystr(keys, simple=True, separator="/"), *leaves)

    return jax.tree_util.tree_map_with_path(with_path, tree, *others)
