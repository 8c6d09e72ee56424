"""Sums gradients over the devices of a mesh once a step: each device adds up those of its own rows first.

A step runs under shard_map, in which every device computes on its own rows and calls the collectives itself:

one microbatch    the parameters of a layer are gathered over fsdp, in the compute dtype, when the layer is computed,
                  and again in its backward pass, which reduce-scatters their gradient (ZeRO stage 3, Rajbhandari et
                  al. 2020). A device holds one layer whole at a time, and the parameters outside of layers.
several           all parameters are gathered once, those of layers in the compute dtype. A device adds up the
                  gradients of its microbatches, whole and in float32, and they are reduce-scattered once, after the
                  last one.

Over data, which may span a slower network, only shards of gradients are summed, after all microbatches; with
mesh.shard_optimizer, this sum is sharded, too. The reductions use float32 unless mesh.reduce_dtype names another dtype.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.custom_derivatives import linear_call
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from bert_jax.config import MeshConfig
from bert_jax.model import paths
from bert_jax.model.placement import Placement
from bert_jax.model.runtime import Runtime
from bert_jax.train import rules
from bert_jax.train.mesh_placement import OnMesh, constrain_update
from bert_jax.train.partitioning import DATA, FSDP, ROWS, TENSOR, parameter_spec, update_spec

Sums = Callable[..., Any]  # (runtime, params, batch, counts, key) -> (gradients, terms), summed over the batch's rows


@dataclass(frozen=True)
class Reduction:
    """How gradients are summed over devices: mesh.reduce_dtype and mesh.shard_optimizer.

    reduce_dtype   auto: float32, except where the compiler sums the gradients (over_devices)
    """

    reduce_dtype: str = "auto"
    shard_optimizer: bool = False

    @classmethod
    def of(cls, config: MeshConfig) -> "Reduction":
        return cls(config.reduce_dtype, config.shard_optimizer)

    @property
    def dtype(self) -> str:
        """The dtype of sums that the compiler does not choose."""
        return "float32" if self.reduce_dtype == "auto" else self.reduce_dtype


@dataclass(frozen=True)
class InShard(Placement):
    """The placement of a model that runs under shard_map over all axes: arrays are those of one device.

    layer_axes     the sharded axis of the parameters that each layer gathers, in the stack [L, ...], by path in a layer
    reduce_dtype   that of the sum of their gradients over fsdp
    """

    layer_axes: tuple[tuple[str, int], ...] = ()
    reduce_dtype: str = "float32"

    def gather(self, params: Any, prefix: str = "", dtype: DTypeLike | None = None) -> Any:
        axes = dict(self.layer_axes)
        if not prefix or not axes:
            return params

        def whole(path: str, leaf: Array) -> Array:
            if path not in axes:
                return leaf
            return _gathered(leaf, axes[path] - 1, dtype or leaf.dtype, self.reduce_dtype)

        return paths.unflatten({path: whole(path, leaf) for path, leaf in paths.flatten(params).items()})

    def whole_shape(self, path: str, array: Array) -> tuple[int, ...]:
        axis = dict(self.layer_axes).get(_within_layer(path))
        if axis is None:
            return array.shape
        sizes = list(array.shape)
        sizes[axis] *= jax.lax.axis_size(FSDP)
        return tuple(sizes)

    @property
    def gathers(self) -> bool:
        return bool(self.layer_axes)

    def row_numbers(self, rows: int) -> tuple[int | jax.Array, int]:
        return jax.lax.axis_index(ROWS) * rows, jax.lax.axis_size(ROWS) * rows

    def gather_rows(self, array: Array) -> Array:
        return jax.lax.all_gather(array, ROWS, tiled=True)

    @property
    def shards_kernels(self) -> bool:
        return True


def sums_once(mesh: Any) -> bool:
    """Whether the gradients of several microbatches are reduced over the devices only once: unless tensor is used.

    Under shard_map over data and fsdp alone, XLA (jaxlib 0.10.2) would gather the parameters that tensor shards.
    """
    return not mesh.empty and mesh.size > 1 and mesh.shape[TENSOR] == 1


def over_devices(
    sums: Sums,
    runtime: Runtime,
    microbatches: int,
    reduction: Reduction,
    part: Callable[[Any], Any] = lambda params: params,
) -> Callable[..., Any]:
    """Returns the function (params, batch, counts, key) -> (gradients, terms) of `sums`, on the mesh that is set.

    part    returns the part of the parameters that the gradients are of, with the same paths

    Gradients are sharded as parameters are, or as optimizer state with shard_optimizer; terms are replicated. `sums` is
    called with whole parameters, except those that its runtime's placement gathers.

    Where the mesh has tensor, and with one microbatch on a mesh of `data` alone without other settings, the compiler
    decides: it sums the gradients of a layer in its backward pass, in the compute dtype, so most of the communication
    overlaps with computation.
    """
    mesh = jax.sharding.get_abstract_mesh()
    by_compiler = microbatches == 1 and reduction == Reduction() and not mesh.empty and mesh.shape[FSDP] == 1
    if not isinstance(runtime.placement, OnMesh) or not sums_once(mesh) or by_compiler:
        whole = functools.partial(sums, runtime)
        return _with_sharded_update(whole) if reduction.shard_optimizer else whole

    def sharded(params: Any, batch: Any, *others: Any) -> Any:
        specs = _specs(parameter_spec, params, mesh)
        trained = jax.eval_shape(part, params)
        sharded_as = _specs(update_spec if reduction.shard_optimizer else parameter_spec, trained, mesh)
        axes = {path: _axis(spec, FSDP) for path, spec in paths.flatten(specs).items()}
        data_axes = {path: _axis(spec, DATA) for path, spec in paths.flatten(sharded_as).items()}
        by_layer = gathered_by_layers(params, axes) if microbatches == 1 else {}
        placement = InShard(tuple(sorted(by_layer.items())), reduction.dtype)
        inside = dataclasses.replace(runtime, placement=placement)

        def reduced(params: Any, batch: Any, *others: Any) -> Any:
            given = {
                path: leaf if _within_layer(path) in by_layer else _whole(path, leaf, axes[path], runtime.dtype)
                for path, leaf in paths.flatten(params).items()
            }
            gradients, terms = sums(inside, paths.unflatten(given), batch, *others)
            found = {}
            for path, leaf in paths.flatten(gradients).items():
                to_scatter = [(DATA, data_axes[path])]
                if _within_layer(path) not in by_layer:
                    to_scatter.insert(0, (FSDP, axes[path]))
                found[path] = _reduced(leaf.astype(reduction.dtype), to_scatter).astype(leaf.dtype)
            return paths.unflatten(found), jax.lax.psum(terms, ROWS)

        in_specs = (specs, PartitionSpec(ROWS), *(PartitionSpec() for _ in others))
        out_specs = (sharded_as, PartitionSpec())
        return jax.shard_map(reduced, in_specs=in_specs, out_specs=out_specs, check_vma=False)(params, batch, *others)

    return sharded


def _with_sharded_update(whole: Callable[..., Any]) -> Callable[..., Any]:
    def sharded(*arguments: Any) -> Any:
        gradients, terms = whole(*arguments)
        return constrain_update(gradients), terms

    return sharded


def gathered_by_layers(params: Any, axes: dict[str, int | None]) -> dict[str, int]:
    """Returns the sharded axis, by path in a layer, of the parameters that each layer gathers for itself.

    Parameters that layers share, [1, ...], are left out: their gradients are summed over the layers before they are
    reduced. So are those of a model with several stacks that are not sharded alike.
    """
    found: dict[str, set[int | None]] = {}
    for path, leaf in paths.flatten(params).items():
        if name := _within_layer(path):
            found.setdefault(name, set()).add(axes[path] if leaf.shape[0] > 1 else None)
    alike = {name: next(iter(of_stacks)) for name, of_stacks in found.items() if len(of_stacks) == 1}
    return {name: axis for name, axis in alike.items() if axis is not None}


def _specs(spec_of: Callable[..., PartitionSpec], params: Any, mesh: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: spec_of(path, leaf, mesh), params)


def _axis(spec: PartitionSpec, name: str) -> int | None:
    """Returns the array axis that a parameter's spec shards over an axis of the mesh."""
    return next((axis for axis, names in enumerate(spec) if names is not None and name in names), None)


def _within_layer(path: str) -> str:
    """Returns the path of a layer's parameter in its layer; an empty string for any other parameter."""
    stack = rules.stack_of(path)
    return path.removeprefix(stack) if stack else ""


def _whole(path: str, leaf: Array, axis: int | None, dtype: DTypeLike) -> Array:
    """Gathers a parameter over fsdp, one of a stack of layers in the compute dtype.

    Gradients of parameters that layers share are summed over the layers, and these parameters stay float32.
    """
    if axis is None:
        return leaf
    stacked = rules.stack_of(path) is not None and leaf.shape[0] > 1
    return jax.lax.all_gather(leaf.astype(dtype) if stacked else leaf, FSDP, axis=axis, tiled=True)


def _reduced(gradient: Array, axes: list[tuple[str, int | None]]) -> Array:
    """Sums an array over axes of the mesh, one after the other: as shards of that array axis, or whole (None)."""
    for name, axis in axes:
        if axis is not None:
            gradient = _scattered(gradient, name, axis)
    whole = tuple(name for name, axis in axes if axis is None)
    return jax.lax.psum(gradient, whole) if whole else gradient


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


def _gathered(shard: Array, axis: int, dtype: DTypeLike, reduce_dtype: DTypeLike) -> Array:
    """Gathers a parameter over fsdp in a dtype; its gradient is reduce-scattered in reduce_dtype."""

    def gather(_: Any, shard: Array) -> Array:
        return jax.lax.all_gather(shard.astype(dtype), FSDP, axis=axis, tiled=True)

    def reduce(_: Any, gradient: Array) -> Array:
        return _scattered(gradient.astype(reduce_dtype), FSDP, axis).astype(shard.dtype)

    # A custom_vjp would hide the gather from jax.checkpoint, whose policy knows this call (all_but_gathered).
    return linear_call(gather, reduce, (), shard)
