"""The pretraining command, with a hash of each row of each batch that it makes written to a folder.

python -m benchmarks.chaos_worker FOLDER --config=... --workdir=...    as bert_jax.pretrain from the second on
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

from bert_jax import command, pretrain
from bert_jax.train import trainer


class Recorded:
    """A source that notes what it gives: a line a batch, with its step, the numbers of its rows and their hashes."""

    def __init__(self, source: trainer.Source, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._source = source
        self._file = (folder / f"{os.getpid()}-{uuid.uuid4().hex}.jsonl").open("a", buffering=1, encoding="utf-8")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Any:
        batch = self._source.batch(step, rows)
        everything = np.arange(self._source.rows_at(step))
        numbers = everything if rows is None else everything[rows]
        hashes = [_hash(batch, place) for place in range(len(numbers))]
        self._file.write(json.dumps({"step": step, "rows": numbers.tolist(), "hashes": hashes}) + "\n")
        return batch


def _hash(batch: Any, place: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, leaf in batch._asdict().items():
        if leaf is None:  # a field that these batches do not have
            continue
        digest.update(f"{name} {leaf.dtype} {leaf.shape[1:]}".encode())
        digest.update(np.ascontiguousarray(leaf[place]).data)
    return digest.hexdigest()


def recorded(fit: Callable[[trainer.Run], trainer.Result], folder: Path, run: trainer.Run) -> trainer.Result:
    """`fit` of a run whose batches are noted."""
    return fit(dataclasses.replace(run, source=Recorded(run.source, folder)))


def main(arguments: Sequence[str]) -> None:
    trainer.fit = functools.partial(recorded, trainer.fit, Path(arguments[0]))
    pretrain.main(arguments[1:])


if __name__ == "__main__":
    command.run(main)
