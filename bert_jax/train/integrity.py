"""Knowing a damaged checkpoint: what is stored beside the tensors, and how what reading raises is told."""

import contextlib
import errno
import gc
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from bert_jax.command import UserError

Result = TypeVar("Result")


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are torn, altered or missing; `why` alone says how that was seen.

    Training falls back to the one before it. Commands that read one refuse, lest a figure be another step's.
    """

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


# Reads that failed for these say nothing of the file.
_OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def fingerprint(array: np.ndarray | jax.Array, numpy: ModuleType = jnp) -> Any:
    """A uint32 sum of an array's bits, each element weighted by its place.

    Integer sums wrap and commute, so any mesh, and numpy on the host, give the same number. The weights are
    odd: one changed element always changes the sum, two that change places nearly always.
    """
    bits = array if array.dtype == bool else array.view(_UNSIGNED[array.dtype.itemsize])
    place = numpy.zeros((1,) * array.ndim, np.uint32)
    for axis, size in enumerate(array.shape):
        along = [size if other == axis else 1 for other in range(array.ndim)]
        place = place * np.uint32(size) + numpy.arange(size, dtype=np.uint32).reshape(along)
    return (bits.astype(np.uint32) * (place * np.uint32(2) + np.uint32(1))).sum(dtype=np.uint32)


def describe(tensors: Mapping[str, np.ndarray | jax.Array]) -> dict[str, dict[str, Any]]:
    """Shape, dtype and fingerprint of each tensor, as JSON values; computed where the tensors live."""
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


def os_error_code(error: BaseException) -> int | None:
    """The errno of an operating-system error, also of one that the storage library has made a text of."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return int(found[1]) if found else None


def signature(document: Mapping[str, Any]) -> str:
    """sha256 of a JSON document, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def read_or_explain(step_directory: Path, read: Callable[[], Result]) -> Result:
    """What `read` returns; whatever a torn or altered file makes it raise, as a DamagedCheckpoint."""
    ignore_closed_loops()
    with _reports_muted():
        try:
            return read()
        except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
            raise  # the machine's, not the file's
        except Exception as error:
            if (code := os_error_code(error)) in _OF_THE_MACHINE:
                raise OSError(code, os.strerror(code), str(step_directory)) from error
            why = f"{type(error).__name__}: {error}"[:200]
        # The reads that failed beside the first report it when they are collected: now, while that is muted.
        gc.collect()
    raise damaged(step_directory, why)


def damaged(step_directory: Path, why: str) -> DamagedCheckpoint:
    """The error for a damaged checkpoint: which, why, and the one before it."""
    steps = ocp.utils.checkpoint_steps(step_directory.parent)
    before = max((step for step in steps if step < int(step_directory.name)), default=None)
    advice = "there is none before it" if before is None else f"fall back to {step_directory.parent / str(before)}"
    return DamagedCheckpoint(f"checkpoint {step_directory} is damaged ({why}). Delete that folder; {advice}", why)


def ignore_closed_loops() -> None:
    """Mutes the storage library's reads and writes that end after another failed and closed their event loop.

    For good, since nothing tells when the last of them has ended; the failure itself is raised to the caller.
    """
    if not isinstance(sys.unraisablehook, _ClosedLoops):
        sys.unraisablehook = _ClosedLoops(sys.unraisablehook)


class _ClosedLoops:
    """An unraisable hook that drops one report only and passes on all others."""

    def __init__(self, others: Callable[[Any], Any]) -> None:
        self._others = others

    def __call__(self, unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            self._others(unraisable)


@contextlib.contextmanager
def _reports_muted() -> Iterator[None]:
    hook, asyncio = sys.unraisablehook, logging.getLogger("asyncio")
    sys.unraisablehook, asyncio.disabled = lambda _: None, True
    try:
        yield
    finally:
        sys.unraisablehook, asyncio.disabled = hook, False
