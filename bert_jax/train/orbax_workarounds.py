"""Works around Orbax where it reports one failure several times, asks jax about preemption, deletes marks last, cuts
small arrays into slices, or knows no S3.
"""

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from bert_jax.storage.location import Location, download_folder, is_stored
from bert_jax.storage.scratch import scratch_folder
from bert_jax.storage.stores import S3, store_of
from bert_jax.train.read_shares import least_share

BEGUN = "_CHECKPOINT_METADATA"  # Orbax writes it first into a step, with the time
MARK = "commit_success.txt"  # it is written last into a step in a store


class Manager(ocp.CheckpointManager):
    """Never asks jax's preemption service: its step numbers would mix with the count in train/distributed.py.

    Every question gives the service a step; with two different counts the processes would agree to stop at a step that
    none of them reaches.
    """

    def __init__(self, directory: Location, **arguments: Any) -> None:
        super().__init__(directory, **arguments)
        if is_stored(directory):
            self._checkpoint_deleter: Any = _MarkFirst(self._checkpoint_deleter, directory)

    def reached_preemption(self, step: int) -> bool:
        return False


class _MarkFirst:
    """Removes a step in a store so that it is incomplete from the first moment, whenever the process is killed.

    Orbax 0.12.8 removes the objects of a step, its mark among them, in no particular order.
    """

    def __init__(self, orbax_deleter: Any, directory: Location) -> None:
        self._deleter, self._directory = orbax_deleter, directory

    def delete(self, step: int) -> None:
        if jax.process_index() == 0:
            (self._directory / str(step) / MARK).unlink(missing_ok=True)
        self._deleter.delete(step)

    def delete_steps(self, steps: Sequence[int]) -> None:
        for step in steps:
            self.delete(step)

    def close(self) -> None:
        self._deleter.close()


def tree_handler() -> ocp.PyTreeCheckpointHandler:
    """Writes trees without compression, and small arrays by one of the devices that hold a copy.

    float32 weights hardly compress (by 8%), and zstd took nearly half of a save's processor time. Orbax lets each copy
    of an array write a slice, which is an operation a tensor and device before the save returns. That pays for large
    arrays only.
    """
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=least_share())
    handlers = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays),
        (np.ndarray, ocp.type_handlers.NumpyHandler()),
    )
    return ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=handlers)


def is_staged(path: Location) -> bool:
    """Whether Orbax can neither read nor write a path: 0.12.8 makes file paths of all addresses but gs://."""
    return store_of(path) is S3


@contextlib.contextmanager
def readable(folder: Location) -> Iterator[Location]:
    """Yields a folder that Orbax can read: itself, or a copy of it on disk for as long as it is open."""
    if not is_staged(folder):
        yield folder
        return
    with scratch_folder() as scratch:
        download_folder(folder, scratch / folder.name)
        yield scratch / folder.name


class OneMessage(logging.Filter):
    """Drops the stack traces that Orbax's threads log for a failure which they also raise to the caller."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and "orbax" in record.pathname)


def os_error_code(error: BaseException) -> int | None:
    """Returns the errno of an operating-system error, including one that the storage library turned into text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return int(found[1]) if found else None


def ignore_closed_loops() -> None:
    """Mutes reports of the storage library's reads and writes that end after another one closed their event loop.

    Permanently, since nothing tells when the last of them has ended; the failure itself is raised to the caller.
    """
    if not isinstance(sys.unraisablehook, _ClosedLoops):
        sys.unraisablehook = _ClosedLoops(sys.unraisablehook)


class _ClosedLoops:
    """An unraisable hook that drops one kind of report and passes on all others."""

    def __init__(self, others: Callable[[Any], Any]) -> None:
        self._others = others

    def __call__(self, unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            self._others(unraisable)


@contextlib.contextmanager
def reports_muted() -> Iterator[None]:
    """Mutes what a failed read of the storage library reports from other threads."""
    hook, asyncio = sys.unraisablehook, logging.getLogger("asyncio")
    sys.unraisablehook, asyncio.disabled = lambda _: None, True
    try:
        yield
    finally:
        sys.unraisablehook, asyncio.disabled = hook, False
