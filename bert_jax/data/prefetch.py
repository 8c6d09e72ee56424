"""Makes elements ahead of their use, in a thread."""

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from bert_jax.command import UserError

_CLOSE_SECONDS = 10.0  # how long close() waits for an element that is being made

Element = TypeVar("Element")


class Prefetched(Iterator[Element]):
    """An iterator and context manager over prefetched elements, which measures the time spent waiting.

    close(), leaving the context, dropping the last reference and the interpreter's exit all stop the thread, which
    first finishes its current element.
    """

    def __init__(self, make: Callable[[int], Element], start: int, stop: int | None, depth: int) -> None:
        if depth < 1:
            raise UserError(f"data.prefetch is {depth}. Use at least 1, for example --config.data.prefetch=4")
        self.waited_seconds = 0.0  # the total over all calls of next()
        self._channel: _Channel[Element] = _Channel(depth)
        thread = threading.Thread(
            target=_produce, args=(self._channel, make, start, stop), name="prefetch", daemon=True
        )
        # The thread refers to the channel, not to this object, so that dropping this object finalizes it.
        self._finalizer = weakref.finalize(self, _shut, self._channel, thread)
        thread.start()

    def __next__(self) -> Element:
        began = time.perf_counter()
        try:
            return self._channel.take()
        finally:
            self.waited_seconds += time.perf_counter() - began

    def close(self) -> None:
        """Stops the thread and drops prefetched elements; next() then raises StopIteration. It may be called again."""
        self._finalizer()

    def __enter__(self) -> "Prefetched[Element]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def prefetch(make: Callable[[int], Element], start: int, stop: int | None, depth: int) -> Prefetched[Element]:
    """make(start), make(start + 1) and so on, up to make(stop - 1) or without end, `depth` elements ahead in a thread.

    next() raises what `make` raises, after the elements before it. Raises UserError for a depth below 1.
    """
    return Prefetched(make, start, stop, depth)


class _Channel(Generic[Element]):
    """A bounded queue that either side can close, the producer with an exception for the consumer."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._elements: deque[Element] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None

    def put(self, element: Element) -> bool:
        """Waits until there is room, and returns False if the channel is closed instead."""
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
    except BaseException as error:  # the consumer raises it, whatever it is
        channel.close(error)
    else:
        channel.close()


def _shut(channel: _Channel[Element], thread: threading.Thread) -> None:
    channel.close(drop=True)
    if thread is not threading.current_thread():  # garbage collection may run in any thread
        thread.join(_CLOSE_SECONDS)
