"""Loops over the layers of a stack: unrolled, or a scan over the group of layers that repeats.

A scan traces and compiles each layer of the group once.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

# Takes hidden states and the parameters of one layer, and returns hidden states and what else it found.
Layer = Callable[[Array, PyTree], tuple[Array, PyTree]]


@dataclass(frozen=True)
class LayerGroups:
    """The layers of a stack in order: `before`, then `repeats` groups of `period` layers, then `after`.

    Every group has layers of the same types in the same order.
    """

    before: int
    period: int
    repeats: int
    after: int

    @property
    def traced(self) -> int:
        """The layers that a program holds, where the groups are scanned."""
        return self.before + self.period + self.after


def unrolled_groups(depth: int) -> LayerGroups:
    """Returns the division in which nothing repeats."""
    return LayerGroups(depth, 0, 0, 0)


def repeating_groups(types: Sequence[Hashable]) -> LayerGroups:
    """Returns the groups of fewest traced layers.

    ModernBERT's 22 layers, of which every third is global and the first has no norm, are one layer and seven groups of
    three. Of equal divisions, the one with fewest layers before the groups is returned; without a group that repeats,
    all layers are in `before`.
    """
    depth = len(types)
    best = unrolled_groups(depth)
    for before in range(depth):
        for period in range(1, (depth - before) // 2 + 1):
            alike = before + period
            while alike < depth and types[alike] == types[alike - period]:
                alike += 1
            repeats = (alike - before) // period
            found = LayerGroups(before, period, repeats, depth - before - repeats * period)
            if repeats > 1 and found.traced < best.traced:
                best = found
    return best


def apply_layers(layers: Sequence[Layer], hidden: Array, stacked: PyTree, groups: LayerGroups) -> tuple[Array, PyTree]:
    """Applies the L layers of a stack in order.

    layers   the function of each layer; where groups repeat, only those of the first group are called
    stacked  what the functions take, each leaf [L, ...]

    Returns the hidden states of the last layer, and the other outputs of all layers, each leaf [L, ...]; None where
    there is no layer.
    """
    begin, end = groups.before, len(layers) - groups.after
    group = layers[begin : begin + groups.period]
    loops = [
        (begin, lambda *state: _unroll(layers[:begin], *state)),
        (end - begin, lambda *state: _scan(group, groups.repeats, *state)),
        (groups.after, lambda *state: _unroll(layers[end:], *state)),
    ]
    loops = [(count, loop) for count, loop in loops if count]
    parts = split_layers(stacked, tuple(count for count, _ in loops)) if len(loops) > 1 else [stacked] * len(loops)
    outputs = []
    for (_, loop), part in zip(loops, parts, strict=True):
        hidden, output = loop(hidden, part)
        outputs.append(output)
    if len(outputs) < 2:
        return hidden, outputs[0] if outputs else None
    return hidden, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *outputs)


def _unroll(layers: Sequence[Layer], hidden: Array, stacked: PyTree) -> tuple[Array, PyTree]:
    outputs = []
    for layer, part in zip(layers, split_layers(stacked, (1,) * len(layers)), strict=True):
        hidden, output = layer(hidden, jax.tree.map(lambda leaf: leaf[0], part))
        outputs.append(output)
    return hidden, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


def _scan(group: Sequence[Layer], repeats: int, hidden: Array, stacked: PyTree) -> tuple[Array, PyTree]:
    if len(group) == 1:
        return jax.lax.scan(group[0], hidden, stacked, length=repeats)
    parts = jax.tree.map(lambda leaf: leaf.reshape(repeats, len(group), *leaf.shape[1:]), stacked)
    hidden, outputs = jax.lax.scan(lambda *state: _unroll(group, *state), hidden, parts, length=repeats)
    return hidden, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)


def apply_frozen_first(
    loop: Callable[[Array, PyTree, slice], tuple[Array, PyTree]],
    hidden: Array,
    stacked: PyTree,
    depth: int,
    frozen: int,
) -> tuple[Array, PyTree]:
    """Applies the lowest `frozen` layers without a backward pass, then the others.

    loop     applies the layers of a slice, given their part of `stacked`
    stacked  of all layers, each leaf [L, ...]; depth is L
    Returns what apply_layers does.
    """
    frozen = min(frozen, depth)
    if not frozen:
        return loop(hidden, stacked, slice(0, depth))
    below, *above = split_layers(stacked, (frozen, depth - frozen)) if frozen < depth else [stacked]
    # Both: the parts of one array share its tangent, which is not zero where any of its layers trains.
    hidden, outputs = loop(*jax.lax.stop_gradient((hidden, below)), slice(0, frozen))
    if not above:
        return hidden, outputs
    hidden, further = loop(hidden, above[0], slice(frozen, depth))
    return hidden, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), outputs, further)


def split_layers(stacked: PyTree, sizes: tuple[int, ...]) -> list[PyTree]:
    """Returns consecutive parts of the leading axis.

    The gradient of lax.split is one concatenation; indexing would give a sum for each part.
    """
    leaves, tree = jax.tree.flatten(stacked)
    parts = [jax.lax.split(leaf, sizes) for leaf in leaves]
    return [jax.tree.unflatten(tree, [part[index] for part in parts]) for index in range(len(sizes))]
