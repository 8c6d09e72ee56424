"""SIGTERM as a question that the loop answers at a step's end."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import jax

from bert_jax.train import distributed


class Interrupted(BaseException):
    """SIGTERM came where nothing is lost by leaving at once."""


class Interruption:
    """Notes SIGTERM while it is open, so that the loop can save and stop at a step's end.

    In a run of several processes jax notes it, from the start of each, and makes them agree on a step.
    """

    def __init__(self) -> None:
        self.asked = False
        self._at_once = False
        self._several = jax.process_count() > 1
        self._before: signal._HANDLER = None

    def at_step_end(self) -> bool:
        """Whether to stop here; asked once at the end of each step, all processes have the same answer."""
        if self._several and not self.asked:
            self.asked = distributed.notice_to_stop()
        return self.asked

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Around what only reads and may take long: raises Interrupted where SIGTERM comes, or has come.

        Not in a run of several processes, which would wait for the one that left.
        """
        if self._several:
            yield
            return
        self._at_once = True
        try:
            if self.asked:
                raise Interrupted
            yield
        finally:
            self._at_once = False

    def __enter__(self) -> "Interruption":
        if self._several:
            return self
        with contextlib.suppress(ValueError):  # not in the main thread (a notebook's worker): nobody sends us signals
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked = True
        if self._at_once:
            self._at_once = False
            raise Interrupted
