"""Runs tasks on a Ray cluster, or on a Ray instance started on this machine.

If a worker or node is lost, its task runs again on another one.
"""

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from bert_jax.command_line import Parser
from bert_jax.errors import UserError
from data_prep.processes import KEPT, Task

# How often a unit is retried after its worker or node was lost.
RETRIES = 5
_SECONDS_TO_CONNECT = 20.0
_SECONDS_TO_SIGNALS = 0.2


def run(task: Task, names: Sequence[str], workers: int, flags: list[str]) -> Iterator[str]:
    """Runs a task for each name with one core each; 0 workers: one per core of the cluster, even as it grows.

    Raises:
        UserError: A task was lost more often than --retries, or the cluster cannot be reached.
    """
    import ray

    parser = Parser("bert-jax build-examples --engine ray --engine_options", "Options of the ray engine.")
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="address of a cluster, or auto; default: start Ray on this machine"
    )
    parser.add_argument("--retries", type=int, default=RETRIES, help="retries of a lost unit; -1: no limit; default 5")
    own = parser.parse_args(flags)
    connected_before = ray.is_initialized()
    if not connected_before:
        _connect(ray, own.address, workers)
    pending: list[Any] = []

    def next_name() -> str:
        done: list[Any] = []
        # A wait without a limit would not notice a signal.
        while not done:
            signals.check()
            done, pending[:] = ray.wait(pending, num_returns=1, timeout=_SECONDS_TO_SIGNALS)
        return str(ray.get(done[0]))

    signals = _HeldSignals()
    try:
        # A Ray object, because Ray sends it to every node only once.
        shared = ray.put(task)
        remote = ray.remote(num_cpus=1, max_retries=own.retries, scheduling_strategy="SPREAD")(_do)
        for name in names:
            pending.append(remote.remote(shared, name))
            if len(pending) > 2 * (workers or int(ray.cluster_resources().get("CPU", 1))):
                yield next_name()
        while pending:
            yield next_name()
    except ray.exceptions.RayTaskError as error:
        # The worker's own error, such as a UserError, instead of Ray's report of it.
        raise error.cause from error
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"Ray could not finish a unit ({lines[0]}); {KEPT}") from None
    finally:
        # A connection that existed before stays open, so its tasks would run on.
        for reference in pending:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.cancel(reference, force=True)
        if not connected_before:
            ray.shutdown()
        signals.release()


def _do(task: Task, name: str) -> str:
    task(name)
    return name


def _connect(ray: Any, address: str | None, workers: int) -> None:
    """Connects to a cluster, or starts Ray. Raises UserError if there is no cluster at the address."""
    own: dict[str, Any] = {} if address else {"num_cpus": workers or None, "include_dashboard": False}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the announced default; without it Ray warns
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if address and address != "auto":
            # Ray would wait forever for a cluster that does not exist, and ignore Ctrl-C.
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=_SECONDS_TO_CONNECT).close()
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
    except (OSError, RuntimeError, ValueError) as error:
        action = f"reach a Ray cluster at {address}" if address else "start Ray"
        raise UserError(f"cannot {action}: {' '.join(str(error).split())}") from None
    finally:
        if _in_main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray replaces it


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class _HeldSignals:
    """Delays SIGTERM and Ctrl-C until `check`: exceptions that handlers raise inside Ray's code may be lost."""

    def __init__(self) -> None:
        self._seen: list[int] = []
        self._handlers: dict[int, Any] = {}
        for number in (signal.SIGTERM, signal.SIGINT) if _in_main_thread() else ():
            self._handlers[number] = signal.signal(number, lambda number, frame: self._seen.append(number))

    def check(self) -> None:
        """Passes the first signal, if one arrived, to the original handler."""
        if self._seen:
            self.release()

    def release(self) -> None:
        """Restores the original handlers and passes them the first signal that arrived."""
        # Handlers first, because the signal must reach the original one.
        while self._handlers:
            signal.signal(*self._handlers.popitem())
        if self._seen:
            number = self._seen[0]
            self._seen.clear()
            signal.raise_signal(number)
