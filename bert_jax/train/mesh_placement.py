"""Shards the arrays of a traced program over the mesh: activations, gathered parameters, kernels and gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from bert_jax.model import paths
from bert_jax.model.placement import Placement
from bert_jax.train import rules
from bert_jax.train.partitioning import (
    FSDP,
    PARAMETER_RULES,
    ROWS,
    TENSOR,
    Axes,
    parameter_spec,
    restricted,
    spec,
    update_spec,
)

# By the names of model/placement.py.
ACTIVATION_RULES: dict[str, Axes] = {
    "hidden": (ROWS, None, None),
    "heads": (ROWS, ..., TENSOR, None),
    "inner": (ROWS, ..., TENSOR),
    "logits": (ROWS, None, TENSOR),
    "sequence_ids": (ROWS, None),
    "lengths": (ROWS,),
}


@dataclass(frozen=True)
class OnMesh(Placement):
    """Shards activations by the rules above, on the mesh that is set (jax.set_mesh) while a model is traced."""

    def constrain(self, name: str, array: jax.Array) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        if not _shards_parameters(mesh):  # the sharding of rows propagates from the batch by itself
            return array
        return jax.lax.with_sharding_constraint(array, spec(ACTIVATION_RULES[name], array.shape, mesh))

    def gather(self, params: Any, prefix: str = "", dtype: DTypeLike | None = None) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if not self.gathers:
            return params

        def whole(path: str, leaf: jax.Array) -> jax.Array:
            full = f"{prefix}/{path}" if prefix else path
            axes = rules.first_match(PARAMETER_RULES, full)
            if FSDP not in axes or (not prefix and rules.stack_of(full)):
                return leaf
            axes = tuple(None if axis == FSDP else axis for axis in (axes[1:] if prefix else axes))
            gathered = leaf if dtype is None else leaf.astype(dtype)  # bfloat16 halves the bytes that are gathered
            return jax.lax.with_sharding_constraint(gathered, spec(axes, leaf.shape, mesh))

        return paths.unflatten({path: whole(path, leaf) for path, leaf in paths.flatten(params).items()})

    @property
    def gathers(self) -> bool:
        mesh = jax.sharding.get_abstract_mesh()
        return not mesh.empty and mesh.shape[FSDP] > 1

    def shard_kernel(self, kernel: Callable[..., jax.Array], names: Sequence[str]) -> Callable[..., jax.Array]:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return kernel

        def sharded(*arrays: jax.Array) -> jax.Array:
            laid = zip(names, arrays, strict=True)
            specs = tuple(spec(ACTIVATION_RULES[name], array.shape, mesh) for name, array in laid)
            return jax.shard_map(kernel, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)

        return sharded

    @property
    def shards_kernels(self) -> bool:
        return not jax.sharding.get_abstract_mesh().empty

    @property
    def shards_layers(self) -> bool:
        mesh = jax.sharding.get_abstract_mesh()
        return not mesh.empty and mesh.shape[TENSOR] > 1


def constrain_update(tree: Any) -> Any:
    """A traced tree with the shapes and paths of parameters, sharded as mesh.shard_optimizer shards their update."""
    return _constrained(tree, update_spec)


def gather_update(params: Any) -> Any:
    """Traced parameters with the sharding of constrain_update, gathered to that of parameters."""
    return _constrained(params, parameter_spec)


def divided(function: Callable[[jax.Array], jax.Array], stack: jax.Array) -> jax.Array:
    """function(stack) for a function of each item of a traced stack [K, ...] alone, the items divided over all devices.

    Where K does not divide, zeros fill it up. Every device has the whole stack before and the whole result after it,
    each gathered at once. On one device, and without a mesh, this is function(stack).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function(stack)
    missing = -len(stack) % mesh.size
    whole, over_all = PartitionSpec(), PartitionSpec(mesh.axis_names)
    # Without `whole`, the compiler would also divide what the stack is made from, such as the optimizer's state.
    filled = jnp.pad(jax.lax.with_sharding_constraint(stack, whole), [(0, missing)] + [(0, 0)] * (stack.ndim - 1))
    found = jax.lax.with_sharding_constraint(function(jax.lax.with_sharding_constraint(filled, over_all)), over_all)
    return jax.lax.with_sharding_constraint(found, whole)[: len(stack)]


def constrain_params(tree: Any) -> Any:
    """A traced tree with the shapes and paths of parameters, such as gradients, with the parameters' sharding on the
    mesh that is set. Under shard_map, the compiler shards only over the axes that are left to it, if any."""
    mesh = jax.sharding.get_abstract_mesh()
    if not _shards_parameters(mesh) or mesh.are_all_axes_manual:
        return tree
    return _constrained(tree, lambda *of_leaf: restricted(parameter_spec(*of_leaf), mesh.auto_axes))


def _constrained(tree: Any, spec_of: Callable[..., PartitionSpec]) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tree

    def constrain(path: Any, leaf: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(leaf, spec_of(path, leaf, mesh))

    return jax.tree_util.tree_map_with_path(constrain, tree)


def _shards_parameters(mesh: Any) -> bool:
    return not mesh.empty and mesh.shape[FSDP] * mesh.shape[TENSOR] > 1
