"""The processes of a job on this machine: how they start and end, an ordered map, and memory settings."""

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, resource_tracker
from typing import TypeVar

from bert_jax import host
from bert_jax.errors import UserError

# Memory settings for the processes of a job; they need the GNU C library and do nothing without it.


# Free memory above _KEPT_BYTES returns to the system, and each block of _LARGE_BYTES or more comes directly from it.
_KEPT_BYTES = 1 << 28
_LARGE_BYTES = 1 << 25  # the largest value that the library reaches by itself


def keep_freed() -> None:
    """Keeps memory that a unit frees in the process, for the next unit, and backs it by huge pages.

    By default it returns to the system and comes back page by page, filled with zeros: 150,000 pages in a job of 50 MB,
    an eighth of its time (measured by hand).
    """
    if library := host.load():
        host.set_malloc(library, {host.M_TRIM_THRESHOLD: _KEPT_BYTES, host.M_MMAP_MAX: 0})
        host.back_by_huge_pages(library, _KEPT_BYTES - _LARGE_BYTES)
        large = {host.M_MMAP_MAX: host.DEFAULT_MMAP_MAX, host.M_MMAP_THRESHOLD: _LARGE_BYTES}
        host.set_malloc(library, large)


# The other processes of a job on this machine: how they start and end, and an ordered map over them.


Item = TypeVar("Item")
Result = TypeVar("Result")

# Modules that workers need. Workers are forked from a server process that has imported them and done nothing else: it
# has no threads, open files or locks, so unlike a fork of the caller's process this is safe whatever the caller runs.
PRELOADED = ["data_prep.worker", "data_prep.engines", "data_prep.build_options", "data_prep.summary"]


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def begin(workers: int) -> None:
    """Starts the server process that imports what workers need, while the caller continues; 0: one for each core."""
    if (workers or cores()) > 1:
        multiprocessing.set_forkserver_preload(PRELOADED)
        resource_tracker.ensure_running()  # starting it unblocks SIGINT, so this comes before the mask below
        # While it imports, the server has no handler and would print a traceback at Ctrl-C. A signal now stays pending.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def open_pool(workers: int) -> ProcessPoolExecutor:
    """A pool of processes, each forked from the server process of `begin`."""
    begin(workers)
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("forkserver"), initializer=_start_worker)


def map_in_order(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Yields the work of each item, in the order of the items, computed by other processes; with one, by this one.

    At most two items a worker are in flight, so memory does not grow with their number. A single item starts no
    process. Results that the caller has not taken are lost if `items` raises. Raises UserError if the system kills a
    process.
    """
    items = iter(items)
    first = list(itertools.islice(items, 2))
    items = itertools.chain(first, items)
    if workers <= 1 or len(first) < 2:
        yield from map(work, items)
        return
    pool = open_pool(workers)
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a process that reads --input was killed, perhaps because memory ran out. Use fewer --workers"
        ) from None
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
