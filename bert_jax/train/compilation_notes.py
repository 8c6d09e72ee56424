"""Says that the first step and the first evaluation of a run are being compiled, and how long that took."""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator

import jax

from bert_jax.train.clock import Clock
from bert_jax.train.metrics import ProgressLine, duration

_COMPILED = "/jax/core/compile/backend_compile_duration"  # jax's own events, also for programs found in the cache
_FOUND = "/jax/compilation_cache/cache_hits"
WORTH_A_LINE = 2.0  # seconds


class _Count:
    """Programs that this process has asked for, how many of them were in the cache, and the seconds by thread."""

    def __init__(self) -> None:
        self.asked = self.found = 0
        self._seconds: defaultdict[int, float] = defaultdict(float)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    @property
    def seconds(self) -> float:
        """Seconds that this thread has compiled, or loaded programs from the cache."""
        return self._seconds[threading.get_ident()]

    def _on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:
            self.asked += 1
            self._seconds[threading.get_ident()] += duration_secs

    def _on_event(self, event: str, **_: str | int) -> None:
        self.found += event == _FOUND


_count = _Count()


@contextlib.contextmanager
def compiling(progress: ProgressLine) -> Iterator[None]:
    """Shows that the training step is being compiled or loaded in this block, and afterwards which, if it took long."""
    asked, found, began = _count.asked, _count.found, time.monotonic()
    progress.note("compiling the training step")
    yield
    _report(progress, "the training step", asked, found, time.monotonic() - began)


@contextlib.contextmanager
def evaluating(progress: ProgressLine, clock: Clock, begins: bool) -> Iterator[None]:
    """As `compiling`, of the first evaluation; the seconds of compiling do not count as the pace of the run."""
    if not begins:
        yield
        return
    asked, found, before = _count.asked, _count.found, _count.seconds
    progress.note("compiling the evaluation")
    yield
    seconds = _count.seconds - before
    clock.leave_out(seconds)
    _report(progress, "the evaluation", asked, found, seconds)


def _report(progress: ProgressLine, what: str, asked: int, found: int, seconds: float) -> None:
    """Reports whether all programs since the counts `asked` and `found` were in the cache, if it took long."""
    if seconds < WORTH_A_LINE:
        return
    cached = _count.found > found and _count.found - found == _count.asked - asked
    how = f"loaded {what} from the compilation cache" if cached else f"compiled {what}"
    progress.report(f"{how} in {duration(seconds)}")
