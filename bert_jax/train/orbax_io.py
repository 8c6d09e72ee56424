"""Writes and reads a checkpoint step's items through Orbax, and verifies them.

A step is a folder with one item for each tree (params, optimizer, average), and meta/metadata: a JSON document with the
caller's metadata, a fingerprint for each tensor, and its own sha256. Orbax checks no content: a flipped bit restores
without an error, in its v1 interface too. So fingerprints are computed where the tensors live, at saving and reading.

Only Orbax's AsyncCheckpointer is used: it saves one folder, which appears whole or not at all. train/checkpoint.py
lists, keeps and deletes steps itself, because Orbax's CheckpointManager

- asks jax's preemption service at each save (google/orbax#3406); those step numbers would mix with the ones counted by
  train/distributed.py, so that processes could agree on a step that none of them reaches;
- deletes a step's objects in a store in no particular order, its mark among them;
- manages only folders that Orbax can write, so not those in S3 (google/orbax#359).

Its v1 interface is still `experimental` in 0.12.8, and its training.Checkpointer is built on the same manager.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from bert_jax.errors import RunAgain, UserError
from bert_jax.model.layers import unflatten
from bert_jax.storage.files import scratch_folder
from bert_jax.storage.location import S3, Location, download_folder, find_store, is_stored, store_errors

PARAMS, OPTIMIZER, AVERAGE, META = "params", "optimizer", "average", "meta"  # the items of a step
BEGUN = "_CHECKPOINT_METADATA"  # Orbax writes it first into a step, with the time
MARK = "commit_success.txt"  # Orbax writes it last into a step; in a store, a step without it is not complete
TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a step on disk that is not complete

# Reads that fail with these errors say nothing about the file.
_MACHINE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
_REQUESTS = 16  # at once, to a store
_DIVIDED_FROM = 2**20  # bytes of a tensor that every device holds
# Tensors are compared as bits, so that a changed NaN or sign of zero is found as well.
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are truncated, altered or missing; `why` holds only the reason.

    Training falls back to the checkpoint before it. Commands that read one checkpoint refuse it instead, so that no
    figure comes from another step than the named one.
    """

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


def saved_steps(directory: Location) -> list[int]:
    """Returns the complete steps in a folder of checkpoints in ascending order."""
    with store_errors(directory, f"list {directory}"):
        if not directory.is_dir():
            return []
        names = [path.name for path in directory.iterdir() if path.name.isdecimal()]
        if is_stored(directory):
            # Requests for each step, at once. On disk, a step has its name only once it is complete.
            with ThreadPoolExecutor(_REQUESTS) as threads:
                marked = list(threads.map(lambda name: (directory / name / MARK).exists(), names))
            names = list(itertools.compress(names, marked))
        return sorted(map(int, names))


# Writing


class Writer:
    """Writes steps in the background, one at a time. Use it in a `with`."""

    def __init__(self) -> None:
        # Each copy of a replicated array writes a slice by default: an eager operation a tensor and device, compiled
        # once a shape, while the run waits (google/orbax#2934). That pays for large arrays only (google/orbax#2165).
        arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=least_share())
        registry = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
        )
        trees = {
            # float32 weights hardly compress (by 8%), and zstd took nearly half of a save's processor time.
            item: ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
            for item in (PARAMS, OPTIMIZER, AVERAGE)
        }
        handler = ocp.CompositeCheckpointHandler(**trees, **{META: ocp.JsonCheckpointHandler()})
        self._checkpointer = ocp.AsyncCheckpointer(handler)
        self._folder: Location | None = None
        _ignore_closed_loops()

    def start(self, folder: Location, trees: Mapping[str, PyTree], meta: Mapping[str, Any]) -> None:
        """Starts to write a step, and returns once the tensors may change; `meta` must not. Raises errors as `wait`."""
        # Fingerprints come from the tensors where they live, before Orbax copies them, so a fault of the copy is found,
        # too.
        named = {item: named_leaves(tree) for item, tree in trees.items()}
        document = {"meta": meta, "tensors": {item: describe(tensors) for item, tensors in named.items()}}
        items: dict[str, Any] = {item: ocp.args.PyTreeSave(unflatten(tensors)) for item, tensors in named.items()}
        items[META] = ocp.args.JsonSave(document | {"sha256": signature(document)})
        self._folder = folder
        with _os_errors(folder):
            self._checkpointer.save(folder, args=ocp.args.Composite(**items), force=True)  # over what a failure left

    def wait(self) -> None:
        """Waits until the step is complete.

        Raises:
            OSError: the disk is full, or another system error. Orbax's own errors pass.
        """
        if self._folder is not None:
            with _os_errors(self._folder):
                self._checkpointer.wait_until_finished()

    def __enter__(self) -> "Writer":
        # Orbax's threads log the stack traces of failures that they also raise. No Orbax issue is known.
        self._log_filter = lambda record: not (record.exc_info and "orbax" in record.pathname)
        logging.getLogger("absl").addFilter(self._log_filter)
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()
        logging.getLogger("absl").removeFilter(self._log_filter)


@contextlib.contextmanager
def _os_errors(folder: Location) -> Iterator[None]:
    """Turns an operating-system error back into an OSError: tensorstore reports it as the text of a ValueError.

    No Orbax issue is known. A store's errors are left to `store_errors`.
    """
    try:
        yield
    except ValueError as error:
        if is_stored(folder) or (code := _os_error_code(error)) is None:
            raise
        raise OSError(code, os.strerror(code), str(folder)) from error


def _os_error_code(error: BaseException) -> int | None:
    """Returns the errno of an operating-system error, also from tensorstore's text."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"os_error_code='(\d+)'", str(error))
    return int(match[1]) if match else None


# Reading


def read_meta(directory: Location) -> dict[str, Any]:
    """Reads a step's document: `meta`, and `tensors` by item and path.

    Raises:
        DamagedCheckpoint: the document differs from the saved one.
    """
    with reading(directory):
        document: dict[str, Any] = json.loads((directory / META / "metadata").read_bytes())
        # The hash covers the document without itself.
        if document.pop("sha256") != signature(document):
            raise ValueError("meta does not have the content that was saved")
        return document


def read_arrays(directory: Location, item: str, saved: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Reads one item of a step into host memory, by path, and verifies it.

    Args:
        directory: the step's folder.
        item: PARAMS, OPTIMIZER or AVERAGE.
        saved: the entry of this item in `read_meta(directory)["tensors"]`.

    Raises:
        DamagedCheckpoint: the item differs from the saved one.
    """
    restored = _read(directory, item, dict.fromkeys(saved, ocp.RestoreArgs(restore_type=np.ndarray)))
    _verify(directory, item, saved, restored)
    return restored


def read_tree(directory: Location, item: str, saved: Mapping[str, Any], wanted: PyTree) -> PyTree:
    """Reads one item into the shardings and the structure of an abstract tree, and verifies it.

    Args:
        directory, item, saved: as for `read_arrays`.
        wanted: a tree of jax.ShapeDtypeStruct with shardings.

    Raises:
        UserError: a tensor is missing, extra, or has another shape or dtype than in `wanted`.
        DamagedCheckpoint: the item differs from the saved one.
    """
    named = named_leaves(wanted)
    advice = "Resume with the configuration that made the checkpoint, or name a new workdir"
    # The document has names, shapes and dtypes, so a wrong configuration is reported before any tensor is read.
    expected = {name: f"{tensor.dtype}{list(tensor.shape)}" for name, tensor in named.items()}
    present = {name: f"{tensor['dtype']}{tensor['shape']}" for name, tensor in saved.items()}
    missing, extra = [name for name in named if name not in saved], [name for name in saved if name not in named]
    problem = ""
    if missing:
        problem = f" has no tensor {item}/{missing[0]} ({len(missing)} missing)"
    elif extra:
        problem = f" has an extra tensor {item}/{extra[0]} ({len(extra)} extra)"
    elif other := [name for name in named if present[name] != expected[name]]:
        problem = f": tensor {item}/{other[0]} is {present[other[0]]}, expected {expected[other[0]]}"
    if problem:
        raise UserError(f"checkpoint {directory}{problem}. {advice}")
    restore_args = {
        name: ocp.ArrayRestoreArgs(
            sharding=to_read(leaf.sharding, leaf.shape, leaf.dtype.itemsize), global_shape=leaf.shape, dtype=leaf.dtype
        )
        for name, leaf in named.items()
    }
    restored = _read(directory, item, restore_args)
    # Tensors that were read in shares are gathered over the same devices. All processes do this at the same point.
    if moved := [name for name, tensor in restored.items() if tensor.sharding != named[name].sharding]:
        gather = jax.jit(lambda shares: shares, out_shardings=[named[name].sharding for name in moved])
        restored |= dict(zip(moved, gather([restored[name] for name in moved]), strict=True))
    _verify(directory, item, saved, restored)
    return jax.tree.unflatten(jax.tree.structure(wanted), [restored[name] for name in named])


def _read(directory: Location, item: str, restore_args: Mapping[str, Any]) -> dict[str, Any]:
    args, folder = ocp.args.PyTreeRestore(restore_args=unflatten(restore_args)), directory / item
    with contextlib.ExitStack() as opened:
        opened.enter_context(reading(directory))
        if is_staged(folder):  # only this item: optimizer states need not be downloaded to read parameters
            copy = opened.enter_context(scratch_folder()) / item
            download_folder(folder, copy)
            folder = copy
        return named_leaves(opened.enter_context(ocp.PyTreeCheckpointer()).restore(folder, args=args))


def is_staged(path: Location) -> bool:
    """Whether Orbax can neither read nor write a path: 0.12.8 knows disks and gs:// only (google/orbax#359)."""
    return find_store(path) is S3


# Shares of replicas. A tensor that is replicated over N hosts would be read N times from one file system or store.
# Instead a device reads the share that Orbax let this replica write, and the replicas gather the tensor from one
# another. Orbax's SingleReplicaArrayHandler reads everything on the hosts of one replica, whose network then bounds the
# time, and needs to know which mesh axis holds the replicas (google/orbax#2754).


def least_share() -> int:
    """The fewest bytes of a replicated tensor that a device writes or reads."""
    return _DIVIDED_FROM // jax.device_count()


def to_read(sharding: Sharding, shape: tuple[int, ...], itemsize: int) -> Sharding:
    """Returns the sharding in which several processes read a tensor; the sharding itself in one process."""
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable:
        return sharding
    shares = divided(sharding, shape)
    return shares if math.prod(shares.shard_shape(shape)) * itemsize >= least_share() else sharding


def divided(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Returns the sharding in which a shard's replicas hold equal parts, as Orbax writes them.

    They divide the shard's first axis whose size is a multiple of their number (google/orbax#1320). If there is none,
    the sharding stays as it is.
    """
    mesh = sharding.mesh
    spec: list[tuple[str, ...]] = [
        () if entry is None else entry if isinstance(entry, tuple) else (str(entry),) for entry in sharding.spec
    ]
    spec += [()] * (len(shape) - len(spec))
    replicated = tuple(name for name in mesh.axis_names if not any(name in names for names in spec))
    replicas = math.prod(mesh.shape[name] for name in replicated)
    for axis, size in enumerate(sharding.shard_shape(shape)):
        if size and size % replicas == 0:
            spec[axis] += replicated
            return NamedSharding(mesh, PartitionSpec(*spec))
    return sharding


# Integrity


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Returns a tree's leaves by path: embeddings/token/table, or 0/mu/embeddings/token/table for optax."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def fingerprint(array: np.ndarray | jax.Array, numpy: ModuleType = jnp) -> Any:
    """Returns a uint32 sum of an array's bits, where an element counts by its position.

    Integer sums wrap and commute, so any mesh, and numpy on the host, give the same number.
    """
    # A boolean has no view of its bits; it counts as 0 or 1. `place` is an element's row-major index, modulo 2^32.
    bits = array if array.dtype == bool else array.view(_UNSIGNED[array.dtype.itemsize])
    place = numpy.zeros((1,) * array.ndim, np.uint32)
    for axis, size in enumerate(array.shape):
        along = [size if other == axis else 1 for other in range(array.ndim)]
        place = place * np.uint32(size) + numpy.arange(size, dtype=np.uint32).reshape(along)
    # The weights are odd: changing one element always changes the sum, and swapping two nearly always does.
    return (bits.astype(np.uint32) * (place * np.uint32(2) + np.uint32(1))).sum(dtype=np.uint32)


_fingerprints = jax.jit(lambda arrays: [fingerprint(array) for array in arrays])


def describe(tensors: Mapping[str, np.ndarray | jax.Array]) -> dict[str, dict[str, Any]]:
    """Returns each tensor's shape, dtype and fingerprint as JSON values, computed where the tensors live."""
    on_device = [name for name, tensor in tensors.items() if isinstance(tensor, jax.Array)]
    sums = dict(zip(on_device, _fingerprints([tensors[name] for name in on_device]), strict=True))
    sums |= {name: fingerprint(tensor, np) for name, tensor in tensors.items() if name not in sums}
    # All sums are fetched at once: one wait instead of one per tensor.
    sums = jax.device_get(sums)
    return {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "fingerprint": int(sums[name])}
        for name, tensor in tensors.items()
    }


def signature(document: Mapping[str, Any]) -> str:
    """Returns a JSON document's sha256, independent of its keys' order."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _verify(directory: Location, item: str, saved: Mapping[str, Any], restored: Mapping[str, Any]) -> None:
    for name, description in describe(restored).items():
        if description != saved[name]:
            raise _damaged(directory, f"{item}/{name} does not have the content that was saved")


@contextlib.contextmanager
def reading(directory: Location) -> Iterator[None]:
    """Turns errors that a step's truncated or altered files cause in Orbax into a DamagedCheckpoint.

    A store that does not answer says nothing about the file: this raises the errors of `store_errors`.
    """
    _ignore_closed_loops()
    try:
        with store_errors(directory, f"read {directory}"):
            yield
    except (MemoryError, jax.errors.JaxRuntimeError, UserError, RunAgain, PermissionError):
        raise  # problems of the machine, not of the file
    except Exception as error:
        if (code := _os_error_code(error)) in _MACHINE_ERRORS:
            raise OSError(code, os.strerror(code), str(directory)) from error
        raise _damaged(directory, f"{type(error).__name__}: {error}"[:200]) from error


def _damaged(directory: Location, why: str) -> DamagedCheckpoint:
    before = max((step for step in saved_steps(directory.parent) if step < int(directory.name)), default=None)
    advice = "there is none before it" if before is None else f"fall back to {directory.parent / str(before)}"
    return DamagedCheckpoint(f"checkpoint {directory} is damaged ({why}). Delete that folder; {advice}", why)


def _ignore_closed_loops() -> None:
    """Installs a hook that drops reports of "Event loop is closed"."""
    # tensorstore reads and writes concurrently, in an event loop that the first failure closes; the others then print
    # these reports. The failure itself is raised. The hook stays, since nothing tells when the last thread has ended.
    # No Orbax issue is known.
    others = sys.unraisablehook

    def all_but_closed_loops(unraisable: "sys.UnraisableHookArgs") -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            others(unraisable)

    if getattr(others, "__name__", "") != all_but_closed_loops.__name__:
        sys.unraisablehook = all_but_closed_loops
