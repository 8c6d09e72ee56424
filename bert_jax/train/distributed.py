"""A run of several processes: how it starts and ends, and what its processes have to agree on.

    with distributed.processes(flags):  # one process: does nothing
        train()

Each process loads the rows that its devices own; process 0 writes logs, metrics and files. What only one of them can
know (a clock, a file) process 0 tells the others by jax's coordination service, without the devices.
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import jax
from jax._src.distributed import global_state  # the service's key-value store has no public name
from jax.experimental import multihost_utils

from bert_jax import command
from bert_jax.command import EXIT_LOST, EXIT_STOPPED, Stopped, UserError
from bert_jax.train import cluster as cluster_lib
from bert_jax.train import rollcall
from bert_jax.train.cluster import Cluster

__all__ = ["add_flags", "broadcast_from_primary", "check_same", "is_primary", "processes", "stop_requested"]

add_flags = cluster_lib.add_flags

# jax's own watch, which aborts the process, has this much more patience than ours, which says who has stopped.
_PATIENCE = 3
# What a process waits for another's word: for ever, since the roll call ends it when that one has died.
_WORD_MILLISECONDS = 7 * 24 * 3600 * 1000
# How long a failure may be that of another process, whose end the roll call is about to tell.
_BLAME_SECONDS = 5.0
_STDERR = 2  # the file descriptor, which C++ writes to as well

_Value = TypeVar("_Value")

_words = itertools.count()  # how many broadcast_from_primary has passed on: the same in all processes
_boundaries = itertools.count()  # how many steps have ended: the same in all processes at the same step
_last_words = threading.Lock()  # one reason for the end is said, not two


def is_primary() -> bool:
    """Whether this process writes the run's logs and files: process 0, or the only one."""
    return jax.process_index() == 0


def broadcast_from_primary(value: _Value) -> _Value:
    """Process 0's value, of those that JSON has.

    All processes call it at the same point, and the others wait for process 0 to come there.
    """
    if jax.process_count() == 1:
        return value
    client: Any = global_state.client
    key = f"bert_jax/word/{next(_words)}"
    if is_primary():
        client.key_value_set(key, json.dumps(value))
        return value
    told: _Value = json.loads(client.blocking_key_value_get(key, _WORD_MILLISECONDS))
    return told


def check_same(values: Mapping[str, Any], advice: str) -> None:
    """Raises UserError, with each that differs, in a process whose JSON values are not process 0's."""
    here = json.loads(json.dumps(dict(values)))
    there = broadcast_from_primary(here)
    if differing := [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]:
        said = "; ".join(f"{name}: {there.get(name)} there, {here.get(name)} here" for name in differing)
        raise UserError(f"process {jax.process_index()} differs from process 0 ({said}); {advice}")


def stop_requested() -> bool:
    """Whether a process has been sent SIGTERM and all are to stop here; to be asked once at the end of each step.

    All processes get the same answer at the same step: the one after the farthest that any had come to when the
    notice, at most a second after the signal, went round.
    """
    return bool(multihost_utils.reached_preemption_sync_point(next(_boundaries)))


@contextlib.contextmanager
def processes(flags: argparse.Namespace, *, saves: bool = True) -> Iterator[None]:
    """Around a command: connects this process to the others of its run, as the flags or the surroundings tell.

    One process alone is left as it is, and jax.distributed untouched. When a process fails or dies, the others end
    too: with its message and exit code, or EXIT_LOST. A command that saves asks stop_requested; any other ends by
    SIGTERM as usual. Raises UserError where the processes do not find each other.
    """
    cluster = cluster_lib.find(flags)
    if cluster is None:
        yield
        return
    peers = rollcall.call(cluster.host, cluster.port, cluster.num_processes, cluster.process_id, flags.startup_timeout)
    try:
        peers.watch(flags.heartbeat_timeout, _end)
        jax.config.update("jax_enable_preemption_service", saves)
        _initialize(cluster, flags)
        yield
    except Stopped:  # all of them at the same step
        _leave(peers)
        if cluster.process_id == 0:
            raise
        sys.exit(EXIT_STOPPED)
    except BaseException as error:
        _fail(peers, error)
    _leave(peers)


def _initialize(cluster: Cluster, flags: argparse.Namespace) -> None:
    _tell_aborts(cluster)
    jax.distributed.initialize(
        cluster.coordinator_address,
        cluster.num_processes,
        cluster.process_id,
        local_device_ids=cluster.local_device_ids,
        cluster_detection_method="deactivate",  # found out already, and flags come first
        initialization_timeout=int(max(flags.startup_timeout, 1)),
        heartbeat_timeout_seconds=int(max(_PATIENCE * flags.heartbeat_timeout, 1)),
    )


def _leave(peers: rollcall.Peers) -> None:
    """Ends well, all together: jax's shutdown waits for everyone, and the roll call is open until it is done."""
    jax.distributed.shutdown()
    peers.leave()


def _fail(peers: rollcall.Peers, error: BaseException) -> NoReturn:
    """Ends all processes for an error of this one; at once, since an orderly end would wait for the others."""
    outcome = command.outcome(error)
    if outcome is None and isinstance(error, Exception):
        # A collective whose other end has died raises here first; the roll call then knows who it was.
        threading.Event().wait(_BLAME_SECONDS)
    with _last_words:
        if outcome is None:
            code, message = 1, f"{type(error).__name__}: {error}"
            _say_last("".join(traceback.format_exception(error)))
        else:
            code, message = outcome
            _say_last(command.one_line(message), begun_by_others=code == EXIT_LOST)
        peers.announce(code, command.one_line(message).removeprefix("error: ")[:2000])
        _exit(code)


def _end(code: int, why: str) -> None:
    """Ends this process for another's reason; called in the roll call's thread while the main one may be waiting."""
    with _last_words:
        _say_last(command.one_line(f"error: {why}"), begun_by_others=code == EXIT_LOST)
        _exit(code)


def _say_last(text: str, *, begun_by_others: bool = False) -> None:
    """Writes to stderr, whole and as the last that ever gets there.

    Threads of C++ (gRPC, gloo) write there too, at any time and in pieces, of connections that a process's end closes.
    They have /dev/null from here on, and what they may have begun ends before the text.
    """
    sys.stderr.flush()
    _write_last(f"{chr(10) * begun_by_others}{text.rstrip()}\n".encode())


def _write_last(content: bytes) -> None:
    """By system calls alone, so that a handler of signals may do so."""
    shown = _STDERR
    with contextlib.suppress(OSError):  # too many open files: then others may still write after it
        shown = os.dup(_STDERR)
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(shown, content)


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    os._exit(code)


def _tell_aborts(cluster: Cluster) -> None:
    """When process 0 dies, jax's service may abort the others before their roll call hears of it: a clear last line.

    It calls abort() in a thread of its own, with nothing held, so Python can run in the handler; Python's own
    handlers would only be noted. What the service writes comes before.
    """
    line = (
        f"\nerror: process {cluster.process_id} of {cluster.num_processes} was aborted, as the lines above say; if by "
        f"the coordination service, process 0 at {cluster.coordinator_address} has stopped. See its log, and run the "
        "same command on every host to go on\n"
    )

    def handle(_signal: int) -> None:
        _write_last(line.encode())
        os._exit(EXIT_LOST)

    global _abort_handler  # C keeps the address of it, and nothing else does
    _abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    libc: Any = ctypes.CDLL(None)
    libc.signal(signal.SIGABRT, _abort_handler)


_abort_handler: Any = None
