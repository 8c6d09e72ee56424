"""Splits the parameters of a model into those that train and those that are frozen.

Only what trains at some step is differentiated and has optimizer state (Trained). What begins to train after the first
step is masked until then (Unfreezing). The layers of an encoder are stored stacked, so a part may hold some layers of a
parameter: [K, ...] of [L, ...].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from bert_jax.command import UserError
from bert_jax.model import paths
from bert_jax.train import rules

ENCODER_STACK = "encoder/layers/"
# The parts of a model that the layers of its encoder build on, or that every layer reads.
_BELOW_HEADS = ("embeddings/", "encoder/")
_ABOVE_LAYERS = ("encoder/final_norm/",)


@dataclass(frozen=True)
class Trained:
    """The part of the parameters that trains: by path, the layers of a stack in order, or None for all of a parameter.

    Parameters that are not named are frozen.
    """

    layers: Mapping[str, tuple[int, ...] | None]

    @classmethod
    def where(cls, trains: dict[str, Any]) -> "Trained":
        """Returns the part whose values are not zero in a tree like that of rules.per_layer, such as rate factors."""
        found: dict[str, tuple[int, ...] | None] = {}
        for path, value in paths.flatten(trains).items():
            if np.all(value):
                found[path] = None
            elif np.any(value):
                found[path] = tuple(int(layer) for layer in np.flatnonzero(np.ravel(value)))
        return cls(found)

    @classmethod
    def everything(cls, params: dict[str, Any]) -> "Trained":
        """Returns all of a tree of (abstract) parameters, as the part of a larger tree that trains."""
        return cls(dict.fromkeys(paths.flatten(params)))

    @classmethod
    def by_factors(cls, factors: dict[str, Any] | None) -> "Trained | None":
        """Returns the part whose learning-rate factors are not zero; None where that is everything."""
        if factors is None or all(np.all(factor) for factor in jax.tree.leaves(factors)):
            return None
        return cls.where(factors)

    def check(self, rates: str, train_layers: str = "all") -> None:
        """Raises UserError where nothing trains, by optimizer.rates or by train_layers."""
        if self.layers:
            return
        if train_layers == "all":
            raise UserError(f"optimizer.rates is {rates!r}, which trains no parameter. Raise a rate")
        raise UserError(
            f"train_layers is {train_layers}, which trains no parameter of this model. Use all, no_embeddings or last:K"
        )

    def take(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Returns this part of a tree of parameters, or of one of rules.per_layer."""
        leaves = paths.flatten(tree)
        return paths.unflatten({path: _take(leaves[path], layers) for path, layers in self.layers.items()})

    def abstract(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Returns this part of a tree of (abstract) parameters without values; rules know the layers of its stacks."""
        leaves = paths.flatten(tree)
        return paths.unflatten({path: _abstract(leaves[path], layers) for path, layers in self.layers.items()})

    def put(self, tree: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
        """Returns the tree with this part replaced; where the tree is donated, in its memory."""
        return self._replaced(tree, part, _put)

    def join(self, tree: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
        """Returns what `put` does, as concatenations: reading a layer of the result does not copy the others."""
        return self._replaced(tree, part, _join)

    def frozen_layers(self, params: dict[str, Any]) -> int:
        """Returns how many of the lowest layers of the encoder need no backward pass: nothing in or below them trains.

        It is 0 for a model with several stacks of layers.
        """
        sizes = rules.stacks(params)
        if list(sizes) != [ENCODER_STACK]:
            return 0
        lowest = sizes[ENCODER_STACK]
        for path, layers in self.layers.items():
            if path.startswith(_BELOW_HEADS) and not path.startswith(_ABOVE_LAYERS):
                lowest = min(lowest, layers[0] if layers and path.startswith(ENCODER_STACK) else 0)
        return lowest

    def _replaced(self, tree: dict[str, Any], part: dict[str, Any], place: Callable[..., Array]) -> dict[str, Any]:
        leaves, values = paths.flatten(tree), paths.flatten(part)
        for path, layers in self.layers.items():
            leaves[path] = values[path] if layers is None else place(leaves[path], values[path], _ranges(layers))
        return paths.unflatten(leaves)


@dataclass(frozen=True, eq=False)
class Unfreezing:
    """Gradual unfreezing: a mask of the parameters with a schedule (Howard and Ruder 2018, section 3.3).

    begins   the step from which each parameter trains, of the part that the optimizer updates, as rules.per_layer
             gives it

    Until then a parameter has a gradient of zero, which leaves its moments at zero and counts in no norm, and its
    update, weight decay included, is left out. The optimizer state has the same tensors in all steps.

    A parameter that begins at step s is updated as if the run had begun there: its moments start at zero, and Adam
    corrects their bias by the number of its own updates, not of the run's. Corrected by the run's number, they would
    count as long averages, and the first updates would be three to seven times as long (optim/adam.py). Steps that are
    skipped because they are not finite count as updates here.
    """

    begins: dict[str, Any]

    @classmethod
    def by_stages(cls, stages: dict[str, Any], every: int) -> "Unfreezing":
        """Returns the schedule by which stage K (rules.stages) begins at step K * every.

        Raises ValueError if `every` is below 1.
        """
        if every < 1:
            raise ValueError(f"the number of steps between unfrozen layers is {every}; use 1 or more")
        return cls(jax.tree.map(lambda stage: np.asarray(stage * every, np.int32), stages))

    def mask(self, tree: dict[str, Any], step: Int[Array, ""]) -> dict[str, Any]:
        """Returns gradients or updates with zeros in place of those of parameters that do not train yet."""
        # Not a product, since the gradient of a parameter that does not train may be infinite.
        return jax.tree.map(lambda leaf, begins: jnp.where(step >= begins, leaf, 0), tree, self.begins)

    def update_counts(self, step: Int[Array, ""]) -> dict[str, Int[Array, "..."]]:
        """Returns the number of updates of each parameter, by path, with that of this step, and at least 1."""
        return {path: jnp.maximum(step - begins + 1, 1) for path, begins in paths.flatten(self.begins).items()}


class SomeLayers(jax.ShapeDtypeStruct):
    """The abstract value [K, ...] of some layers of a stacked parameter, with their numbers in the stack."""

    __slots__ = ("layers",)

    def __init__(self, shape: tuple[int, ...], dtype: Any, layers: tuple[int, ...]) -> None:
        super().__init__(shape, dtype)
        self.layers = layers


def _abstract(leaf: Any, layers: tuple[int, ...] | None) -> jax.ShapeDtypeStruct:
    if layers is None:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return SomeLayers((len(layers), *leaf.shape[1:]), leaf.dtype, layers)


def _ranges(layers: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last layer, exclusive, of each run of successive layers."""
    found: list[tuple[int, int]] = []
    for layer in layers:
        if found and found[-1][1] == layer:
            found[-1] = (found[-1][0], layer + 1)
        else:
            found.append((layer, layer + 1))
    return found


def _take(leaf: Any, layers: tuple[int, ...] | None) -> Any:
    if layers is None or not np.ndim(leaf):  # a tree of rules.per_layer has one number where all layers are alike
        return leaf
    if isinstance(leaf, np.ndarray):
        return leaf[list(layers)]
    parts = [leaf[first:end] for first, end in _ranges(layers)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _put(leaf: Array, part: Array, ranges: Sequence[tuple[int, int]]) -> Array:
    taken = 0
    for first, end in ranges:
        leaf = jax.lax.dynamic_update_slice_in_dim(leaf, part[taken : taken + end - first], first, axis=0)
        taken += end - first
    return leaf


def _join(leaf: Array, part: Array, ranges: Sequence[tuple[int, int]]) -> Array:
    pieces, taken, before = [], 0, 0
    for first, end in ranges:
        pieces += [leaf[before:first], part[taken : taken + end - first]]
        taken, before = taken + end - first, end
    return jnp.concatenate([piece for piece in (*pieces, leaf[before:]) if len(piece)])
