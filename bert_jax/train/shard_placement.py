"""The placement of a model under shard_map over data and fsdp, and the collectives over these axes.

A device has its own rows. The compiler still shards over tensor, if the mesh has it, and sums over that axis. For a
collective over data or fsdp, however, it (XLA of jaxlib 0.10.2) gathers what tensor shards. Therefore each of these
collectives runs in a shard_map over tensor, and so do kernels that the compiler cannot partition.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.custom_derivatives import linear_call
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from bert_jax.model import paths
from bert_jax.model.placement import Placement
from bert_jax.train import rules
from bert_jax.train.mesh_placement import ACTIVATION_RULES
from bert_jax.train.partitioning import FSDP, ROWS, TENSOR, restricted, spec

Specs = tuple[tuple[str, PartitionSpec], ...]  # by path in a layer


@dataclass(frozen=True)
class InShard(Placement):
    """The placement of a model that runs under shard_map over data and fsdp.

    layer_specs    of the parameters that each layer gathers over fsdp, in the stack [L, ...]
    reduce_dtype   that of the sum of their gradients over fsdp
    """

    layer_specs: Specs = ()
    reduce_dtype: str = "float32"

    def constrain(self, name: str, array: Array) -> Array:
        if not self.shards_layers:
            return array
        return jax.lax.with_sharding_constraint(array, _over_tensor(name, array))

    def gather(self, params: Any, prefix: str = "", dtype: DTypeLike | None = None) -> Any:
        specs = dict(self.layer_specs)
        if not prefix or not specs:
            return params

        def whole(path: str, leaf: Array) -> Array:
            if path not in specs:
                return leaf
            of_layer = PartitionSpec(*specs[path][1:])
            return _gathered_for_gradient(leaf, of_layer, dtype or leaf.dtype, self.reduce_dtype)

        return paths.unflatten({path: whole(path, leaf) for path, leaf in paths.flatten(params).items()})

    def whole_shape(self, path: str, array: Array) -> tuple[int, ...]:
        of_stack = dict(self.layer_specs).get(within_layer(path), PartitionSpec())
        sizes = list(array.shape)
        if (axis := axis_of(of_stack, FSDP)) is not None:
            sizes[axis] *= jax.lax.axis_size(FSDP)
        return tuple(sizes)

    @property
    def gathers(self) -> bool:
        return bool(self.layer_specs)

    def row_numbers(self, rows: int) -> tuple[int | jax.Array, int]:
        return jax.lax.axis_index(ROWS) * rows, jax.lax.axis_size(ROWS) * rows

    def gather_rows(self, array: Array) -> Array:
        return jax.lax.all_gather(array, ROWS, tiled=True)

    def shard_kernel(self, kernel: Callable[..., Array], names: Sequence[str]) -> Callable[..., Array]:
        def sharded(*arrays: Array) -> Array:
            specs = tuple(_over_tensor(name, array) for name, array in zip(names, arrays, strict=True))
            return on_tensor_shards(kernel, specs, specs[0])(*arrays)

        return sharded

    @property
    def shards_kernels(self) -> bool:
        return True

    @property
    def shards_layers(self) -> bool:
        return jax.sharding.get_abstract_mesh().shape[TENSOR] > 1


def within_layer(path: str) -> str:
    """Returns the path of a layer's parameter in its layer; an empty string for any other parameter."""
    stack = rules.stack_of(path)
    return path.removeprefix(stack) if stack else ""


def axis_of(spec: PartitionSpec, name: str) -> int | None:
    """Returns the array axis that a spec shards over an axis of the mesh."""
    return next((axis for axis, names in enumerate(spec) if names is not None and name in names), None)


def gathered(shard: Array, spec: PartitionSpec) -> Array:
    """Gathers a parameter over fsdp. `spec` is that of the whole array."""
    if (axis := axis_of(spec, FSDP)) is None:
        return shard

    def gather(own: Array) -> Array:
        return jax.lax.all_gather(own, FSDP, axis=axis, tiled=True)

    own = restricted(spec, [TENSOR])
    return on_tensor_shards(gather, (own,), own)(shard)


def reduced(gradient: Array, spec: PartitionSpec, names: Sequence[str]) -> Array:
    """Sums an array over axes of the mesh, one after the other.

    Each device receives its shard of the array, where `spec`, that of the whole sum, shards it over the axis; else all.
    """
    axes = {name: axis_of(spec, name) for name in names}

    def reduce(own: Array) -> Array:
        for name, axis in axes.items():
            if axis is not None:
                own = _scattered(own, name, axis)
        whole = tuple(name for name, axis in axes.items() if axis is None)
        return jax.lax.psum(own, whole) if whole else own

    own = restricted(spec, [TENSOR])
    return on_tensor_shards(reduce, (own,), own)(gradient)


def on_tensor_shards(
    function: Callable[..., Array], in_specs: tuple[PartitionSpec, ...], out_specs: PartitionSpec
) -> Callable[..., Array]:
    """Returns a function that runs under shard_map over tensor, too; the function itself where that has one device."""
    if jax.sharding.get_abstract_mesh().shape[TENSOR] == 1:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names={TENSOR}, check_vma=False)


def _over_tensor(name: str, array: Array) -> PartitionSpec:
    mesh = jax.sharding.get_abstract_mesh()
    return restricted(spec(ACTIVATION_RULES[name], array.shape, mesh), [TENSOR])


def _scattered(array: Array, name: str, axis: int) -> Array:
    """Sums an array over an axis of the mesh; each device receives its shard of the array axis.

    CPUs of connected processes use gloo, whose reduce-scatter sometimes returns a wrong end of the first device's
    shard, because it changes what it is still sending (github.com/jax-ml/jax/issues/40830). They sum the whole array.
    """
    if jax.distributed.is_initialized() and jax.default_backend() == "cpu":
        size = array.shape[axis] // jax.lax.axis_size(name)
        first = jax.lax.axis_index(name) * size
        return jax.lax.dynamic_slice_in_dim(jax.lax.psum(array, name), first, size, axis)
    return jax.lax.psum_scatter(array, name, scatter_dimension=axis, tiled=True)


def _gathered_for_gradient(shard: Array, spec: PartitionSpec, dtype: DTypeLike, reduce_dtype: DTypeLike) -> Array:
    """Gathers a parameter over fsdp in a dtype; its gradient is reduce-scattered in reduce_dtype."""

    def gather(_: Any, shard: Array) -> Array:
        return gathered(shard.astype(dtype), spec)

    def reduce(_: Any, gradient: Array) -> Array:
        return reduced(gradient.astype(reduce_dtype), spec, (FSDP,)).astype(shard.dtype)

    # A custom_vjp would hide the gather from jax.checkpoint, whose policy knows this call (all_but_gathered).
    return linear_call(gather, reduce, (), shard)
