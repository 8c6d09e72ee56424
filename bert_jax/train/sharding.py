"""The mesh, the sharding of parameters, batches and activations over it, and its compiler options.

Only this file and train/gradient_sums.py name the mesh axes:

data     rows of a batch; parameters are replicated. With mesh.shard_optimizer, optimizer state, update and moving
         average are sharded (ZeRO stage 1, Rajbhandari et al. 2020)
fsdp     rows of a batch too; parameters, gradients and optimizer state are sharded, and gathered when a layer is
         computed (fully sharded data parallelism: ZeRO stage 3, Rajbhandari et al. 2020)
tensor   attention heads, the feed-forward's inner width and the vocabulary (Shoeybi et al. 2019, section 3)

Read in this order: PARAMETER_RULES, make_mesh and its checks, the placement of parameters and batches, OnMesh and the
other constraints on a traced program, and the compiler options.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from bert_jax.config import MeshConfig, ModelConfig
from bert_jax.errors import UserError
from bert_jax.model import layers
from bert_jax.model.runtime import CompilerOptions, Placement
from bert_jax.progress import print_note
from bert_jax.shapes import padded_vocabulary
from bert_jax.train import rules

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")  # outermost first: the axis that communicates least
ROWS = (DATA, FSDP)  # the axes over which the rows of a batch are sharded
FLAG = "--config.mesh"  # the flag that sets MeshConfig in commands that take a recipe

# A mesh axis for each array axis; ... stands for any number of None.
Axes = tuple[str | tuple[str, ...] | EllipsisType | None, ...]

# Layers are stacked, [L, ...], and L is never sharded. An array with another number of axes than its rule is
# replicated. The first match counts; an extension inserts its own rules before these.
#
# tensor takes the axis between two matmuls (heads, inner units), so that a sublayer sums over devices only once, after
# its second matmul (Shoeybi et al. 2019, section 3). fsdp takes the model's width, which nearly every kernel has.
PARAMETER_RULES: list[tuple[str, Axes]] = [
    (r"(^|/)layers/attention/qkv/kernel$", (None, FSDP, None, TENSOR, None)),  # [L, D, 3, N, H]
    (r"(^|/)layers/attention/qkv/bias$", (None, None, TENSOR, None)),
    (r"(^|/)layers/attention/output/kernel$", (None, TENSOR, None, FSDP)),  # [L, N, H, D]
    (r"(^|/)layers/feed_forward/input/kernel$", (None, FSDP, ..., TENSOR)),  # [L, D, F], gated [L, D, 2, F]
    (r"(^|/)layers/feed_forward/input/bias$", (None, ..., TENSOR)),
    (r"(^|/)layers/feed_forward/output/kernel$", (None, TENSOR, FSDP)),  # [L, F, D]
    (r"(^|/)(token|output)/table$", (TENSOR, FSDP)),  # [V, D]: embeddings and untied output
    (r"(^|/)position/table$", (None, FSDP)),
    (r"(^|/)relative_bias/table$", (None, TENSOR)),  # [32, N]
    (r"(^|/)(mlm_head|span_boundary_head)/bias$", (TENSOR,)),  # [V]
    (r"(^|/)(dense|transform|first|second|start|end|hidden)/kernel$", (FSDP, None)),  # heads
    (r".*", ()),
]

REDUCE_DTYPES = ("auto", "float32", "bfloat16")  # mesh.reduce_dtype


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None, flag: str = FLAG) -> Mesh:
    """Makes the devices' mesh, with the closest neighbors on the last axis.

    Args:
        devices: None: all in the run. jax.experimental.topologies makes others.
        flag: the flag for `config`, in messages.

    Raises:
        UserError: the sizes do not fill the devices, or the number of slices does not divide mesh.data.
    """
    devices = jax.devices() if devices is None else devices
    if config.reduce_dtype not in REDUCE_DTYPES:
        choices = ", ".join(REDUCE_DTYPES)
        raise UserError(f"unknown mesh.reduce_dtype {config.reduce_dtype!r}; choose from {choices}")
    sizes = _axis_sizes(config, len(devices), flag)
    # Devices without slices all give None, which is one slice.
    slices = len({getattr(device, "slice_index", None) for device in devices})
    check_slices(sizes[0], slices, len(devices), flag)
    # The network between TPU slices, or between GPU machines, is slower than within one: only the first axis spans it.
    if slices > 1:
        within = (sizes[0] // slices, *sizes[1:])
        grid = mesh_utils.create_hybrid_device_mesh(within, (slices, 1, 1), devices, allow_split_physical_axes=True)
    else:
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    # Auto: the compiler chooses shardings between the constraints that a program sets.
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_slices(data: int, slices: int, devices: int, flag: str = FLAG) -> None:
    """Raises UserError, which names `flag`, if the number of slices does not divide mesh.data."""
    if data % slices:
        raise UserError(
            f"mesh.data={data} does not divide over {slices} slices (groups of devices with a slower network "
            f"between them), which only mesh.data may span; use {flag}.data=-1, and fsdp and tensor whose "
            f"product divides the {devices // slices} devices of a slice"
        )


def _axis_sizes(config: MeshConfig, devices: int, flag: str) -> tuple[int, ...]:
    """Returns the axes' sizes, whose product must be the number of devices."""
    sizes = {name: getattr(config, name) for name in AXES}
    used = math.prod(size for size in sizes.values() if size > 0)  # -1 stands for the other devices
    problem = ""
    if wrong := [name for name, size in sizes.items() if size < 1 and size != -1]:
        rule = "use 1 or more, or -1 for the devices that the other axes leave"
        problem = f"mesh.{wrong[0]} is {sizes[wrong[0]]}; {rule}"
    elif list(sizes.values()).count(-1) > 1:
        problem = f"several axes of mesh are -1, but only one can take the remaining devices: {flag}.data=-1"
    elif devices % used or (-1 not in sizes.values() and used != devices):
        product = " x ".join(f"mesh.{name}={size}" for name, size in sizes.items())
        # fsdp and tensor are mentioned only if data=-1 alone would not help.
        inner = math.prod(size for name, size in sizes.items() if name != DATA and size > 0)
        advice = f", and fsdp and tensor whose product divides {devices}" if devices % inner else ""
        problem = f"{product} does not use exactly the {devices} devices of this run; use {flag}.data=-1{advice}"
    if problem:
        raise UserError(problem)
    return tuple(devices // used if size == -1 else size for size in sizes.values())


def row_shards(mesh: Mesh) -> int:
    """Returns the number of shards into which a batch's rows are divided."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def check_batch(batch_size: int, microbatches: int, mesh: Mesh, key: str = "batch_size") -> None:
    """Raises UserError unless all devices get equally many rows of all microbatches; `key` sets the batch size."""
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


def check_model(model: ModelConfig, mesh: Mesh, flag: str = FLAG, *, shard_optimizer: bool = False) -> None:
    """Raises UserError, which names `flag`, if a mesh axis does not divide the dimensions sharded over it.

    With shard_optimizer, data and fsdp together must divide the dimensions sharded over fsdp.
    """
    divided_sizes = (
        ("attention heads", model.heads, TENSOR),
        ("inner units of the feed-forward", model.feed_forward, TENSOR),
        ("entries of the token table", padded_vocabulary(model.vocab_size), TENSOR),
        ("units of width", model.width, FSDP),
        ("units of the embeddings' width", model.table_width, FSDP),
    )
    for name, count, axis in divided_sizes:
        if count % mesh.shape[axis]:
            # Suggests a size that divides everything this axis shards, not only what failed first.
            better = math.gcd(*(other for _, other, of in divided_sizes if of == axis), mesh.shape[axis])
            raise UserError(
                f"the model's {count} {name} do not divide over mesh.{axis}={mesh.shape[axis]}; "
                f"use {flag}.{axis}={better}"
            )
        # update_spec shards over both axes what parameter_spec shards over fsdp.
        parts = mesh.shape[DATA] * mesh.shape[FSDP]
        if shard_optimizer and axis == FSDP and count % parts:
            raise UserError(
                f"mesh.shard_optimizer shards over mesh.data={mesh.shape[DATA]} x mesh.fsdp={mesh.shape[FSDP]}, but "
                f"the model's {count} {name} do not divide over {parts}; use {flag}.shard_optimizer=False"
            )


def whole_rows(batch_size: int, mesh: Mesh) -> int:
    """Rounds an evaluation batch up to equally many rows on all devices. Raises UserError for a size below 1."""
    if batch_size < 1:
        raise UserError(f"the evaluation batch size is {batch_size}; use 1 or more")
    return -(-batch_size // row_shards(mesh)) * row_shards(mesh)


def shardings(mesh: Mesh, tree: Any, *, shard_optimizer: bool = False) -> Any:
    """Returns a tree of NamedShardings for (abstract) parameters or a training state.

    With shard_optimizer, moments and the moving average are sharded over data as well. A small parameter that an axis
    does not divide is not sharded by it; check_model refuses the others.
    """

    def place(path: Any, leaf: Any) -> NamedSharding:
        # An optimizer moment's path ends like its parameter's, so one rule matches both.
        belongs_to_update = _name(path).split(layers.SEPARATOR)[0] in ("optimizer_state", "average")
        leaf_spec = update_spec if shard_optimizer and belongs_to_update else parameter_spec
        return NamedSharding(mesh, leaf_spec(path, leaf, mesh))

    return jax.tree_util.tree_map_with_path(place, tree)


def undivided(mesh: Mesh, tree: Any) -> list[str]:
    """Returns the paths of parameters that a rule would shard but the mesh does not divide: they are replicated."""
    return [
        _name(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        # Every size divides 0.
        if parameter_spec(path, leaf, mesh) != spec(_rule(path), (0,) * leaf.ndim, mesh)
    ]


def parameter_spec(path: Any, leaf: Any, mesh: Any) -> PartitionSpec:
    """Returns a parameter's spec; `path` comes from jax.tree_util."""
    return spec(_rule(path), leaf.shape, mesh)


def update_spec(path: Any, leaf: Any, mesh: Any) -> PartitionSpec:
    """Returns the spec of a parameter's update with mesh.shard_optimizer: sharded over fsdp and data."""
    # FSDP first: data splits each shard over fsdp, so a reduce-scatter over data can follow one over fsdp.
    split = spec(tuple((FSDP, DATA) if axis == FSDP else axis for axis in _rule(path)), leaf.shape, mesh)
    over_data = any(names is not None and DATA in names for names in split)
    return split if over_data else parameter_spec(path, leaf, mesh)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=layers.SEPARATOR)


def _rule(path: Any) -> Axes:
    return rules.first_match(PARAMETER_RULES, _name(path))


def spec(axes: Axes, shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """Applies a rule to an array shape, without mesh axes that have one device or do not divide the shape."""
    if ... in axes:  # e.g. a gated kernel [L, D, 2, F] and a plain one [L, D, F] share a rule
        middle = axes.index(...)
        axes = (*axes[:middle], *[None] * (len(shape) - len(axes) + 1), *axes[middle + 1 :])
    # Such as a head's kernel under a rule for another kind of head: replicating is always correct.
    if len(axes) != len(shape):
        return PartitionSpec()
    parts = []
    for axis, size in zip(axes, shape, strict=True):
        names = axis if isinstance(axis, tuple) else (axis,)
        used = tuple(name for name in names if isinstance(name, str) and mesh.shape[name] > 1)
        divides = size % math.prod(mesh.shape[name] for name in used) == 0
        parts.append(used if used and divides else None)
    return PartitionSpec(*parts)


def restricted(whole: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Removes all mesh axes but `axes` from a spec."""
    several = ((names,) if isinstance(names, str) else names or () for names in whole)
    return PartitionSpec(*(tuple(name for name in names if name in axes) or None for names in several))


def with_shardings(mesh: Mesh, tree: Any, *, shard_optimizer: bool = False) -> Any:
    """Returns the tree as jax.ShapeDtypeStruct with `shardings`."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings(mesh, tree, shard_optimizer=shard_optimizer),
    )


def put(tree: Any, mesh: Mesh) -> Any:
    """Places numpy arrays that all processes have on the mesh, sharded by the rules for their paths."""
    return jax.tree.map(put_as, tree, shardings(mesh, tree))


def put_like(tree: Any, other: Any) -> Any:
    """Gives arrays the shardings of another tree's arrays."""
    current, wanted = (jax.tree.map(lambda leaf: leaf.sharding, arrays) for arrays in (tree, other))
    return tree if current == wanted else jax.jit(_unchanged, out_shardings=wanted)(tree)


def _unchanged(arrays: Any) -> Any:
    return arrays  # one function, so that equal shardings compile once, not at each call


def put_as(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Places a value that all processes have; each device gets only its shard."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding by which every device holds the whole value."""
    return NamedSharding(mesh, PartitionSpec())


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: its rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def local_rows(batch_size: int, mesh: Mesh) -> slice | np.ndarray:
    """Returns the rows of a global batch that this process's devices own and it must load, in ascending order."""
    # Devices of one row shard (over tensor) map to the same rows, which unique() keeps once.
    indices = rows_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    owned = np.unique(np.concatenate([np.arange(batch_size)[index] for index in indices if index is not None]))
    first, last = int(owned[0]), int(owned[-1])
    # Not contiguous on a TPU pod: a process's chips form a square of the torus, and the mesh runs along the torus.
    return slice(first, last + 1) if last - first + 1 == len(owned) else owned


def place(batch: Any, batch_size: int, mesh: Mesh) -> Any:
    """Makes global arrays from this process's rows (local_rows) of a numpy batch."""
    sharding = rows_sharding(mesh)

    def put(local: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, local, (batch_size, *local.shape[1:]))

    return jax.tree.map(put, batch)


# The arrays of a traced program: activations, by the names of model/runtime.py.
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
    """Shards activations by ACTIVATION_RULES on the current mesh (jax.set_mesh) while a model is traced."""

    def constrain(self, name: str, array: jax.Array) -> jax.Array:
        if _devices(FSDP, TENSOR) == 1:  # the sharding of rows propagates from the batch by itself
            return array
        mesh = jax.sharding.get_abstract_mesh()
        return jax.lax.with_sharding_constraint(array, spec(ACTIVATION_RULES[name], array.shape, mesh))

    def gather(self, params: Any, prefix: str = "", dtype: DTypeLike | None = None) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if not self.gathers:
            return params

        # With a prefix, the parameters belong to one layer of a stack, without its axis L. Without one, they are those
        # of the whole model, whose stacks are left to the call for a layer.
        def whole(path: str, leaf: jax.Array) -> jax.Array:
            full = f"{prefix}/{path}" if prefix else path
            axes = rules.first_match(PARAMETER_RULES, full)
            if FSDP not in axes or (not prefix and rules.stack_path(full)):
                return leaf
            axes = tuple(None if axis == FSDP else axis for axis in (axes[1:] if prefix else axes))
            gathered = leaf if dtype is None else leaf.astype(dtype)  # bfloat16 halves the bytes that are gathered
            return jax.lax.with_sharding_constraint(gathered, spec(axes, leaf.shape, mesh))

        return layers.unflatten({path: whole(path, leaf) for path, leaf in layers.flatten(params).items()})

    @property
    def gathers(self) -> bool:
        return _devices(FSDP) > 1

    def shard_kernel(self, kernel: Callable[..., jax.Array], names: Sequence[str]) -> Callable[..., jax.Array]:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return kernel

        def sharded(*arrays: jax.Array) -> jax.Array:
            laid = zip(names, arrays, strict=True)
            specs = tuple(spec(ACTIVATION_RULES[name], array.shape, mesh) for name, array in laid)
            # A kernel's result has its first array's layout.
            return jax.shard_map(kernel, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)

        return sharded

    @property
    def shards_kernels(self) -> bool:
        return not jax.sharding.get_abstract_mesh().empty

    @property
    def shards_layers(self) -> bool:
        return _devices(TENSOR) > 1


def _devices(*axes: str) -> int:
    """Counts the devices on these axes of the current mesh; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in axes)


def divided(function: Callable[[jax.Array], jax.Array], stack: jax.Array) -> jax.Array:
    """Computes function(stack), which acts on single items of [K, ...], with the items divided over all devices.

    All devices have the whole stack before it and the whole result after it. Without a mesh, or on one device, this is
    function(stack).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function(stack)
    missing = -len(stack) % mesh.size  # zeros fill up a K that the devices do not divide
    constrain = jax.lax.with_sharding_constraint
    whole, over_all = PartitionSpec(), PartitionSpec(mesh.axis_names)
    # Without `whole`, the compiler would also divide the stack's origin, such as the optimizer's state.
    filled = jnp.pad(constrain(stack, whole), [(0, missing)] + [(0, 0)] * (stack.ndim - 1))
    result = constrain(function(constrain(filled, over_all)), over_all)
    return constrain(result, whole)[: len(stack)]


def constrain_params(tree: Any) -> Any:
    """Shards a traced parameter-shaped tree, such as gradients, like the parameters on the current mesh.

    Under shard_map, the compiler shards only over its remaining axes, if any.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if _devices(FSDP, TENSOR) == 1 or mesh.are_all_axes_manual:
        return tree
    return constrained(tree, lambda *leaf: restricted(parameter_spec(*leaf), mesh.auto_axes))


def constrained(tree: Any, leaf_spec: Callable[..., PartitionSpec]) -> Any:
    """Shards a traced parameter-shaped tree by parameter_spec, update_spec or a function with the same arguments."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tree

    def constrain(path: Any, leaf: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(leaf, leaf_spec(path, leaf, mesh))

    return jax.tree_util.tree_map_with_path(constrain, tree)


# By default the compiler combines the gradient all-reduces into a few large ones for which everything waits. With these
# options (AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py, CF_FOR_ALL_REDUCE) it keeps them separate and runs
# the all-reduce of one layer's gradients concurrently with the backward pass of the layers before it.
_OVERLAPPED_ALL_REDUCE = {
    "xla_jf_crs_combiner_threshold_in_bytes": str(2 * 2**20),  # below a matrix's gradient in BERT-Base, 4.7 MB
    "xla_enable_async_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
}

# Device kinds (jax's device_kind) that gain, as plans have shown (docs/decisions/planning_and_accelerators.md).
# On v4, libtpu 0.0.42.1 fails on BERT-Base with T=512: a matmul that overlaps an all-reduce needs 16.4 of the 16 MiB of
# vector memory. NVIDIA GPUs run with XLA's defaults (docs/plan.md).
ON_SEVERAL = {"TPU v5 lite": _OVERLAPPED_ALL_REDUCE}

# libtpu 0.0.51 fails to build the step if gathers and scatters run on the SparseCore ("async-update instruction
# should have 1 operands"), and on TPU7x if all-reduces do.
_GATHERS = (
    "xla_tpu_enable_offloading_gather_to_sparsecore",
    "xla_tpu_enable_offloading_scatter_to_sparsecore",
    "xla_tpu_offload_gather_to_sparsecore",
)
_REDUCTIONS = (
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
    "xla_tpu_enable_sparse_core_collective_aggregator",
)
_NO_OPTION = re.compile(r"No such compile option: '(\w+)'")  # XLA's message
# Options that are off in every program. Two kinds have two names in jax (jax/_src/pallas/mosaic/tpu_info.py).
DISABLED = dict.fromkeys(("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e"), _GATHERS) | {"TPU7x": _GATHERS + _REDUCTIONS}


def options(mesh: Mesh, requested: CompilerOptions = (), *, overlap: bool = False) -> dict[str, Any] | None:
    """Returns the XLA options of a program on the mesh; None if all are defaults.

    Args:
        requested: config.mesh.compiler_options, which override those of this module.
        overlap: adds the options by which a train step's all-reduces overlap with computation.

    Raises:
        UserError: the compiler does not take a requested option.
    """
    first = mesh.devices.flat[0]
    device = next((one for one in mesh.devices.flat if one.process_index == jax.process_index()), first)
    ours = default_options(first.device_kind, mesh.size, overlap=overlap)
    known = dict(_known_options(device, tuple(ours.items())))
    if refusal := _refusal(device, requested):
        raise UserError(f"config.mesh.compiler_options: {refusal}")
    return known | dict(requested) or None


def default_options(kind: str, devices: int, *, overlap: bool) -> dict[str, str]:
    """Returns this module's XLA options for a number of devices of a kind."""
    changed = dict.fromkeys(DISABLED.get(kind, ()), "false")
    if overlap and devices > 1:
        changed |= ON_SEVERAL.get(kind, {})
    return changed


@functools.cache
def _known_options(device: Any, ours: CompilerOptions) -> CompilerOptions:
    """Returns the options that the compiler of a device knows. Versions of libtpu differ; each missing one is noted."""
    while refusal := _refusal(device, ours):
        missing = _NO_OPTION.search(refusal)
        if missing is None or missing[1] not in dict(ours):
            raise UserError(f"the compiler refuses an option of bert_jax: {refusal}")
        line = f"warning: this version of the compiler has no option {missing[1]}, which is left out"
        print_note(line, quiet=jax.process_index() != 0)
        ours = tuple(pair for pair in ours if pair[0] != missing[1])
    return ours


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Turns off the cache of compiled programs: jax caches programs for absent devices, but fails to read them."""
    enabled = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # otherwise jax keeps using a cache that is open
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


@functools.cache
def _refusal(device: Any, asked: CompilerOptions) -> str:
    """Returns why a device's compiler does not take options, by trying them; "" if it does."""
    if not asked:
        return ""
    # The sharding of the result puts the program on the device, and so chooses the compiler.
    alone = Mesh(np.array([device]), ("alone",))
    try:
        with jax.set_mesh(alone), without_cache():
            placed = NamedSharding(alone, PartitionSpec())
            jax.jit(lambda: 0.0, compiler_options=dict(asked), out_shardings=placed).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error).partition("\n")[0].removeprefix("INVALID_ARGUMENT: ")
    return ""
