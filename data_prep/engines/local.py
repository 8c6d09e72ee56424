"""Units on this machine: in this process, or in a pool of processes."""

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from pathlib import Path

from bert_jax.command import UserError
from data_prep.engines.elsewhere import KILLED, Work, pack_unit, unpack_unit
from data_prep.job import Record
from data_prep.memory import keep_freed
from data_prep.units import Unit

# What workers import. They are forked from a process that has imported it and done nothing else: it has no threads of
# ours, no open files and no locks, and unlike a fork of the caller's process is safe whatever that one runs.
_PRELOADED = ["data_prep.worker", "data_prep.engines", "data_prep.flags", "data_prep.telling", "pyarrow.compute"]


def begin(workers: int) -> None:
    """Has what the workers of `run` import be imported while the caller goes on."""
    if (workers or cores()) > 1:
        multiprocessing.set_forkserver_preload(_PRELOADED)
        forkserver.ensure_running()


def run(work: Work, units: Iterable[Unit], workers: int, directory: Path) -> Iterator[Record]:
    """Runs units in this process for one worker, else in a pool of processes; 0 is one for each core.

    At most workers + 1 units are under way, so memory does not grow with the corpus. When the caller stops early, or
    anything raises, units that have begun are finished first. Raises UserError when the system kills a worker.
    """
    workers = workers or cores()
    if workers == 1:
        yield from map(functools.partial(work, directory), units)
        return
    begin(workers)
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    pending: set[Future[Record]] = set()
    try:
        for unit in units:
            pending.add(pool.submit(_do_packed, work, directory, pack_unit(unit)))
            if len(pending) > workers:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    except BrokenProcessPool:
        raise UserError(f"{KILLED}, with fewer --workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _do_packed(work: Work, directory: Path, packed: bytes) -> Record:
    """A unit that came through a pipe in one piece, which takes less work than its documents one by one."""
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
