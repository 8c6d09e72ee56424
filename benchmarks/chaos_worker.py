"""Runs the pretraining command and writes a hash of each row of each batch to a folder.

python -m benchmarks.chaos_worker FOLDER --config=... --workdir=...    where bert_jax.pretrain takes all but FOLDER
"""

import dataclasses
import functools
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import bert_jax.pretrain as pretrain
from bert_jax import command
from bert_jax.train import loop
from bert_jax.train.hooks import Hook
from bert_jax.train.run import Result, Run, Source


class Recorded:
    """A source that records its batches: one line per batch, with the step, the row numbers and their hashes."""

    def __init__(self, source: Source, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._source = source
        self._file = (folder / f"{os.getpid()}-{uuid.uuid4().hex}.jsonl").open("a", buffering=1, encoding="utf-8")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Any:
        batch = self._source.batch(step, rows)
        everything = np.arange(self._source.rows_at(step))
        numbers = everything if rows is None else everything[rows]
        hashes = [_hash(batch, index) for index in range(len(numbers))]
        self._file.write(json.dumps({"step": step, "rows": numbers.tolist(), "hashes": hashes}) + "\n")
        return batch


def _hash(batch: Any, index: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, leaf in batch._asdict().items():
        if leaf is None:  # a field that these batches lack
            continue
        digest.update(f"{name} {leaf.dtype} {leaf.shape[1:]}".encode())
        digest.update(np.ascontiguousarray(leaf[index]).data)
    return digest.hexdigest()


def recorded(fit: Callable[..., Result], folder: Path, run: Run, hooks: Sequence[Hook]) -> Result:
    """`fit` of a run whose batches are recorded."""
    return fit(dataclasses.replace(run, source=Recorded(run.source, folder)), hooks)


def main(arguments: Sequence[str]) -> None:
    loop.fit = functools.partial(recorded, loop.fit, Path(arguments[0]))
    pretrain.main(arguments[1:])


if __name__ == "__main__":
    command.run(main)
