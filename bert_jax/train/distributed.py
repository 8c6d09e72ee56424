"""Starts and ends a run of several processes, and makes them agree on values.

    with distributed.processes(flags):  # one process: does nothing
        train()

Each process loads the rows that its devices own; process 0 writes logs, metrics and files. What only one of them can
know (a clock, a file) process 0 broadcasts to the others over the devices.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax import command
from bert_jax.command import EXIT_LOST, EXIT_STOPPED, Stopped, UserError
from bert_jax.progress import print_note
from bert_jax.storage import holder
from bert_jax.train import cluster as cluster_lib
from bert_jax.train import failure_detection
from bert_jax.train.cluster import Cluster

__all__ = ["add_flags", "broadcast_from_primary", "check_same", "is_primary", "processes", "stop_requested"]

add_flags = cluster_lib.add_flags

# jax's own heartbeat aborts the process; it waits this much longer than failure_detection, which names the lost one.
_PATIENCE = 3
# How long a failing process waits to hear that another one was lost, which is then the reason.
_BLAME_SECONDS = 5.0
_STDERR = 2  # the file descriptor, which C++ writes to as well

_Value = TypeVar("_Value")

_boundaries = itertools.count()  # steps that have ended: equal in all processes at the same step
_last_words = threading.Lock()  # only one reason for the end is printed


def is_primary() -> bool:
    """Whether this process writes the logs and files of the run: process 0, or the only one."""
    return jax.process_index() == 0


def note(line: str) -> None:
    """Prints a line of information or a warning, on the primary process alone."""
    print_note(line, quiet=not is_primary())


def broadcast_from_primary(value: _Value) -> _Value:
    """Returns process 0's value, which must be a JSON value. All processes call it at the same point.

    The value travels over the devices as bytes, so it arrives after the steps that have been dispatched; call it where
    metrics are fetched anyway.
    """
    if jax.process_count() == 1:
        return value
    # Only process 0 knows the size, so it goes first. The content is padded to a power of 2, to compile few shapes.
    content = json.dumps(value).encode() if is_primary() else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    padded = np.frombuffer(content.ljust(1 << (size - 1).bit_length(), b"\0"), np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)
    decoded: _Value = json.loads(received.tobytes()[:size])
    return decoded


def send_from_primary(number: float) -> jax.Array:
    """Returns at once an array [] that will hold process 0's number, which must not be negative, as a float32.

    All processes call it at the same point. Reading the array waits for the steps that were dispatched before.
    """
    mesh = Mesh(jax.devices(), "devices")
    of_process = np.full(jax.local_device_count(), number if is_primary() else 0, np.float32)
    sent = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("devices")), of_process)
    received: jax.Array = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))(sent)
    return received


def check_same(values: Mapping[str, Any], advice: str) -> None:
    """Raises UserError in a process whose JSON values differ from those of process 0, and names each that differs."""
    here = json.loads(json.dumps(dict(values)))
    there = broadcast_from_primary(here)
    if differing := [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]:
        listed = "; ".join(f"{name}: {there.get(name)} there, {here.get(name)} here" for name in differing)
        raise UserError(f"process {jax.process_index()} differs from process 0 ({listed}); {advice}")


def stop_requested() -> bool:
    """Whether a process received SIGTERM and all should stop here. Call it once at the end of each step.

    All processes get the same answer at the same step: the one after the farthest that any had reached when jax passed
    the notice on, at most a second after the signal.
    """
    return bool(multihost_utils.reached_preemption_sync_point(next(_boundaries)))


@contextlib.contextmanager
def processes(flags: argparse.Namespace, *, saves: bool = True) -> Iterator[None]:
    """Surrounds a command: connects this process to the others of its run, as flags, environment or scheduler say.

    One process alone is left as it is. When a process fails or dies, the others end too: with its message and exit
    code, or EXIT_LOST. A command that saves asks stop_requested; any other ends by SIGTERM as usual. Raises UserError
    where the processes do not find each other.
    """
    cluster = cluster_lib.find(flags)
    peers: failure_detection.Peers | None = None
    if (
        cluster is not None
        and cluster.num_processes is not None
        and cluster.process_id is not None
        and cluster.complete
    ):
        # Before jax connects: its client aborts, with a stack trace, where an address is wrong or a process is missing.
        peers = _call(flags, (cluster.host, cluster.port), cluster.num_processes, cluster.process_id)
    try:
        if cluster is None or not _initialize(cluster, flags, saves) or jax.process_count() == 1:
            yield
            return
        if peers is None:  # a scheduler knows the processes, and jax alone knows its address: meet at another one
            address = broadcast_from_primary(failure_detection.free_address())
            peers = _call(flags, address, jax.process_count(), jax.process_index())
        yield
    except Stopped:  # all of them at the same step
        if peers is None:
            raise
        _leave(peers)
        if is_primary():
            raise
        sys.exit(EXIT_STOPPED)
    except BaseException as error:
        if peers is None:
            raise
        _fail(peers, error)
    _leave(peers)


def _call(flags: argparse.Namespace, address: tuple[str, int], count: int, process: int) -> failure_detection.Peers:
    """Waits for all processes of the run, and ends this one when another one stops."""
    peers = failure_detection.call(*address, count, process, flags.startup_timeout)
    peers.watch(flags.heartbeat_timeout, _end)
    return peers


def _initialize(cluster: Cluster, flags: argparse.Namespace, saves: bool) -> bool:
    """Starts jax's distributed runtime; returns False where nothing is given and jax finds no scheduler."""
    jax.config.update("jax_enable_preemption_service", saves)
    given = (cluster.coordinator_address, cluster.num_processes, cluster.process_id)
    with warnings.catch_warnings():
        if not cluster.complete:
            warnings.simplefilter("ignore")  # in a Kubernetes pod without its package: a page on how to install that
        try:
            jax.distributed.initialize(
                *given,
                local_device_ids=cluster.local_device_ids,
                cluster_detection_method="deactivate" if cluster.complete else None,
                initialization_timeout=int(max(flags.startup_timeout, 1)),
                heartbeat_timeout_seconds=int(max(_PATIENCE * flags.heartbeat_timeout, 1)),
            )
        except (ValueError, RuntimeError) as error:
            # Nothing given: ValueError means that there is no scheduler, and RuntimeError that devices are in use
            # already (a notebook). The process is then alone.
            alone = "must be called before" in str(error) or "defined" in str(error)
            if given == (None, None, None) and alone:
                return False
            raise UserError(cluster_lib.describe_failure(cluster, error)) from error
    return True


def _leave(peers: failure_detection.Peers) -> None:
    """Ends successfully, all together: jax's shutdown waits for everyone, and detection stays on until it is done."""
    jax.distributed.shutdown()
    peers.leave()


def _fail(peers: failure_detection.Peers, error: BaseException) -> NoReturn:
    """Ends all processes for an error of this one, at once, since an orderly end would wait for the others."""
    outcome = command.outcome(error)
    if outcome is None and isinstance(error, Exception):
        # A collective fails here first when its other end has died; failure_detection then knows who it was.
        threading.Event().wait(_BLAME_SECONDS)
    with _last_words:
        if outcome is None:
            code, message = 1, f"{type(error).__name__}: {error}"
            print_last("".join(traceback.format_exception(error)))
        else:
            code, message = outcome
            print_last(command.one_line(message), begun_by_others=code == EXIT_LOST)
        peers.announce(code, command.one_line(message).removeprefix("error: ")[:2000])
        _exit(code)


def _end(code: int, why: str) -> None:
    """Ends this process because another one ended; called in a thread while the main one may be waiting."""
    with _last_words:
        print_last(command.one_line(f"error: {why}"), begun_by_others=code == EXIT_LOST)
        _exit(code)


def print_last(text: str, *, begun_by_others: bool = False) -> None:
    """Writes the last line on stderr, in one piece.

    C++ threads (gRPC, gloo) also write there, at any time and in pieces, about connections that a process's end closes.
    From here on they write to /dev/null, and a line that they may have begun ends before the text.
    """
    sys.stderr.flush()
    shown = _STDERR
    with contextlib.suppress(OSError):  # too many open files: others may still write after it
        shown = os.dup(_STDERR)
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(shown, f"{chr(10) * begun_by_others}{text.rstrip()}\n".encode())


def _exit(code: int) -> NoReturn:
    holder.release_all()  # the same command may be run again on other hosts, at once
    sys.stdout.flush()
    os._exit(code)
