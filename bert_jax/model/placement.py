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


def all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy for jax.checkpoint: keeps everything, but not where it was brought to lie (gather, constrain).

    So the backward pass gathers a layer's parameters again, where it would keep those of all layers whole. What a name
    (checkpoint_name) stands for would be kept all the same, as what was named, and so would what is but reshaped.
    """
    return primitive.name not in ("sharding_constraint", "reshape")


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

    def by_rows(self, sums: Callable[..., Any]) -> Callable[..., Any]:
        """A function of a batch and more that gives sums over the batch's rows. What comes of it does the same, and may
        do so part by part of the rows, where `row_numbers` says which part it is, to add the parts up once."""
        return sums

    def row_numbers(self, rows: int) -> tuple[int | Array, int]:
        """Where some rows of a batch that are computed with begin in it, and how many it has in all."""
        return 0, rows

    @property
    def cuts_kernels(self) -> bool:
        """Whether by_part cuts."""
        return False

    @property
    def cuts_layers(self) -> bool:
        """Whether heads and inner units lie on several devices."""
        return False


ALONE = Placement()
