"""SIGTERM as a question that the loop answers at a step's end."""

import signal
from types import FrameType


class Interruption:
    """Notes SIGTERM while it is open, so that the loop can save and stop at a step's end."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "Interruption":
        try:
            self._before = signal.signal(signal.SIGTERM, self._note)
        except ValueError:  # not in the main thread (a notebook's worker): then nobody sends us signals
            self._before = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked = True
