"""The mesh, and which array lies where on it. No other file names a mesh axis.

Today every device holds all parameters and a share of each batch's rows (axis `data`).
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bert_jax.command import UserError
from bert_jax.config import MeshConfig
from bert_jax.train import rules

PARAMETER_RULES: tuple[tuple[str, PartitionSpec], ...] = ((r".*", PartitionSpec()),)


def make_mesh(config: MeshConfig) -> Mesh:
    """All devices on the axes of config.mesh. Raises UserError where the sizes do not fill them."""
    devices = jax.device_count()
    size = devices if config.data == -1 else config.data
    if size != devices:
        raise UserError(f"mesh.data is {config.data}, but there are {devices} devices; use --config.mesh.data=-1")
    return jax.make_mesh((size,), ("data",), axis_types=(AxisType.Auto,))


def check_batch(batch_size: int, microbatches: int, mesh: Mesh) -> None:
    """Raises UserError unless every device gets the same number of rows of every microbatch."""
    if microbatches < 1:
        raise UserError(f"microbatches is {microbatches}; use 1 or more")
    wanted = mesh.shape["data"] * microbatches
    if batch_size < 1 or batch_size % wanted:
        better = max(wanted, -(-batch_size // wanted) * wanted)
        raise UserError(
            f"batch_size {batch_size} does not divide over {mesh.shape['data']} data shards x {microbatches} "
            f"microbatches. Use a multiple of {wanted}: --config.batch_size={better}"
        )


def whole_rows(batch_size: int) -> int:
    """The evaluation batch of at least batch_size rows that gives every device as many. Raises UserError below 1."""
    if batch_size < 1:
        raise UserError(f"the evaluation batch size is {batch_size}; use 1 or more")
    devices = jax.device_count()
    return -(-batch_size // devices) * devices


def shardings(mesh: Mesh, tree: Any) -> Any:
    """A NamedSharding for each leaf of a tree of (abstract) parameters or of a training state, by the rules above.

    An optimizer's moment of a parameter has a path that ends as the parameter's does, so it lies where that lies.
    """

    def place(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, rules.first_match(PARAMETER_RULES, name) if leaf.ndim else PartitionSpec())

    return jax.tree_util.tree_map_with_path(place, tree)


def with_shardings(mesh: Mesh, tree: Any) -> Any:
    """The same abstract tree (jax.ShapeDtypeStruct), each leaf with its sharding."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings(mesh, tree),
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """How a value lies that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """How a batch lies: its first axis over `data`."""
    return NamedSharding(mesh, PartitionSpec("data"))


def local_rows(batch_size: int, mesh: Mesh) -> slice:
    """The rows of a global batch that this process's devices own: what it has to load."""
    indices = rows_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    spans = [index[0].indices(batch_size) for index in indices if index]
    return slice(min(span[0] for span in spans), max(span[1] for span in spans))


def place(batch: Any, batch_size: int, mesh: Mesh) -> Any:
    """Global arrays from this process's rows (local_rows) of a batch of numpy arrays."""
    sharding = rows_sharding(mesh)

    def put(local: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, local, (batch_size, *local.shape[1:]))

    return jax.tree.map(put, batch)
