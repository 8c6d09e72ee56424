"""Lets two programs take turns on one machine: bert_jax in this process, and the peer in another one."""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bert_jax import errors

Turn = Callable[[int], list[float]]  # runs a number of steps and returns their seconds

# Gives glibc in another process the settings of bert_jax.host.keep_freed_memory.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**64 - 1),
    "MALLOC_ARENA_MAX": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def leave_gpu_memory() -> None:
    """Lets jax take the memory of a GPU as it needs it, so that the peer finds some. Call it before jax starts."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@contextlib.contextmanager
def peer_turn(line: Sequence[str], keep_memory: bool) -> Iterator[tuple[Turn, dict[str, Any]]]:
    """Starts the peer's script; yields a function that runs its steps, and the versions that it prints first.

    The script reads numbers of steps, one per line, and answers with a JSON list of their seconds. With keep_memory it
    keeps freed memory, as bert_jax does.
    """
    environment = os.environ | (KEEP_MEMORY if keep_memory else {})
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdin and process.stdout

        def answer() -> Any:
            assert process.stdout
            if text := process.stdout.readline():
                return json.loads(text)
            raise errors.UserError(f"the peer under {line[0]} stopped; its own message is above")

        def run(count: int) -> list[float]:
            assert process.stdin
            print(count, file=process.stdin, flush=True)
            return answer()

        yield run, answer()
        process.stdin.close()


def peer_answers(line: Sequence[str]) -> tuple[dict[str, str], list[Any]]:
    """Runs the peer's script to its end; returns the versions in its first line, and the other lines' JSON."""
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise errors.UserError(f"the peer under {line[0]} stopped; its own message is above")
    versions, *answers = map(json.loads, done.stdout.splitlines())
    return {name: str(value) for name, value in versions.items()}, answers


def alternate(turns: Sequence[Turn], rounds: int, count: int, warmup: int) -> list[list[float]]:
    """Returns the seconds of every program's steps: `rounds` turns of `count` steps, after `warmup` steps."""
    seconds: list[list[float]] = [[] for _ in turns]
    for turn in turns:
        turn(warmup)
    for _ in range(rounds):
        for turn, measured in zip(turns, seconds, strict=True):
            measured += turn(count)
    return seconds
