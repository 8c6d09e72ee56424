"""The memory of a step on one device."""

import math
from dataclasses import dataclass
from typing import Any

import jax

GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. Activations are all that a step allocates: residuals, gradients, temporaries, the batch."""

    parameters: int
    optimizer: int
    activations: int
    available: int

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.activations

    @property
    def fits(self) -> bool:
        return self.total <= self.available


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes that a tree of arrays, or of shapes with shardings, takes on one device."""

    def size(leaf: Any) -> int:
        return math.prod(leaf.sharding.shard_shape(leaf.shape)) * int(leaf.dtype.itemsize)

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))


def gib(size: float | int) -> str:
    return f"{size / GIB:,.2f} GiB"
