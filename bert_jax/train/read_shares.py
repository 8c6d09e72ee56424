"""Reads what several processes hold in common once, and lets the network between them do the rest.

A tensor that is replicated over N hosts would be read N times from one file system or store. Instead each device reads
the share of it that Orbax let that replica write, and the replicas gather the tensor from one another. A tensor that is
too small to be divided is written by one replica and read by all.
"""

import math
from collections.abc import Mapping

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

DIVIDED_FROM = 2**20  # bytes of a tensor that every device holds


def least_share() -> int:
    """The fewest bytes of a tensor that a device writes, where several hold the same."""
    return DIVIDED_FROM // jax.device_count()


def to_read(sharding: Sharding, shape: tuple[int, ...], itemsize: int) -> Sharding:
    """Returns the sharding in which to read a tensor of several processes; the sharding itself in one process."""
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable:
        return sharding
    shares = divided(sharding, shape)
    return shares if math.prod(shares.shard_shape(shape)) * itemsize >= least_share() else sharding


def divided(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Returns the sharding in which the replicas of each shard hold equal parts of it, as Orbax writes them.

    They divide the first axis of a shard whose size is a multiple of their number (Orbax's replica-parallel
    serialization). Where there is none, it is the sharding itself.
    """
    mesh = sharding.mesh
    spec = [_axes(entry) for entry in sharding.spec]
    spec += [()] * (len(shape) - len(spec))
    replicated = tuple(name for name in mesh.axis_names if not any(name in names for names in spec))
    replicas = math.prod(mesh.shape[name] for name in replicated)
    for axis, size in enumerate(sharding.shard_shape(shape)):
        if size and size % replicas == 0:
            spec[axis] += replicated
            return NamedSharding(mesh, PartitionSpec(*spec))
    return sharding


def gathered(tensors: Mapping[str, jax.Array], shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
    """Returns the tensors in other shardings over the same devices. Every process calls this at the same point."""
    moved = [name for name, tensor in tensors.items() if tensor.sharding != shardings[name]]
    if not moved:
        return dict(tensors)
    gather = jax.jit(lambda parts: parts, out_shardings=[shardings[name] for name in moved])
    return dict(tensors) | dict(zip(moved, gather([tensors[name] for name in moved]), strict=True))


def _axes(entry: object) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (str(entry),)
