"""Where work units run. An engine takes a function of a unit and the stream of units, and yields what it gave.

`work` must be picklable and give the same wherever it runs; results come in any order.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from bert_jax.command import UserError
from data_prep.job import Record
from data_prep.units import Unit

Work = Callable[[Unit], Record]


def local(work: Work, units: Iterable[Unit], workers: int) -> Iterator[Record]:
    """Runs units on this machine: in this process for one worker, else in a pool of processes.

    At most workers + 1 units are under way, so memory does not grow with the corpus. When the caller stops early, or
    anything raises, units that have begun are finished first. Raises UserError when the system kills a worker.
    """
    if workers == 1:
        yield from map(work, units)
        return
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker)
    pending: set[Future[Record]] = set()
    try:
        for unit in units:
            pending.add(pool.submit(work, unit))
            if len(pending) > workers:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, perhaps for want of memory; the units finished so far are kept: "
            "run the same command again, with fewer --workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    """Leaves Ctrl-C to the parent, and ends this process when the parent is gone, however it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
