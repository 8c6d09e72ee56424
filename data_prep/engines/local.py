"""Runs units on this machine, in this process and in a pool of other processes."""

import contextlib
import functools
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar

from bert_jax.errors import UserError
from data_prep import processes
from data_prep.engines.remote import KILLED
from data_prep.units import Unit

Record = TypeVar("Record")  # what the work of a unit returns

# The longest time for which a thread may hold the interpreter while another one waits. The default is 5 ms, and several
# switches happen between the end of a unit in another process and the start of its next one.
_SWITCH_SECONDS = 0.0005

# Bytes of text that take as long as starting another process; of two units, one this small is not given away.
WORTH_A_PROCESS = 1_000_000

# Bytes of text that keep a process busy for so long that the others run out of units: twice the normal size, which only
# a long document or --unit_mb exceeds. The process that distributes units does not build one itself.
LONG_UNIT = 16_000_000


def run(work: Callable[[Path, Unit], Record], units: Iterable[Unit], workers: int, directory: Path) -> Iterator[Record]:
    """Runs units in this process and in a pool of workers - 1 others; 0 workers means one for each core.

    Each of the others gets one unit to build and one to continue with. While they are busy, this process builds units
    itself, except the first long one, which waits for one of the others. So memory does not grow with the corpus, and
    at the end every process is busy until less than a unit is left. If the caller stops early, or anything raises,
    units that others have begun are finished first. Raises UserError if the system kills a worker.
    """
    others = (workers or processes.cores()) - 1
    units = iter(units)
    first = deque(itertools.islice(units, 2 if others else 0))
    small = any(_bytes(unit) < WORTH_A_PROCESS for unit in first)
    first.extend(itertools.islice(units, 1 if small else 0))
    nothing_to_share = len(first) < (3 if small else 2)
    units = itertools.chain(_emptying(first), units)
    if nothing_to_share:
        yield from map(functools.partial(work, directory), units)
        return
    with (
        _quick_switches(),
        processes.open_pool(others) as pool,
        # One thread waits for each process of the pool. A unit that no thread has begun can be taken back.
        ThreadPoolExecutor(others) as waiting,
    ):
        pending: dict[Future[Record], Unit] = {}
        try:
            for unit in units:
                for future in [future for future in pending if future.done()]:
                    del pending[future]
                    yield future.result()
                if len(pending) < 2 * others + (_bytes(unit) >= LONG_UNIT):
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
    """Yields the units and drops each reference, so that their memory can be freed."""
    while units:
        yield units.popleft()


@contextlib.contextmanager
def _quick_switches() -> Iterator[None]:
    """Lets the threads that distribute units run promptly while this process builds a unit."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _do_there(pool: ProcessPoolExecutor, work: Callable[[Path, Unit], Record], directory: Path, unit: Unit) -> Record:
    return pool.submit(work, directory, unit).result()
