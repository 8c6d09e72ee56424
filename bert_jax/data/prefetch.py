"""Makes elements ahead of their use, in a thread."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Element = TypeVar("Element")


class Prefetched(Iterator[Element]):
    """Iterates over make(start), make(start + 1), ..., while a thread makes `depth` ahead; depth 0 yields nothing.

    next() raises an exception of `make` after the elements before it, and then StopIteration. The thread ends after its
    current element when this is closed or its context is left, and after the requested elements when the last reference
    is dropped or the interpreter exits.
    """

    def __init__(self, make: Callable[[int], Element], start: int, depth: int) -> None:
        self.waited_seconds = 0.0  # the total over all calls of next()
        self._make, self._numbers = make, itertools.count(start)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: deque[Future[Element]] = deque()
        for _ in range(depth):
            self._request()

    def _request(self) -> None:
        self._ahead.append(self._thread.submit(self._make, next(self._numbers)))

    def __next__(self) -> Element:
        if not self._ahead:
            raise StopIteration
        began = time.perf_counter()
        element = self._ahead.popleft()
        self._request()
        try:
            if element.exception() is not None:
                self.close()
            return element.result()
        finally:
            self.waited_seconds += time.perf_counter() - began

    def close(self) -> None:
        """Stops the thread and drops prefetched elements; next() then raises StopIteration. May be called again."""
        self._ahead.clear()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> "Prefetched[Element]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
