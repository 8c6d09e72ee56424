"""Data preparation from an emulated slow source: every file that it reads arrives at a fixed rate.

    BENCHMARK_SOURCE_MB_S=0.25 python -m benchmarks.slow_source FLAGS      # those of bert-jax build-examples

Each open file has the rate to itself, as with an object store, whose readers do not slow each other down.
"""

import os
import time
from typing import Any

from bert_jax import command
from bert_jax.storage import compression, remote
from bert_jax.storage.remote import BinaryFile
from data_prep import build_examples

RATE = "BENCHMARK_SOURCE_MB_S"


class SlowFile:
    """An open file that takes a second for each `rate` bytes."""

    def __init__(self, file: BinaryFile, rate: float) -> None:
        self._file, self._rate = file, rate

    def read(self, size: int = -1, /) -> bytes:
        content = self._file.read(size)
        time.sleep(len(content) / self._rate)
        return content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


# When it is imported, because that is what each worker process does with the module of the command.
if RATE in os.environ:
    bytes_a_second = float(os.environ[RATE]) * 1e6
    compression.open_stream = lambda path: SlowFile(remote.open_stream(path), bytes_a_second)

if __name__ == "__main__":
    command.run(build_examples.main)
