"""Says that the first step of a run is being compiled, and how long that took."""

import contextlib
import time
from collections.abc import Iterator

import jax

from bert_jax.train.metrics import ProgressLine, duration

_COMPILED = "/jax/core/compile/backend_compile_duration"  # jax's own events, also for programs found in the cache
_FOUND = "/jax/compilation_cache/cache_hits"
WORTH_A_LINE = 2.0  # seconds


class _Count:
    """Programs that this process has asked for, and how many of them were in the compilation cache."""

    def __init__(self) -> None:
        self.asked = self.found = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.asked += event == _COMPILED

    def _on_event(self, event: str, **_: str | int) -> None:
        self.found += event == _FOUND


_count = _Count()


@contextlib.contextmanager
def compiling(progress: ProgressLine) -> Iterator[None]:
    """Shows that the training step is being compiled or loaded in this block, and afterwards which, if it took long."""
    asked, found, began = _count.asked, _count.found, time.monotonic()
    progress.note("compiling the training step")
    yield
    seconds = time.monotonic() - began
    if seconds < WORTH_A_LINE:
        return
    cached = _count.found > found and _count.found - found == _count.asked - asked
    how = "loaded the training step from the compilation cache" if cached else "compiled the training step"
    progress.report(f"{how} in {duration(seconds)}")
