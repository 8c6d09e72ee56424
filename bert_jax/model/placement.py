"""What a model asks of whoever spreads its arrays over devices. It calls arrays by name, and knows no axis of a mesh.

hidden         [B, T, D]
heads          [B, T, ..., N, H]    queries, keys, values, contexts
inner          [B, T, ..., F]       of the feed-forward
logits         [B, M, V]
sequence_ids   [B, T]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array

# What the backward pass gathers again instead of keeping it, as jax.ad_checkpoint.checkpoint_name calls it.
GATHERED = "gathered parameters"


@dataclass(frozen=True)
class Placement:
    """Nothing asked: arrays lie where the compiler puts them. train/partitioning.py has one that knows the mesh."""

    def constrain(self, name: str, array: Array) -> Array:
        """The array, lying as arrays of that name do."""
        return array

    def gather(self, params: Any, prefix: str = "", dtype: DTypeLike | None = None) -> Any:
        """Nested parameters by path, as they are computed with, where they lie in parts between steps.

        Those under a prefix are of one layer, cut out of the stack, and their kernels in the compute dtype; without
        one all of a model but its layers are gathered.
        """
        return params

    @property
    def gathers(self) -> bool:
        """Whether gather does anything."""
        return False

    def by_part(self, kernel: Callable[..., Array], names: Sequence[str]) -> Callable[..., Array]:
        """A kernel that the compiler cannot cut, run by each device on its part of the arguments, called by `names`;
        what it gives lies as the first of them."""
        return kernel

    @property
    def cuts_kernels(self) -> bool:
        """Whether by_part cuts."""
        return False

    @property
    def cuts_layers(self) -> bool:
        """Whether heads and inner units lie on several devices."""
        return False
