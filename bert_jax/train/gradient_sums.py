"""Sums gradients over a mesh once per step: each device first adds up the gradients of its own rows.

`over_devices` is the entry point. It runs a step under shard_map, in which every device computes on its own rows and
calls the collectives itself:

one microbatch    a layer's parameters are gathered over fsdp, in the compute dtype, when the layer is computed, and
                  again in its backward pass, which reduce-scatters their gradient (ZeRO stage 3, Rajbhandari et al.
                  2020). A device holds one whole layer at a time, and the parameters outside of layers.
several           all parameters are gathered once, those of layers in the compute dtype. A device adds up the
                  gradients of its microbatches, whole and in float32, and reduce-scatters them after the last one.

Over data, which may span a slower network, only shards of gradients are summed, after all microbatches; with
mesh.shard_optimizer, this sum is sharded, too. The reductions use float32 unless mesh.reduce_dtype names another dtype.

Arrays sharded over tensor stay sharded in all of this, and the compiler sums over that axis. For a collective over data
or fsdp, however, it (XLA of jaxlib 0.10.2) gathers them. Therefore each of these collectives runs in a shard_map over
tensor, and so do kernels that the compiler cannot partition.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.custom_derivatives import linear_call
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from bert_jax.config import MeshConfig
from bert_jax.model import layers
from bert_jax.model.runtime import Placement, Runtime
from bert_jax.train import rules
from bert_jax.train.sharding import (
    ACTIVATION_RULES,
    AXES,
    DATA,
    FSDP,
    ROWS,
    TENSOR,
    OnMesh,
    constrained,
    parameter_spec,
    restricted,
    spec,
    update_spec,
)

# Pairs, not a dict: a placement is hashed as a part of the runtime.
Specs = tuple[tuple[str, PartitionSpec], ...]  # by path in a layer


@dataclass(frozen=True)
class InShard(Placement):
    """The placement for a model under shard_map over data and fsdp.

    Args:
        layer_specs: specs in the stack [L, ...] for the parameters that each layer gathers over fsdp.
        reduce_dtype: the dtype in which their gradients are summed over fsdp.
    """

    layer_specs: Specs = ()
    reduce_dtype: str = "float32"

    def constrain(self, name: str, array: Array) -> Array:
        if not self.shards_layers:  # nothing is left to the compiler
            return array
        return jax.lax.with_sharding_constraint(array, _over_tensor(name, array))

    def gather(self, params: Any, prefix: str = "", dtype: DTypeLike | None = None) -> Any:
        # A call without a prefix is for the whole model, whose other parameters over_devices has gathered.
        specs = dict(self.layer_specs)
        if not prefix or not specs:
            return params

        def whole(path: str, shard: Array) -> Array:
            if path not in specs:
                return shard
            # Specs describe the stack, [L, ...]; the layer here has no first axis.
            spec, gathered_dtype = PartitionSpec(*specs[path][1:]), dtype or shard.dtype

            # The cast comes before the gather, so that fewer bytes travel. The gradient's sum has a dtype of its own,
            # and ends in the parameter's.
            def gather(_: Any, shard: Array) -> Array:
                return gathered(shard.astype(gathered_dtype), spec)

            def reduce(_: Any, gradient: Array) -> Array:
                return reduced(gradient.astype(self.reduce_dtype), spec, (FSDP,)).astype(shard.dtype)

            # A custom_vjp would hide the gather from jax.checkpoint, whose policy knows this call (all_but_gathered).
            return linear_call(gather, reduce, (), shard)

        return layers.unflatten({path: whole(path, leaf) for path, leaf in layers.flatten(params).items()})

    def whole_shape(self, path: str, array: Array) -> tuple[int, ...]:
        stack_spec = dict(self.layer_specs).get(within_layer(path), PartitionSpec())
        sizes = list(array.shape)
        if (axis := sharded_axis(stack_spec, FSDP)) is not None:
            sizes[axis] *= jax.lax.axis_size(FSDP)
        return tuple(sizes)

    @property
    def gathers(self) -> bool:
        return bool(self.layer_specs)

    def row_numbers(self, rows: int) -> tuple[int | jax.Array, int]:
        # The numbers in the global batch, so that dropout's masks are those of one device.
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
    """Returns a layer parameter's path in its layer; an empty string for any other parameter."""
    stack = rules.stack_path(path)
    return path.removeprefix(stack) if stack else ""


def sharded_axis(spec: PartitionSpec, name: str) -> int | None:
    """Returns the array axis that a spec shards over a mesh axis."""
    return next((axis for axis, names in enumerate(spec) if names is not None and name in names), None)


def gathered(shard: Array, spec: PartitionSpec) -> Array:
    """Gathers a parameter over fsdp; `spec` describes the whole array."""
    if (axis := sharded_axis(spec, FSDP)) is None:
        return shard

    def gather(own: Array) -> Array:
        return jax.lax.all_gather(own, FSDP, axis=axis, tiled=True)

    own = restricted(spec, [TENSOR])
    return on_tensor_shards(gather, (own,), own)(shard)


def reduced(gradient: Array, spec: PartitionSpec, names: Sequence[str]) -> Array:
    """Sums an array over mesh axes, one after the other.

    If `spec`, which describes the whole sum, shards the array over an axis, a device receives its shard, otherwise all.
    """
    axes = {name: sharded_axis(spec, name) for name in names}
    # CPUs of connected processes use gloo. Its reduce-scatter sometimes returns a wrong end of the first device's
    # shard, because it changes data that it is still sending (github.com/jax-ml/jax/issues/40830).
    by_gloo = jax.distributed.is_initialized() and jax.default_backend() == "cpu"

    def reduce(own: Array) -> Array:
        for name, axis in axes.items():
            if axis is None:
                continue
            if by_gloo:
                # The sum of everything, of which each device then takes its shard.
                size = own.shape[axis] // jax.lax.axis_size(name)
                first = jax.lax.axis_index(name) * size
                own = jax.lax.dynamic_slice_in_dim(jax.lax.psum(own, name), first, size, axis)
            else:
                own = jax.lax.psum_scatter(own, name, scatter_dimension=axis, tiled=True)
        # Last, when this array is smallest: one sum over all axes that do not shard it.
        whole = tuple(name for name, axis in axes.items() if axis is None)
        return jax.lax.psum(own, whole) if whole else own

    own = restricted(spec, [TENSOR])
    return on_tensor_shards(reduce, (own,), own)(gradient)


def on_tensor_shards(
    function: Callable[..., Array], in_specs: tuple[PartitionSpec, ...], out_specs: PartitionSpec
) -> Callable[..., Array]:
    """Makes a function run under shard_map over tensor, too; the function itself if tensor has one device."""
    if jax.sharding.get_abstract_mesh().shape[TENSOR] == 1:
        return function
    # Only tensor: over_devices has made data and fsdp manual already.
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names={TENSOR}, check_vma=False)


def _over_tensor(name: str, array: Array) -> PartitionSpec:
    mesh = jax.sharding.get_abstract_mesh()
    return restricted(spec(ACTIVATION_RULES[name], array.shape, mesh), [TENSOR])


Sums = Callable[..., Any]  # (runtime, params, batch, counts, key) -> (gradients, terms), summed over the batch's rows


def reduce_dtype(config: MeshConfig) -> str:
    """The dtype of sums that the compiler does not choose."""
    return "float32" if config.reduce_dtype == "auto" else config.reduce_dtype


def sums_once(mesh: Any) -> bool:
    """Whether several devices have rows, so that gradients of microbatches are added up before they are reduced."""
    return not mesh.empty and mesh.shape[DATA] * mesh.shape[FSDP] > 1


def sum_dtype(mesh: Any, microbatches: int, config: MeshConfig, compute_dtype: str) -> str:
    """The dtype in which devices sum gradients; empty if one device has all rows, and nothing is summed."""
    if not sums_once(mesh):
        return ""
    return compute_dtype if _by_compiler(mesh, microbatches, config) else reduce_dtype(config)


def over_devices(
    sums: Sums,
    runtime: Runtime,
    microbatches: int,
    config: MeshConfig,
    part: Callable[[Any], Any] = lambda params: params,
) -> Callable[..., Any]:
    """Returns a function (params, batch, counts, key) -> (gradients, terms) that calls `sums` on the current mesh.

    Gradients are sharded like parameters, or like optimizer state with shard_optimizer; terms are replicated.

    Args:
        sums: called with whole parameters, except those gathered by its runtime's placement.
        part: selects the differentiated part of the parameters; paths stay the same.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # The compiler sums gradients in the compute dtype, layer by layer, so communication overlaps with computation.
    by_compiler = not sums_once(mesh) or _by_compiler(mesh, microbatches, config)
    if by_compiler or not isinstance(runtime.placement, OnMesh):

        def whole(*arguments: Any) -> Any:
            gradients, terms = sums(runtime, *arguments)
            return constrained(gradients, update_spec) if config.shard_optimizer else gradients, terms

        return whole

    dtype = reduce_dtype(config)
    names = AXES if mesh.shape[TENSOR] == 1 else ROWS  # the compiler has to do with tensor alone

    def sharded(params: Any, batch: Any, *others: Any) -> Any:
        specs, trained = _specs(parameter_spec, params, mesh), jax.eval_shape(part, params)
        sum_specs = _specs(update_spec if config.shard_optimizer else parameter_spec, trained, mesh)
        param_specs, total_specs = layers.flatten(specs), layers.flatten(sum_specs)
        by_layer = gathered_by_layers(params, param_specs) if microbatches == 1 else {}
        placement = InShard(tuple(sorted(by_layer.items())), dtype)
        inside = dataclasses.replace(runtime, placement=placement)

        def on_rows(params: Any, batch: Any, *others: Any) -> Any:
            own = {
                path: leaf if within_layer(path) in by_layer else _whole(path, leaf, param_specs[path], runtime.dtype)
                for path, leaf in layers.flatten(params).items()
            }
            gradients, terms = sums(inside, layers.unflatten(own), batch, *others)
            totals = {}
            for path, leaf in layers.flatten(gradients).items():
                # Layers that gather have already summed over fsdp. For others it comes first, and data sums shards.
                axes = (DATA,) if within_layer(path) in by_layer else (FSDP, DATA)
                totals[path] = reduced(leaf.astype(dtype), total_specs[path], axes).astype(leaf.dtype)
            return layers.unflatten(totals), jax.lax.psum(terms, ROWS)

        in_specs, out_specs = (jax.tree.map(lambda spec: restricted(spec, names), tree) for tree in (specs, sum_specs))
        return jax.shard_map(
            on_rows,
            in_specs=(in_specs, PartitionSpec(ROWS), *(PartitionSpec() for _ in others)),
            out_specs=(out_specs, PartitionSpec()),
            axis_names=set(names),
            check_vma=False,
        )(params, batch, *others)

    return sharded


def _by_compiler(mesh: Any, microbatches: int, config: MeshConfig) -> bool:
    """Whether the compiler sums the gradients of several devices: with one microbatch, no fsdp and default settings."""
    plain = config.reduce_dtype == "auto" and not config.shard_optimizer
    return microbatches == 1 and plain and mesh.shape[FSDP] == 1


def gathered_by_layers(params: Any, specs: dict[str, PartitionSpec]) -> dict[str, PartitionSpec]:
    """Returns the specs of parameters that each layer gathers for itself, by path in a layer.

    Shared parameters, [1, ...], are left out: their gradients are summed over the layers before they are
    reduced. So are parameters with different specs in different stacks.
    """
    by_stack: dict[str, set[PartitionSpec | None]] = {}
    for path, leaf in layers.flatten(params).items():
        if name := within_layer(path):
            by_layer = leaf.shape[0] > 1 and sharded_axis(specs[path], FSDP) is not None
            by_stack.setdefault(name, set()).add(specs[path] if by_layer else None)
    # One spec for all stacks, and not None.
    return {name: spec for name, (spec, *others) in by_stack.items() if spec is not None and not others}


def _specs(leaf_spec: Callable[..., PartitionSpec], params: Any, mesh: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf_spec(path, leaf, mesh), params)


def _whole(path: str, leaf: Array, spec: PartitionSpec, dtype: DTypeLike) -> Array:
    """Gathers a parameter over fsdp, in the compute dtype if it belongs to a stack of layers."""
    # Gradients of parameters that layers share, [1, ...], are summed over the layers, so these parameters stay float32.
    narrow = within_layer(path) and leaf.shape[0] > 1 and sharded_axis(spec, FSDP) is not None
    return gathered(leaf.astype(dtype) if narrow else leaf, spec)
