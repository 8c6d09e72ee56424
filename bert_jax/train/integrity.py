"""Detects damaged checkpoints: reads the items of a step and compares them with the signatures stored next to them.

Every step stores a fingerprint of each tensor, computed where the tensor lives, and a sha256 of its metadata.
"""

import errno
import gc
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from bert_jax.command import RunAgain, UserError
from bert_jax.model.paths import unflatten
from bert_jax.storage.location import Location, is_stored, store_errors
from bert_jax.train.orbax_workarounds import MARK, ignore_closed_loops, os_error_code, readable, reports_muted
from bert_jax.train.read_shares import gathered, to_read

Result = TypeVar("Result")

PARAMS, OPTIMIZER, AVERAGE, META = "params", "optimizer", "average", "meta"  # the items of a step
# Reads that fail with these errors say nothing about the file.
_MACHINE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are truncated, altered or missing; `why` holds only the reason.

    Training falls back to the checkpoint before it. Commands that read one checkpoint refuse instead, so that no
    figure comes from another step than the one that was named.
    """

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


def saved_steps(directory: Location) -> list[int]:
    """Returns the complete steps in a folder of checkpoints in ascending order, without one that is being written."""
    with store_errors(directory, f"list {directory}"):
        if not directory.is_dir():
            return []
        if is_stored(directory):
            names = [path.name for path in directory.iterdir() if path.name.isdecimal()]
            return sorted(int(name) for name in names if (directory / name / MARK).exists())
        return sorted(ocp.utils.checkpoint_steps(directory))


def read_item(
    directory: Location,
    item: str,
    saved: Mapping[str, Any],
    args: ocp.args.PyTreeRestore,
    shardings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Reads one item of a step by path, moves it to `shardings` (None: as read), and verifies the fingerprints.

    Raises DamagedCheckpoint where one differs from that in `saved`.
    """

    def read() -> dict[str, Any]:
        with readable(directory / item) as folder, ocp.PyTreeCheckpointer() as reader:
            return named_leaves(reader.restore(folder, args=args))

    restored = read_or_explain(directory, read)
    if shardings is not None:
        restored = gathered(restored, shardings)
    for name, found in describe(restored).items():
        if found != saved[name]:
            raise damaged(directory, f"{item}/{name} does not have the content that was saved")
    return restored


def read_tree(directory: Location, item: str, saved: Mapping[str, Any], wanted: PyTree) -> PyTree:
    """Reads one item into the shardings and the structure of an abstract tree; processes read large tensors once."""
    named = named_leaves(wanted)
    _check_tensors(directory, item, saved, named)
    arguments = {
        name: ocp.ArrayRestoreArgs(
            sharding=to_read(leaf.sharding, leaf.shape, leaf.dtype.itemsize), global_shape=leaf.shape, dtype=leaf.dtype
        )
        for name, leaf in named.items()
    }
    restore_args = ocp.args.PyTreeRestore(restore_args=unflatten(arguments))
    restored = read_item(directory, item, saved, restore_args, {name: leaf.sharding for name, leaf in named.items()})
    return jax.tree.unflatten(jax.tree.structure(wanted), [restored[name] for name in named])


def _check_tensors(directory: Location, item: str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises UserError unless the saved tensors have the names, shapes and dtypes of the wanted ones."""
    advice = "Resume with the configuration that made the checkpoint, or name a new workdir"
    if item == OPTIMIZER:
        advice += "; earlier versions kept optimizer state of frozen parameters, and such runs cannot resume"
    if missing := [name for name in wanted if name not in saved]:
        raise UserError(f"checkpoint {directory} has no tensor {item}/{missing[0]} ({len(missing)} missing). {advice}")
    if extra := [name for name in saved if name not in wanted]:
        raise UserError(f"checkpoint {directory} has an extra tensor {item}/{extra[0]} ({len(extra)} extra). {advice}")
    for name, tensor in wanted.items():
        got = f"{saved[name]['dtype']}{saved[name]['shape']}"
        if got != (want := f"{tensor.dtype}{list(tensor.shape)}"):
            raise UserError(f"checkpoint {directory}: tensor {item}/{name} is {got}, expected {want}. {advice}")


def read_meta(directory: Location) -> dict[str, Any]:
    """Reads the metadata of a step and verifies its signature. Raises DamagedCheckpoint."""

    def read() -> dict[str, Any]:
        with readable(directory / META) as folder, ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            document = reader.restore(folder)
        if document.pop("sha256") != signature(document):
            raise ValueError("meta does not have the content that was saved")
        return document

    return read_or_explain(directory, read)


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by path: embeddings/token/table, or 0/mu/embeddings/token/table of optax."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def fingerprint(array: np.ndarray | jax.Array, numpy: ModuleType = jnp) -> Any:
    """Returns a uint32 sum of an array's bits, each element weighted by its position.

    Integer sums wrap and commute, so any mesh, and numpy on the host, give the same number. The weights are odd, so
    that changing one element always changes the sum, and swapping two nearly always does.
    """
    bits = array if array.dtype == bool else array.view(_UNSIGNED[array.dtype.itemsize])
    place = numpy.zeros((1,) * array.ndim, np.uint32)
    for axis, size in enumerate(array.shape):
        along = [size if other == axis else 1 for other in range(array.ndim)]
        place = place * np.uint32(size) + numpy.arange(size, dtype=np.uint32).reshape(along)
    return (bits.astype(np.uint32) * (place * np.uint32(2) + np.uint32(1))).sum(dtype=np.uint32)


def describe(tensors: Mapping[str, np.ndarray | jax.Array]) -> dict[str, dict[str, Any]]:
    """Returns shape, dtype and fingerprint of each tensor as JSON values, computed where the tensors live."""
    on_device = [name for name, tensor in tensors.items() if isinstance(tensor, jax.Array)]
    sums = dict(zip(on_device, _all_fingerprints([tensors[name] for name in on_device]), strict=True))
    sums |= {name: fingerprint(tensor, np) for name, tensor in tensors.items() if name not in sums}
    sums = jax.device_get(sums)
    return {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "fingerprint": int(sums[name])}
        for name, tensor in tensors.items()
    }


@jax.jit
def _all_fingerprints(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [fingerprint(array) for array in arrays]


def signature(document: Mapping[str, Any]) -> str:
    """Returns the sha256 of a JSON document, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def read_or_explain(step_directory: Location, read: Callable[[], Result]) -> Result:
    """Returns what `read` returns; turns what a truncated or altered file makes it raise into a DamagedCheckpoint.

    Raises the errors of `store_errors` where a store did not answer, which says nothing about the file.
    """
    ignore_closed_loops()
    with reports_muted():
        try:
            with store_errors(step_directory, f"read {step_directory}"):
                return read()
        except (MemoryError, jax.errors.JaxRuntimeError, UserError, RunAgain):
            raise  # problems of the machine, not of the file
        except Exception as error:
            if isinstance(error, PermissionError):
                raise
            if (code := os_error_code(error)) in _MACHINE_ERRORS:
                raise OSError(code, os.strerror(code), str(step_directory)) from error
            why = f"{type(error).__name__}: {error}"[:200]
        # Concurrent reads that also failed report it when they are collected, so collect them while that is muted.
        gc.collect()
    raise damaged(step_directory, why)


def damaged(step_directory: Location, why: str) -> DamagedCheckpoint:
    """Returns the error for a damaged checkpoint: which one, why, and which one is before it."""
    steps = saved_steps(step_directory.parent)
    before = max((step for step in steps if step < int(step_directory.name)), default=None)
    advice = "there is none before it" if before is None else f"fall back to {step_directory.parent / str(before)}"
    return DamagedCheckpoint(f"checkpoint {step_directory} is damaged ({why}). Delete that folder; {advice}", why)
