"""Elements made ahead of their use, in a thread."""

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from bert_jax.command import UserError

_CLOSE_SECONDS = 10.0  # how long closing waits for an element that is being made

Element = TypeVar("Element")


class Prefetched(Iterator[Element]):
    """What `prefetch` returns: an iterator, a context manager, and a clock of the time spent waiting.

    close(), leaving the context, dropping the last reference and the interpreter's exit all stop the thread, which
    first finishes the element in hand.
    """

    def __init__(self, make: Callable[[int], Element], start: int, stop: int | None, depth: int) -> None:
        if depth < 1:
            raise UserError(f"prefetch depth {depth}: at least one batch is made ahead; give --config.data.prefetch=4")
        self.waited_seconds = 0.0  # summed over all next() so far
        self._channel: _Channel[Element] = _Channel(depth)
        thread = threading.Thread(
            target=_produce, args=(self._channel, make, start, stop), name="prefetch", daemon=True
        )
        # The thread knows the channel but not this object, so that dropping it is noticed.
        self._finalizer = weakref.finalize(self, _shut, self._channel, thread)
        thread.start()

    def __next__(self) -> Element:
        began = time.perf_counter()
        try:
            return self._channel.take()
        finally:
            self.waited_seconds += time.perf_counter() - began

    def close(self) -> None:
        """Stops the thread and drops what was made ahead; next() then raises StopIteration. May be called again."""
        self._finalizer()

    def __enter__(self) -> "Prefetched[Element]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def prefetch(make: Callable[[int], Element], start: int, stop: int | None, depth: int) -> Prefetched[Element]:
    """make(start), make(start + 1) and so on, up to make(stop - 1) or without end, `depth` made ahead in a thread.

    What `make` raises is raised from next(), after the elements before it. Raises UserError for a depth below 1.
    """
    return Prefetched(make, start, stop, depth)


class _Channel(Generic[Element]):
    """A bounded queue with an end: closed by either side, or by an exception that the taker gets."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._elements: deque[Element] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None

    def put(self, element: Element) -> bool:
        """Waits for room; False when the channel was closed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._elements) < self._depth)
            if not self._closed:
                self._elements.append(element)
                self._changed.notify_all()
            return not self._closed

    def take(self) -> Element:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._elements)
            if self._elements:
                self._changed.notify_all()
                return self._elements.popleft()
            if (error := self._error) is not None:
                self._error = None
                raise error
            raise StopIteration

    def close(self, error: BaseException | None = None, drop: bool = False) -> None:
        with self._changed:
            self._closed, self._error = True, error
            if drop:
                self._elements.clear()
            self._changed.notify_all()


def _produce(channel: _Channel[Element], make: Callable[[int], Element], start: int, stop: int | None) -> None:
    try:
        for step in itertools.count(start) if stop is None else range(start, stop):
            if not channel.put(make(step)):
                return
    except BaseException as error:  # whatever it is, the consumer is told
        channel.close(error)
    else:
        channel.close()


def _shut(channel: _Channel[Element], thread: threading.Thread) -> None:
    channel.close(drop=True)
    if thread is not threading.current_thread():  # garbage may be collected in any thread
        thread.join(_CLOSE_SECONDS)
