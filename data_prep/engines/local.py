"""Units on this machine: in this process, and in a pool of others beside it."""

import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from bert_jax.command import UserError
from data_prep.engines.remote import KILLED, Work, pack_unit, unpack_unit
from data_prep.job import UnitRecord
from data_prep.memory import keep_freed
from data_prep.units import Unit

# What workers import. They are forked from a process that has imported it and done nothing else: it has no threads of
# ours, no open files and no locks, and unlike a fork of the caller's process is safe whatever that one runs.
_PRELOADED = ["data_prep.worker", "data_prep.engines", "data_prep.build_options", "data_prep.summary"]

# How long a thread may be kept waiting for another one's Python, at most. By default it is 5 ms, and there are several
# turns between a unit that another process has done and the next one that it gets.
_TURN_SECONDS = 0.0005

# Bytes of text that take as long as the start of another process; of two units such a small one is not sent away.
_WORTH_A_PROCESS = 1_000_000

# Bytes of text that keep a process for so long that those beside it run out of units: twice what units have unless a
# document is longer than that, or --unit_mb says so. The process that hands units on does not take one.
_LONG = 16_000_000


def begin(workers: int) -> None:
    """Has what the workers of `run` import be imported while the caller goes on."""
    if (workers or cores()) > 1:
        multiprocessing.set_forkserver_preload(_PRELOADED)
        resource_tracker.ensure_running()  # which unblocks SIGINT when it starts
        # The server has no handler while it imports, and would show a traceback at Ctrl-C. What comes meanwhile waits.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def run(work: Work, units: Iterable[Unit], workers: int, directory: Path) -> Iterator[UnitRecord]:
    """Runs units in this process, and in a pool of workers - 1 others; 0 workers are one for each core.

    Each of the others is given a unit to do and one to go on with, and while they have that, this process does units
    itself, but for the first long one: that waits for one of the others. So memory does not grow with the corpus, and
    at the end all have something to do until less than a unit is left. When the caller stops early, or anything raises,
    units that others have begun are finished first. Raises UserError when the system kills a worker.
    """
    others = (workers or cores()) - 1
    units = iter(units)
    first = deque(itertools.islice(units, 2 if others else 0))
    small = any(_bytes(unit) < _WORTH_A_PROCESS for unit in first)
    first.extend(itertools.islice(units, 1 if small else 0))
    nothing_to_share = len(first) < (3 if small else 2)
    units = itertools.chain(_emptying(first), units)
    if nothing_to_share:
        yield from map(functools.partial(work, directory), units)
        return
    begin(workers)
    context = multiprocessing.get_context("forkserver")
    with (
        _quick_turns(),
        ProcessPoolExecutor(others, mp_context=context, initializer=_start_worker) as pool,
        # A thread waits for each process of the pool. A unit that no thread has begun can be taken back.
        ThreadPoolExecutor(others) as waiting,
    ):
        pending: dict[Future[UnitRecord], Unit] = {}
        try:
            for unit in units:
                for future in [future for future in pending if future.done()]:
                    del pending[future]
                    yield future.result()
                if len(pending) < 2 * others + (_bytes(unit) >= _LONG):
                    pending[waiting.submit(_do_there, pool, work, directory, unit)] = unit
                else:
                    yield work(directory, unit)
            for future, unit in reversed(list(pending.items())):
                if future.cancel():
                    del pending[future]
                    yield work(directory, unit)
            yield from (future.result() for future in as_completed(pending))
        except BrokenProcessPool:
            raise UserError(f"{KILLED}, with fewer --workers") from None
        finally:
            waiting.shutdown(wait=True, cancel_futures=True)


def _bytes(unit: Unit) -> int:
    return sum(map(len, unit.documents))


def _emptying(units: deque[Unit]) -> Iterator[Unit]:
    """What is in it, which is then not held any more."""
    while units:
        yield units.popleft()


@contextlib.contextmanager
def _quick_turns() -> Iterator[None]:
    """Lets threads that hand units on have their turn soon while this process does a unit of its own."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _do_there(pool: ProcessPoolExecutor, work: Work, directory: Path, unit: Unit) -> UnitRecord:
    """Has the pool do a unit. It goes through a pipe in one piece, which is less work than its documents one by one."""
    return pool.submit(_do_packed, work, directory, pack_unit(unit)).result()


def _do_packed(work: Work, directory: Path, packed: bytes) -> UnitRecord:
    return work(directory, unpack_unit(packed))


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_worker() -> None:
    """Keeps memory for the next unit, leaves Ctrl-C to the parent, and ends when that is gone, however it went."""
    keep_freed()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
