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
What tensor shards stays sharded in all of this; the compiler partitions over that axis (train/shard_placement.py).
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from bert_jax.config import MeshConfig
from bert_jax.model import paths
from bert_jax.model.runtime import Runtime
from bert_jax.train.mesh_placement import OnMesh, constrain_update
from bert_jax.train.partitioning import AXES, DATA, FSDP, ROWS, TENSOR, parameter_spec, restricted, update_spec
from bert_jax.train.shard_placement import InShard, axis_of, gathered, reduced, within_layer

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


def sums_once(mesh: Any) -> bool:
    """Whether several devices have rows, so that the gradients of microbatches are added up before they are reduced."""
    return not mesh.empty and mesh.shape[DATA] * mesh.shape[FSDP] > 1


def sum_dtype(mesh: Any, microbatches: int, reduction: Reduction, compute_dtype: str) -> str:
    """The dtype in which devices sum gradients; empty where one device has all rows, and nothing is summed."""
    if not sums_once(mesh):
        return ""
    return compute_dtype if _by_compiler(mesh, microbatches, reduction) else reduction.dtype


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

    With one microbatch and no fsdp, and without other settings, the compiler decides: it sums the gradients of a layer
    in its backward pass, in the compute dtype, so most of the communication overlaps with computation.
    """
    mesh = jax.sharding.get_abstract_mesh()
    by_compiler = not sums_once(mesh) or _by_compiler(mesh, microbatches, reduction)
    if by_compiler or not isinstance(runtime.placement, OnMesh):
        whole = functools.partial(sums, runtime)
        return _with_sharded_update(whole) if reduction.shard_optimizer else whole

    def sharded(params: Any, batch: Any, *others: Any) -> Any:
        specs = _specs(parameter_spec, params, mesh)
        trained = jax.eval_shape(part, params)
        sharded_as = _specs(update_spec if reduction.shard_optimizer else parameter_spec, trained, mesh)
        spec_of, sum_spec_of = paths.flatten(specs), paths.flatten(sharded_as)
        by_layer = gathered_by_layers(params, spec_of) if microbatches == 1 else {}
        placement = InShard(tuple(sorted(by_layer.items())), reduction.dtype)
        inside = dataclasses.replace(runtime, placement=placement)

        def on_rows(params: Any, batch: Any, *others: Any) -> Any:
            given = {
                path: leaf if within_layer(path) in by_layer else _whole(path, leaf, spec_of[path], runtime.dtype)
                for path, leaf in paths.flatten(params).items()
            }
            gradients, terms = sums(inside, paths.unflatten(given), batch, *others)
            found = {}
            for path, leaf in paths.flatten(gradients).items():
                names = (DATA,) if within_layer(path) in by_layer else (FSDP, DATA)
                found[path] = reduced(leaf.astype(reduction.dtype), sum_spec_of[path], names).astype(leaf.dtype)
            return paths.unflatten(found), jax.lax.psum(terms, ROWS)

        # With one device on tensor, everything is left to this function, and nothing to the compiler.
        names = AXES if mesh.shape[TENSOR] == 1 else ROWS
        own, own_sums = (jax.tree.map(lambda whole: restricted(whole, names), each) for each in (specs, sharded_as))
        return jax.shard_map(
            on_rows,
            in_specs=(own, PartitionSpec(ROWS), *(PartitionSpec() for _ in others)),
            out_specs=(own_sums, PartitionSpec()),
            axis_names=set(names),
            check_vma=False,
        )(params, batch, *others)

    return sharded


def _by_compiler(mesh: Any, microbatches: int, reduction: Reduction) -> bool:
    return microbatches == 1 and reduction == Reduction() and mesh.shape[FSDP] == 1


def _with_sharded_update(whole: Callable[..., Any]) -> Callable[..., Any]:
    def sharded(*arguments: Any) -> Any:
        gradients, terms = whole(*arguments)
        return constrain_update(gradients), terms

    return sharded


def gathered_by_layers(params: Any, specs: dict[str, PartitionSpec]) -> dict[str, PartitionSpec]:
    """Returns the specs, by path in a layer, of the parameters that each layer gathers for itself.

    Parameters that layers share, [1, ...], are left out: their gradients are summed over the layers before they are
    reduced. So are those of a model with several stacks that are not sharded alike.
    """
    found: dict[str, set[PartitionSpec | None]] = {}
    for path, leaf in paths.flatten(params).items():
        if name := within_layer(path):
            by_layer = leaf.shape[0] > 1 and axis_of(specs[path], FSDP) is not None
            found.setdefault(name, set()).add(specs[path] if by_layer else None)
    alike = {name: next(iter(of_stacks)) for name, of_stacks in found.items() if len(of_stacks) == 1}
    return {name: spec for name, spec in alike.items() if spec is not None}


def _specs(spec_of: Callable[..., PartitionSpec], params: Any, mesh: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: spec_of(path, leaf, mesh), params)


def _whole(path: str, leaf: Array, spec: PartitionSpec, dtype: DTypeLike) -> Array:
    """Gathers a parameter over fsdp, one of a stack of layers in the compute dtype.

    Gradients of parameters that layers share are summed over the layers, and these parameters stay float32.
    """
    stacked = within_layer(path) and leaf.shape[0] > 1
    sharded = axis_of(spec, FSDP) is not None
    return gathered(leaf.astype(dtype) if stacked and sharded else leaf, spec)
