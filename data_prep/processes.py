"""Starts a job's processes on this machine, and shares out work to them.

`run_units` is the local engine, which builds units in any order. `map_in_order` keeps the order, for readers.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from bert_jax import host
from bert_jax.errors import UserError
from data_prep.units import Unit

KEPT = "the units finished so far are kept: run the same command again"
KILLED = f"a worker process was killed, perhaps because memory ran out; {KEPT}"

# Workers are forked from a server process that has imported these modules and done nothing else. It has no threads,
# open files or locks, so unlike a fork of the caller's process, this is safe whatever the caller runs.
PRELOADED = ["data_prep.worker", "data_prep.engines", "data_prep.build_options", "data_prep.summary"]

# Free memory above _KEPT_BYTES returns to the system, and blocks from _LARGE_BYTES on come directly from it.
_KEPT_BYTES = 1 << 28
_LARGE_BYTES = 1 << 25  # the largest value that the library reaches by itself

# How long a thread may hold the interpreter while another one waits. Several switches happen between the end of a unit
# in another process and the start of its next one, so the default of 5 ms would leave the process idle.
_SWITCH_SECONDS = 0.0005

_SECONDS_TO_STOP = 30.0  # that a process group has to cancel its work

# Bytes of text that take about as long as starting a process. Of two units, one this small is not given away.
WORTH_A_PROCESS = 1_000_000

# Bytes of text that keep a process busy until the others run out of units: twice the normal size, which only a long
# document or --unit_mb exceeds. The process that distributes units does not build such a unit itself.
LONG_UNIT = 16_000_000

Task = Callable[[str], None]  # what an engine runs for a name
Item = TypeVar("Item")
Result = TypeVar("Result")
Record = TypeVar("Record")  # the result of a unit


def keep_freed() -> None:
    """Keeps freed memory in the process for the next unit, backed by huge pages, if it runs on the GNU C library."""
    # By default, freed memory returns to the system and comes back page by page, filled with zeros: 150,000 pages in a
    # job of 50 MB, an eighth of its time (measured by hand).
    if library := host.load():
        host.set_malloc(library, {host.M_TRIM_THRESHOLD: _KEPT_BYTES, host.M_MMAP_MAX: 0})
        host.back_by_huge_pages(library, _KEPT_BYTES - _LARGE_BYTES)
        host.set_malloc(library, {host.M_MMAP_MAX: host.DEFAULT_MMAP_MAX, host.M_MMAP_THRESHOLD: _LARGE_BYTES})


def cores() -> int:
    """Counts the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def begin(workers: int) -> None:
    """Starts the server process, which imports modules while the caller continues; 0 workers: one per core."""
    if (workers or cores()) > 1:
        multiprocessing.set_forkserver_preload(PRELOADED)
        resource_tracker.ensure_running()  # starting it unblocks SIGINT, so this comes before the mask below
        # The server has no handler while it imports, and would print a traceback at Ctrl-C. The mask delays the signal.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def open_pool(workers: int, killed: str = f"{KILLED}, with fewer --workers") -> Iterator[ProcessPoolExecutor]:
    """Opens a pool of processes, which are forked from the server process.

    Raises:
        UserError: The system killed a process. The message is `killed`.
    """
    begin(workers)
    context = multiprocessing.get_context("forkserver")
    try:
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool:
            yield pool
    except BrokenProcessPool:
        raise UserError(killed) from None


def map_in_order(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    killed: str = "a process that reads --input was killed, perhaps because memory ran out. Use fewer --workers",
) -> Iterator[Result]:
    """Yields results in the order of the items, computed by other processes, or here if there is one worker or item.

    At most two items per worker are in flight, so memory does not grow with the number of items. If `items` raises,
    results that the caller has not taken are lost.

    Raises:
        UserError: The system killed a process. The message is `killed`.
    """
    items = iter(items)
    first = list(itertools.islice(items, 2))
    items = itertools.chain(first, items)
    if workers <= 1 or len(first) < 2:
        yield from map(work, items)
        return
    pending: deque[Future[Result]] = deque()
    with open_pool(workers, killed) as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    """Keeps memory for the next unit, leaves Ctrl-C to the parent, and exits when the parent exits or dies."""
    keep_freed()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


class GroupStopped(BaseException):
    """SIGTERM reached a process that leads a group."""


@contextlib.contextmanager
def own_group(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Runs target(*arguments, connection) in another process, and yields the connection on which its answer arrives.

    At the end of the block the process gets SIGTERM, and after some time it and all processes of its group are killed.
    """
    context = multiprocessing.get_context("spawn")
    answer, to_answer = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, to_answer))
    process.start()
    # This process's copy would keep the pipe open, so that the death of the other process would go unnoticed.
    to_answer.close()
    try:
        yield answer
    finally:
        process.terminate()
        process.join(_SECONDS_TO_STOP)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def lead_group() -> None:
    """Makes a process of `own_group` lead a process group, and stop with its parent. SIGTERM raises GroupStopped.

    The parent handles Ctrl-C.
    """

    def stop(number: int, frame: Any) -> None:
        raise GroupStopped

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(_SECONDS_TO_STOP)
        os.killpg(os.getpid(), signal.SIGKILL)

    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=end_with_parent, daemon=True).start()


def run_units(
    work: Callable[[Path, Unit], Record], units: Iterable[Unit], workers: int, directory: Path
) -> Iterator[Record]:
    """Runs units in this process and in workers - 1 others; 0 workers means one per core.

    The others get one unit to build and one to continue with. While they are busy, this process builds units itself,
    except a first long one, which waits for another process. So memory does not grow with the corpus, and all processes
    stay busy until less than a unit is left. If the caller stops early, or anything raises, units in progress are
    finished first.

    Raises:
        UserError: The system killed a worker.
    """
    others = (workers or cores()) - 1
    units = iter(units)
    # Looks ahead two units, or three if one is small: fewer than that are not worth the start of a process.
    first = deque(itertools.islice(units, 2 if others else 0))
    small = any(_bytes(unit) < WORTH_A_PROCESS for unit in first)
    first.extend(itertools.islice(units, 1 if small else 0))
    nothing_to_share = len(first) < (3 if small else 2)
    # popleft drops the reference to a unit, so its memory can be freed after it is built.
    units = itertools.chain((first.popleft() for _ in range(len(first))), units)
    if nothing_to_share:
        yield from map(functools.partial(work, directory), units)
        return
    with (
        contextlib.ExitStack() as leaving,
        open_pool(others) as pool,
        # One thread waits for each process. A unit that no thread has begun can be taken back.
        ThreadPoolExecutor(others) as waiting,
    ):
        # The threads that distribute units must run promptly while this process builds a unit.
        leaving.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH_SECONDS)

        def build_there(unit: Unit) -> Record:
            return pool.submit(work, directory, unit).result()

        pending: dict[Future[Record], Unit] = {}
        try:
            for unit in units:
                for future in [future for future in pending if future.done()]:
                    del pending[future]
                    yield future.result()
                if len(pending) < 2 * others + (_bytes(unit) >= LONG_UNIT):
                    pending[waiting.submit(build_there, unit)] = unit
                else:
                    yield work(directory, unit)
            # No unit is left to give away, so this process takes back those that no other has begun.
            for future, unit in reversed(list(pending.items())):
                if future.cancel():
                    del pending[future]
                    yield work(directory, unit)
            yield from (future.result() for future in as_completed(pending))
        finally:
            waiting.shutdown(wait=True, cancel_futures=True)


def _bytes(unit: Unit) -> int:
    return sum(map(len, unit.documents))
