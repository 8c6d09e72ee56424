"""Turns SIGTERM into a flag that the training loop reads at the end of a step."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import jax

from bert_jax.train import distributed


class Interrupted(BaseException):
    """SIGTERM arrived at a point where the process can leave at once without losing anything."""


class Interruption:
    """Records SIGTERM while it is open, so that the loop can save and stop at the end of a step.

    With several processes, jax records the signal from the start of each process and makes all agree on a step.
    """

    def __init__(self) -> None:
        self.requested = False
        self._at_once = False
        self._several = jax.process_count() > 1
        self._previous: signal._HANDLER = None

    def at_step_end(self) -> bool:
        """Whether to stop here. Call it once at the end of each step; all processes get the same answer."""
        if self._several and not self.requested:
            self.requested = distributed.stop_requested()
        return self.requested

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Surrounds code that only reads and may take long: raises Interrupted when SIGTERM arrives or has arrived.

        With several processes it does nothing, since the others would wait for the process that left.
        """
        if self._several:
            yield
            return
        self._at_once = True
        try:
            if self.requested:
                raise Interrupted
            yield
        finally:
            self._at_once = False

    def __enter__(self) -> "Interruption":
        if self._several:
            return self
        with contextlib.suppress(ValueError):  # not in the main thread, as in a notebook's worker: no signal arrives
            self._previous = signal.signal(signal.SIGTERM, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _record(self, _signal: int, _frame: FrameType | None) -> None:
        self.requested = True
        if self._at_once:
            self._at_once = False
            raise Interrupted
