"""The mesh, and the sharding of every array over it. No other file names a mesh axis.

data     rows of a batch; parameters are replicated
fsdp     rows of a batch too; parameters, gradients and optimizer state are sharded, and gathered when a layer is
         computed (fully sharded data parallelism: ZeRO stage 3, Rajbhandari et al. 2020)
tensor   attention heads, the feed-forward's inner width and the vocabulary (Shoeybi et al. 2019, section 3)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from bert_jax.command import UserError
from bert_jax.config import MeshConfig, ModelConfig
from bert_jax.model import paths
from bert_jax.model.placement import Placement
from bert_jax.shapes import padded_vocabulary
from bert_jax.train import rules

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")  # outermost first: the axis that communicates least
ROWS = (DATA, FSDP)  # the axes over which the rows of a batch are sharded
FLAG = "--config.mesh"  # the flag that sets MeshConfig in commands that take a recipe

Axes = tuple[
    str | tuple[str, ...] | EllipsisType | None, ...
]  # a mesh axis for each array axis; ... stands for any number of None

# Layers are stacked, [L, ...], and L is never sharded. An array with another number of axes than its rule is
# replicated.
PARAMETER_RULES: tuple[tuple[str, Axes], ...] = (
    (r"(^|/)layers/attention/qkv/kernel$", (None, FSDP, None, TENSOR, None)),  # [L, D, 3, N, H]
    (r"(^|/)layers/attention/qkv/bias$", (None, None, TENSOR, None)),
    (r"(^|/)layers/attention/output/kernel$", (None, TENSOR, None, FSDP)),  # [L, N, H, D]
    (r"(^|/)layers/feed_forward/input/kernel$", (None, FSDP, ..., TENSOR)),  # [L, D, F], gated [L, D, 2, F]
    (r"(^|/)layers/feed_forward/input/bias$", (None, ..., TENSOR)),
    (r"(^|/)layers/feed_forward/output/kernel$", (None, TENSOR, FSDP)),  # [L, F, D]
    (r"(^|/)(token|output)/table$", (TENSOR, FSDP)),  # [V, D]: the embeddings, and an output that is not tied to them
    (r"(^|/)position/table$", (None, FSDP)),
    (r"(^|/)relative_bias/table$", (None, TENSOR)),  # [32, N]
    (r"(^|/)(mlm_head|span_boundary_head)/bias$", (TENSOR,)),  # [V]
    (r"(^|/)(dense|transform|first|second|start|end|hidden)/kernel$", (FSDP, None)),  # of heads
    (r".*", ()),
)
# By the names of model/placement.py.
ACTIVATION_RULES: dict[str, Axes] = {
    "hidden": (ROWS, None, None),
    "heads": (ROWS, ..., TENSOR, None),
    "inner": (ROWS, ..., TENSOR),
    "logits": (ROWS, None, TENSOR),
    "sequence_ids": (ROWS, None),
}


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None, flag: str = FLAG) -> Mesh:
    """The mesh of the devices (None: all of this process; those of jax.experimental.topologies will do).

    The network between TPU slices, or between GPU machines, is slower than within one: `data` is the outermost axis
    and spans them. Raises UserError, which names `flag`, where the sizes do not fill the devices, or where the number
    of slices does not divide mesh.data.
    """
    devices = jax.devices() if devices is None else devices
    sizes = axis_sizes(config, len(devices), flag)
    return Mesh(device_array(sizes, devices, flag), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def device_array(sizes: tuple[int, ...], devices: Sequence[Any], flag: str = FLAG) -> np.ndarray:
    """The devices as an array of those sizes. Neighbors on a later axis are closer to each other, and the first axis
    spans the slices. Raises UserError where that is impossible."""
    slices = len({getattr(device, "slice_index", None) for device in devices})
    if sizes[0] % slices:
        raise UserError(
            f"mesh.data={sizes[0]} does not divide over {slices} slices (groups of devices with a slower network "
            f"between them), which only mesh.data may span; use {flag}.data=-1, and fsdp and tensor whose "
            f"product divides the {len(devices) // slices} devices of a slice"
        )
    if slices > 1:
        within = (sizes[0] // slices, *sizes[1:])
        return mesh_utils.create_hybrid_device_mesh(within, (slices, 1, 1), devices, allow_split_physical_axes=True)
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def axis_sizes(config: MeshConfig, devices: int, flag: str = FLAG) -> tuple[int, ...]:
    """The number of devices on each axis. Raises UserError where their product is not the number of devices."""
    sizes = [config.data, config.fsdp, config.tensor]
    for name, size in zip(AXES, sizes, strict=True):
        if size < 1 and size != -1:
            raise UserError(f"mesh.{name} is {size}; use 1 or more, or -1 for the devices that the other axes leave")
    if sizes.count(-1) > 1:
        raise UserError(f"several axes of mesh are -1, but only one can take the remaining devices: {flag}.data=-1")
    given = math.prod(size for size in sizes if size != -1)
    given_sizes = " x ".join(f"mesh.{name}={size}" for name, size in zip(AXES, sizes, strict=True))
    if devices % given or (-1 not in sizes and given != devices):
        inner = math.prod(size for size in sizes[1:] if size != -1)
        advice = f"{flag}.data=-1"
        if devices % inner:
            advice = f"{flag}.data=-1, and fsdp and tensor whose product divides {devices}"
        raise UserError(f"{given_sizes} does not use exactly the {devices} devices of this run; use {advice}")
    return tuple(devices // given if size == -1 else size for size in sizes)


def row_shards(mesh: Mesh) -> int:
    """The number of shards of the rows of a batch."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def check_batch(batch_size: int, microbatches: int, mesh: Mesh, key: str = "batch_size") -> None:
    """Raises UserError unless every device gets the same number of rows of every microbatch.

    key is the configuration key that sets the batch size.
    """
    if microbatches < 1:
        raise UserError(f"microbatches is {microbatches}; use 1 or more")
    wanted = row_shards(mesh) * microbatches
    if batch_size < 1 or batch_size % wanted:
        better = max(wanted, -(-batch_size // wanted) * wanted)
        axes = ", ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in ROWS)
        raise UserError(
            f"{key} {batch_size} does not divide over {row_shards(mesh)} shards of rows ({axes}) x {microbatches} "
            f"microbatches. Use a multiple of {wanted}: "
            + (f"--config.batch_size={better}" if key == "batch_size" else f"{better} in --config.{key}")
        )


def check_model(model: ModelConfig, mesh: Mesh, flag: str = FLAG) -> None:
    """Raises UserError, which names `flag`, where an axis of the mesh does not divide what it shards of the layers."""
    cut = (
        ("attention heads", model.heads, TENSOR),
        ("inner units of the feed-forward", model.feed_forward, TENSOR),
        ("entries of the token table", padded_vocabulary(model.vocab_size), TENSOR),
        ("units of width", model.width, FSDP),
    )
    for what, count, axis in cut:
        if count % mesh.shape[axis]:
            better = math.gcd(*(other for _, other, of in cut if of == axis), mesh.shape[axis])
            raise UserError(
                f"the model's {count} {what} do not divide over mesh.{axis}={mesh.shape[axis]}; "
                f"use {flag}.{axis}={better}"
            )


def whole_rows(batch_size: int, mesh: Mesh) -> int:
    """The smallest evaluation batch of at least batch_size rows with the same number on every device.

    Raises UserError for a batch_size below 1.
    """
    if batch_size < 1:
        raise UserError(f"the evaluation batch size is {batch_size}; use 1 or more")
    return -(-batch_size // row_shards(mesh)) * row_shards(mesh)


def shardings(mesh: Mesh, tree: Any) -> Any:
    """A NamedSharding for each leaf of a tree of (abstract) parameters or of a training state, by the rules above.

    The path of an optimizer's moment ends as that of its parameter does, so both have the same sharding. An axis that
    does not divide a small parameter does not shard it; check_model has refused the others.
    """

    def place(path: Any, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, _parameter_spec(path, leaf, mesh))

    return jax.tree_util.tree_map_with_path(place, tree)


def undivided(mesh: Mesh, tree: Any) -> list[str]:
    """The paths of the parameters that a rule would shard but the mesh does not divide: they are replicated."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        axes = _expanded(rules.first_match(PARAMETER_RULES, _name(path)), len(leaf.shape))
        cut = [axis for axis in axes if isinstance(axis, str) and mesh.shape[axis] > 1]
        if len(axes) == len(leaf.shape) and len(cut) > sum(
            axis is not None for axis in _parameter_spec(path, leaf, mesh)
        ):
            found.append(_name(path))
    return found


def _parameter_spec(path: Any, leaf: Any, mesh: Any) -> PartitionSpec:
    return _spec(rules.first_match(PARAMETER_RULES, _name(path)), leaf.shape, mesh)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=paths.SEPARATOR)


def _spec(axes: Axes, shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """The rule for an array of that shape, without the axes of one device and those that do not divide it."""
    axes = _expanded(axes, len(shape))
    if len(axes) != len(shape):
        return PartitionSpec()
    found = []
    for axis, size in zip(axes, shape, strict=True):
        names = axis if isinstance(axis, tuple) else (axis,)
        used = tuple(name for name in names if isinstance(name, str) and mesh.shape[name] > 1)
        divides = size % math.prod(mesh.shape[name] for name in used) == 0
        found.append(used if used and divides else None)
    return PartitionSpec(*found)


def _expanded(axes: Axes, count: int) -> Axes:
    """The rule with ... replaced by as many None as an array of `count` axes needs."""
    if ... not in axes:
        return axes
    middle = axes.index(...)
    return (*axes[:middle], *[None] * (count - len(axes) + 1), *axes[middle + 1 :])


def with_shardings(mesh: Mesh, tree: Any) -> Any:
    """The same tree as jax.ShapeDtypeStruct, each leaf with its sharding."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings(mesh, tree),
    )


def put(tree: Any, mesh: Mesh) -> Any:
    """A tree of numpy arrays, the same in every process, as arrays sharded by the rules for their paths."""
    return jax.tree.map(put_as, tree, shardings(mesh, tree))


def put_as(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A value that every process has, as an array of that sharding; each device gets only its shard."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of a value that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: its first axis over the axes of rows."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def local_rows(batch_size: int, mesh: Mesh) -> slice | np.ndarray:
    """The rows of a global batch that this process's devices own, ascending: the rows that it has to load.

    An array of row numbers where they are not contiguous: on a TPU pod a process's chips form a square of the torus,
    and the mesh runs along the torus.
    """
    owned = _owned(batch_size, mesh)
    first, last = int(owned[0]), int(owned[-1])
    return slice(first, last + 1) if last - first + 1 == len(owned) else owned


def _owned(batch_size: int, mesh: Mesh) -> np.ndarray:
    indices = rows_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in indices if index is not None]))


def place(batch: Any, batch_size: int, mesh: Mesh) -> Any:
    """Global arrays from this process's rows (local_rows) of a batch of numpy arrays."""
    sharding, owned = rows_sharding(mesh), _owned(batch_size, mesh)

    def put(local: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:  # a slice for each axis
            return local[among(owned, index[0])]

        return jax.make_array_from_callback((batch_size, *local.shape[1:]), sharding, part)

    return jax.tree.map(put, batch)


def among(owned: np.ndarray, rows: slice) -> slice:
    """The positions of contiguous rows of the global batch among the rows that a process owns."""
    start, stop = rows.start or 0, int(owned[-1]) + 1 if rows.stop is None else rows.stop
    first = int(np.searchsorted(owned, start))
    return slice(first, first + stop - start)


@dataclass(frozen=True)
class OnMesh(Placement):
    """Shards activations by the rules above, on the mesh that is set (jax.set_mesh) while a model is traced."""

    def constrain(self, name: str, array: jax.Array) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        if not _shards_parameters(mesh):  # the sharding of rows propagates from the batch by itself
            return array
        return jax.lax.with_sharding_constraint(array, _spec(ACTIVATION_RULES[name], array.shape, mesh))

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
            gathered = (
                leaf if dtype is None else leaf.astype(dtype)
            )  # cast first: bfloat16 halves the bytes that are gathered
            return jax.lax.with_sharding_constraint(gathered, _spec(axes, leaf.shape, mesh))

        return paths.unflatten({path: whole(path, leaf) for path, leaf in paths.flatten(params).items()})

    @property
    def gathers(self) -> bool:
        mesh = jax.sharding.get_abstract_mesh()
        return not mesh.empty and mesh.shape[FSDP] > 1

    def shard_kernel(self, kernel: Callable[..., jax.Array], names: Sequence[str]) -> Callable[..., jax.Array]:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.are_all_axes_manual:
            return kernel

        def sharded(*arrays: jax.Array) -> jax.Array:
            laid = zip(names, arrays, strict=True)
            specs = tuple(_spec(ACTIVATION_RULES[name], array.shape, mesh) for name, array in laid)
            return jax.shard_map(kernel, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)

        return sharded

    def accumulate_over_data(self, sums: Callable[..., Any]) -> Callable[..., Any]:
        """Sums of each shard by shard_map, then one reduction, on a mesh of `data` alone.

        Where parameters are sharded the compiler decides: XLA's partitioner (jaxlib 0.10.2) crashes on lookups in a
        program that is manual over one axis of several.
        """
        if not sums_once(jax.sharding.get_abstract_mesh()):
            return sums

        def added(*arguments: Any) -> Any:
            return jax.lax.psum(sums(*arguments), DATA)

        def sharded(batch: Any, *others: Any) -> Any:
            specs = (PartitionSpec(DATA), *(PartitionSpec() for _ in others))
            return jax.shard_map(added, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)(batch, *others)

        return sharded

    def row_numbers(self, rows: int) -> tuple[int | jax.Array, int]:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or not mesh.are_all_axes_manual:
            return 0, rows
        return jax.lax.axis_index(DATA) * rows, mesh.shape[DATA] * rows

    @property
    def shards_kernels(self) -> bool:
        return not jax.sharding.get_abstract_mesh().empty

    @property
    def shards_layers(self) -> bool:
        mesh = jax.sharding.get_abstract_mesh()
        return not mesh.empty and mesh.shape[TENSOR] > 1


def sums_once(mesh: Any) -> bool:
    """Whether gradients of several microbatches are reduced over the devices only once: on a mesh of `data` alone."""
    return not mesh.empty and mesh.size > 1 and not _shards_parameters(mesh)


def constrain_params(tree: Any) -> Any:
    """A traced tree with the shapes and paths of parameters, such as gradients, with the parameters' sharding on the
    mesh that is set."""
    mesh = jax.sharding.get_abstract_mesh()
    if not _shards_parameters(mesh):
        return tree

    def constrain(path: Any, leaf: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(leaf, _parameter_spec(path, leaf, mesh))

    return jax.tree_util.tree_map_with_path(constrain, tree)


def _shards_parameters(mesh: Any) -> bool:
    return not mesh.empty and mesh.shape[FSDP] * mesh.shape[TENSOR] > 1
