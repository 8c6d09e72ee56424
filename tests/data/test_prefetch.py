"""Prefetching (bert_jax/data/loader.py): in order, bounded, and stopped when nobody reads."""

import gc
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from bert_jax.data.loader import Prefetched
from bert_jax.errors import UserError


def prefetch_threads() -> list[threading.Thread]:
    """Those that still run after a moment."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
    for thread in threads:
        thread.join(1.0)
    return [thread for thread in threads if thread.is_alive()]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    gc.freeze()  # so that only what the test made is looked through: all the rest takes a second each time
    yield
    gc.collect()
    assert not prefetch_threads()


@pytest.mark.parametrize("depth", (1, 4))
def test_prefetching_keeps_the_order(depth):
    with Prefetched(lambda step: step * step, 3, depth) as elements:
        assert list(itertools.islice(elements, 47)) == [step * step for step in range(3, 50)]


def test_prefetching_stays_within_its_depth():
    made: list[int] = []
    with Prefetched(lambda step: made.append(step) or step, 0, depth=3) as elements:
        assert [next(elements) for _ in range(5)] == [0, 1, 2, 3, 4]
        time.sleep(0.1)
        assert len(made) <= 5 + 3 + 1, "five taken, three waiting, one in hand"


def test_what_making_raises_reaches_the_consumer_in_its_turn():
    def fail_at_three(step: int) -> int:
        if step == 3:
            raise UserError("shard 3 is gone")
        return step

    elements = Prefetched(fail_at_three, 0, depth=8)
    assert [next(elements) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UserError, match="shard 3 is gone"):
        next(elements)
    with pytest.raises(StopIteration):
        next(elements)


def test_closing_stops_the_thread():
    elements = Prefetched(lambda step: step, 0, depth=2)
    next(elements)
    elements.close()
    elements.close()
    assert not prefetch_threads()
    with pytest.raises(StopIteration):
        next(elements)


def test_dropping_the_iterator_stops_the_thread():
    for _ in Prefetched(lambda step: step, 0, depth=2):
        break
    gc.collect()
    assert not prefetch_threads()


def test_an_interpreter_exits_with_a_prefetch_running():
    program = (
        "from bert_jax.data.loader import Prefetched\n"
        "elements = Prefetched(lambda step: step, 0, depth=2)\n"
        "print(next(elements))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    assert (ended.stdout, ended.stderr) == ("0\n", "")


def test_waiting_is_measured():
    with Prefetched(lambda step: time.sleep(0.05), 0, depth=1) as elements:
        next(elements)
        first = elements.waited_seconds
        assert first > 0
        next(elements)
        assert elements.waited_seconds > first
