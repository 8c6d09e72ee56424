"""What a model requests of the sharding of its arrays. It calls arrays by name, and knows no axis of a mesh.

hidden         [B, T, D]
heads          [B, T, ..., N, H]    queries, keys, values, contexts
inner          [B, T, ..., F]       of the feed-forward
logits         [B, M, V]
sequence_ids   [B, T]
lengths        [B]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array


def all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """Returns a policy for jax.checkpoint that saves everything except the results of `gather` and `constrain`.

    The backward pass then gathers a layer's parameters again, instead of keeping those of all layers whole. A
    checkpoint_name would not do: what it names would be saved under that name, and so would a reshape of it.
    """
    return primitive.name not in ("sharding_constraint", "linear_call", "reshape")


@dataclass(frozen=True)
class Placement:
    """No request: the compiler decides where arrays lie. train/mesh_placement.py has the one that knows the mesh."""

    def constrain(self, name: str, array: Array) -> Array:
        """Returns the array with the sharding of arrays of that name."""
        return array

    def gather(self, params: Any, prefix: str = "", dtype: DTypeLike | None = None) -> Any:
        """Returns nested parameters by path, as they are computed with, where they are sharded between steps.

        With a prefix they are those of one layer of the stack, with kernels in the compute dtype. Without one, all
        parameters outside the stacks of layers are gathered.
        """
        return params

    @property
    def gathers(self) -> bool:
        """Whether gather does anything."""
        return False

    def shard_kernel(self, kernel: Callable[..., Array], names: Sequence[str]) -> Callable[..., Array]:
        """Returns a kernel that the compiler cannot partition, run by each device on its shard of the arguments.

        names are those of the arguments; the result is sharded as the first of them.
        """
        return kernel

    def whole_shape(self, path: str, array: Array) -> tuple[int, ...]:
        """Returns the shape of a parameter once it is gathered, where the function of a model has shards of it."""
        return array.shape

    def row_numbers(self, rows: int) -> tuple[int | Array, int]:
        """Returns where these rows begin in the batch, and how many rows the batch has."""
        return 0, rows

    def gather_rows(self, array: Array) -> Array:
        """Returns an array [B, ...] with the rows of the whole batch, where the function of a model has some of them.

        They are in the order of row_numbers.
        """
        return array

    @property
    def shards_kernels(self) -> bool:
        """Whether shard_kernel does anything."""
        return False

    @property
    def shards_layers(self) -> bool:
        """Whether heads and the feed-forward's inner units are sharded over several devices."""
        return False


ALONE = Placement()
