"""Ends a run that is alive but stands still, and the other processes of a run in which one fails.

The training loop notes each step and what else it does (`activity`). A thread compares the time since the last note
with a limit. If it is exceeded, all processes print the stacks of their threads and exit with EXIT_LOST.

Processes reach each other through the key-value store of jax's coordination service: each publishes its activity,
and the first that fails publishes why. Dead processes are found by that service itself (train/distributed.py).
"""

import collections
import contextlib
import faulthandler
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from bert_jax.command_line import EXIT_LOST

STALL_TIMEOUT = 600.0
MEDIAN_STEPS = 20  # a run of long steps may stand still for as many of them
TRAINING, WAITING = "training", "waiting for data"
# The limits of work that is longer than a step, in units of the stall timeout.
COMPILING, EVALUATING, SAVING, STARTING = "compiling", "evaluating", "saving", "starting"
UNITS = {COMPILING: 6, EVALUATING: 6, SAVING: 3, STARTING: 6}
_POLL_SECONDS = 5.0  # between two looks; a process that fails is heard of at once
_STDERR = 2  # the file descriptor: sys.stderr may be a Python object alone
_LEAVE_SECONDS = 3.0  # for the other processes to hear why this one fails
_STOP, _HEARD, _ACTIVITIES = (f"bert_jax/{name}" for name in ("stop", "heard", "activities"))

Stop = Callable[[int, str], None]  # called with an exit code and one line with the reason


class Activity:
    """What this process does, and since when. The loop's thread notes it, the watchdog's thread reads it."""

    def __init__(self) -> None:
        self.step, self.doing, self.since = 0, "", 0.0  # doing nothing: not watched
        self._durations: collections.deque[float] = collections.deque(maxlen=128)  # of steps, in seconds
        self._step_began = 0.0

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Surrounds a run: from here on the process is watched."""
        self._durations.clear()
        try:
            with self.during(STARTING):
                yield
        finally:
            self.doing = ""

    def begin_step(self, step: int) -> None:
        """Notes that everything before a step is done."""
        now = time.monotonic()
        if self.doing == TRAINING:
            self._durations.append(now - self._step_began)
        self.step, self.doing, self.since, self._step_began = step, TRAINING, now, now

    @contextlib.contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Surrounds work that has its own limit; the limit of what surrounds it begins again afterwards."""
        outer, self.doing, self.since = self.doing, doing, time.monotonic()
        try:
            yield
        finally:
            self.doing, self.since = outer, time.monotonic()
            # The steps' median is of steps that only train.
            if outer == TRAINING and doing != WAITING:
                self._step_began = self.since

    def limit(self, stall_timeout: float) -> float:
        """The seconds that the present activity may take."""
        steps = MEDIAN_STEPS * statistics.median(self._durations) if self._durations else 0.0
        return max(stall_timeout * UNITS.get(self.doing, 1), steps)

    @property
    def seconds(self) -> float:
        """Since the last note; 0 while nothing is watched."""
        return time.monotonic() - self.since if self.doing else 0.0


activity = Activity()  # of this process, as its loop is


@dataclass(frozen=True)
class Peers:
    """A process among others, and its client of jax's coordination service."""

    process: int
    count: int
    client: Any

    def tell(self, key: str, value: Any) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service is gone, and everybody learns that from jax
            self.client.key_value_set(key, json.dumps(value), allow_overwrite=True)

    def listen(self, seconds: float) -> dict[str, Any] | None:
        """Waits until a process fails: its number, exit code and message; None if none does in this time."""
        began = time.monotonic()
        try:
            stop: dict[str, Any] = json.loads(self.client.blocking_key_value_get(_STOP, int(seconds * 1000)))
            return stop
        except jax.errors.JaxRuntimeError:  # none, or the service is gone
            time.sleep(max(seconds - (time.monotonic() - began), 0))
            return None

    def table(self, key: str) -> dict[int, Any]:
        """What the processes have published under a key, by process."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            entries = self.client.key_value_dir_get(key)
            return {int(name.rpartition("/")[2]): json.loads(value) for name, value in entries}
        return {}


class Watchdog:
    """Watches `activity`, and the other processes of the run.

    Args:
        stall_timeout: seconds; 0: stalls are not watched.
        end: called once, in a thread, with an exit code and why; it ends the process.
        peers: None for one process.
    """

    def __init__(self, stall_timeout: float, end: Stop, peers: Peers | None = None) -> None:
        self._timeout, self._end, self._peers = stall_timeout, end, peers
        self._poll = min(_POLL_SECONDS, stall_timeout / 5) if stall_timeout else _POLL_SECONDS
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._timeout or self._peers:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._timeout:
            faulthandler.cancel_dump_traceback_later()

    def announce(self, code: int, message: str) -> None:
        """Makes all other processes stop, because this one stops."""
        if (peers := self._peers) is None:
            return
        self._over.set()
        peers.tell(_STOP, {"process": peers.process, "code": code, "message": message})
        # Process 0 runs the service, without which the others would not hear why.
        until = time.monotonic() + _LEAVE_SECONDS
        while peers.process == 0 and time.monotonic() < until and len(peers.table(_HEARD)) < peers.count - 1:
            time.sleep(0.05)

    def _watch(self) -> None:
        while not self._over.is_set():
            if self._timeout:
                # For a thread that never lets go of the interpreter, which this one could not report. Its exit code
                # is 1.
                faulthandler.dump_traceback_later(2 * self._limit(), exit=True, file=_STDERR)
            if self._peers is None:
                self._over.wait(self._poll)
            elif (stop := self._peers.listen(self._poll)) is not None and not self._over.is_set():
                return self._stopped_by(self._peers, stop)
            if self._timeout and not self._over.is_set() and self._stalls():
                return None
        return None

    def _limit(self) -> float:
        return activity.limit(self._timeout)

    def _stalls(self) -> bool:
        """Publishes what this process does, and ends the run if it does so for too long."""
        step, doing, seconds = activity.step, activity.doing, activity.seconds
        if self._peers is not None:
            self._peers.tell(f"{_ACTIVITIES}/{self._peers.process}", {"step": step, "doing": doing})
        if not doing or seconds <= self._limit():
            return False
        what = f"{doing} at step {step} has lasted {seconds:.0f} s (--stall_timeout={self._timeout:g})"
        if self._peers is not None:
            time.sleep(self._poll)  # the others publish where they stand
            table = self._peers.table(_ACTIVITIES)
            # This process may wait for one that compiles, whose limit then counts.
            if seconds <= self._timeout * max((UNITS.get(entry["doing"], 1) for entry in table.values()), default=1):
                return False
            what = f"{what}; {describe_behind(table, self._peers.count)}"
        message = f"the run stands still: {what}. The stacks of all threads are above; the same command resumes"
        dump_stacks()
        self.announce(EXIT_LOST, message)
        self._end(EXIT_LOST, message)
        return True

    def _stopped_by(self, peers: Peers, stop: Mapping[str, Any]) -> None:
        if stop["message"].startswith("the run stands still"):
            dump_stacks()
        peers.tell(f"{_HEARD}/{peers.process}", True)
        self._end(stop["code"], f"process {stop['process']} of {peers.count} has stopped: {stop['message']}")


def describe_behind(activities: Mapping[int, Mapping[str, Any]], count: int) -> str:
    """Names the processes that the others wait for, as far as their published activities tell."""
    if missing := [process for process in range(count) if process not in activities]:
        return f"processes {', '.join(map(str, missing))} report nothing"
    first = min(entry["step"] for entry in activities.values())
    behind = {process: entry["doing"] for process, entry in activities.items() if entry["step"] == first}
    # Those in a collective operation wait for those that are not.
    apart = {process: doing for process, doing in behind.items() if doing != TRAINING}
    behind = apart or behind
    if len(behind) == count and len(set(behind.values())) == 1:
        return f"all processes are at step {first}, {behind[0]}"
    listed = ", ".join(f"process {process} ({doing})" for process, doing in sorted(behind.items()))
    return f"behind at step {first}: {listed}"


def dump_stacks() -> None:
    """Prints the stacks of all threads on stderr."""
    sys.stderr.flush()
    faulthandler.dump_traceback(_STDERR, all_threads=True)
