"""Runs the pretraining command for benchmarks/resume.py, and records its batches or times its first step.

python -m benchmarks.resume_worker FOLDER --config=... --workdir=...    writes a hash of each row of each batch
python -m benchmarks.resume_worker --timed --config=... --workdir=...   prints the seconds of the first step as JSON

The command pretrain takes all arguments but the first.
"""

import dataclasses
import functools
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax import command_line
from bert_jax.commands import pretrain
from bert_jax.train import loop
from bert_jax.train.hooks import Hook
from bert_jax.train.metrics import read_metrics
from bert_jax.train.run import Result, Run, Source
from bert_jax.train.workdir import latest_step

COMPILED = "/jax/core/compile/backend_compile_duration"


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


def timed(arguments: Sequence[str]) -> dict[str, float]:
    """Trains; returns the seconds to the end of the first step, from the start and from the last compilation before."""
    compiled: list[float] = []

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILED:
            compiled.append(time.time())

    jax.monitoring.register_event_duration_secs_listener(note)
    workdir = Path(next(one.removeprefix("--workdir=") for one in arguments if one.startswith("--workdir=")))
    at = latest_step(workdir) or 0
    began = time.time()
    pretrain.main(arguments)
    first = next(line["time"] for line in read_metrics(workdir) if line["step"] == at + 1)
    last_compiled = max((moment for moment in compiled if moment < first), default=began)
    return {"after_compiling": round(first - last_compiled, 3), "all": round(first - began, 3)}


def main(arguments: Sequence[str]) -> None:
    if arguments[0] == "--timed":
        print(json.dumps(timed(arguments[1:])), flush=True)
        return
    loop.fit = functools.partial(recorded, loop.fit, Path(arguments[0]))
    pretrain.main(arguments[1:])


if __name__ == "__main__":
    command_line.run(main)
