"""Runs the data-preparation command for benchmarks, either timed or sampled for its use of the machine."""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.common import REPOSITORY, ProcessTree
from bert_jax.data.manifest import read_manifest

MB = 1e6


class Watched(NamedTuple):
    """A run's use of the machine, by sampling, which takes processor time itself."""

    cpu_seconds: float  # of all processes; the measure that other load affects least
    peak_bytes: int
    processes: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "cpu_seconds": round(self.cpu_seconds, 2),
            "peak_mb": round(self.peak_bytes / MB),
            "processes": self.processes,
        }


class Prepared(NamedTuple):
    """A timed run of bert_jax, without sampling, and its output."""

    seconds: float
    counts: Mapping[str, Any]  # from the manifest
    shard_bytes: int

    @property
    def speed(self) -> float:
        """Tokens of the text per second."""
        return self.counts["source_tokens"] / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 2),
            "tokens": self.counts["source_tokens"],
            "rows": self.counts["rows"],
            "output_mb": round(self.shard_bytes / MB, 2),
            "bytes_a_token": round(self.shard_bytes / self.counts["tokens"], 3),
        }


def timed(commands: Sequence[Sequence[str]], folder: Path) -> float:
    """The seconds until commands that start together have all ended. Raises CalledProcessError with their output."""
    started = time.monotonic()
    with _running(commands, folder) as processes:
        for process in processes:
            process.wait()
        return time.monotonic() - started


def watched(command: Sequence[str], folder: Path) -> tuple[float, Watched]:
    """Runs a command and samples it; returns its seconds and the samples."""
    started = time.monotonic()
    with _running([command], folder) as (process,), ProcessTree(process.pid) as tree:
        process.wait()
        seconds = time.monotonic() - started
    return seconds, Watched(tree.cpu_seconds, tree.peak_bytes, tree.peak_processes)


@contextlib.contextmanager
def _running(commands: Sequence[Sequence[str]], folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs commands at the same time. None outlives the block; raises CalledProcessError if one fails."""
    with (folder / "log.txt").open("w+") as log:
        processes = [subprocess.Popen(one, cwd=folder, stdout=log, stderr=log, env=variables()) for one in commands]
        try:
            yield processes
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        for process in processes:
            if process.returncode:
                log.seek(0)
                raise subprocess.CalledProcessError(process.returncode, process.args, log.read()[-2000:])


def variables() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "TF_CPP_MIN_LOG_LEVEL": "3"}


def prepare(text: Path | str, arguments: argparse.Namespace, workers: int, folder: Path) -> Prepared:
    """Runs the bert_jax command on a text, measures its output, and removes it."""
    output = folder / "ours"
    seconds = timed([bert_jax_command(text, output, arguments, workers)], folder)
    manifest = read_manifest(output)
    shutil.rmtree(output)
    return Prepared(seconds, manifest["counts"], manifest["shards"]["bytes"])


def watch(text: Path | str, arguments: argparse.Namespace, workers: int, folder: Path) -> Watched:
    """Runs the bert_jax command on a text, and samples its memory and processor time."""
    output = folder / "ours"
    _, found = watched(bert_jax_command(text, output, arguments, workers), folder)
    shutil.rmtree(output)
    return found


def bert_jax_command(text: Path | str, output: Path, arguments: argparse.Namespace, workers: int) -> list[str]:
    return [
        *(sys.executable, "-m", "bert_jax", "build-examples", "--objective=nsp", f"--masking={arguments.masking}"),
        *(f"--input={text}", f"--tokenizer={arguments.vocabulary}", f"--output={output}"),
        *(f"--seq_len={arguments.seq_len}", f"--workers={workers}"),
    ]


def load_average() -> list[float]:
    return [round(load, 2) for load in psutil.getloadavg()]


def hold_to_cores(count: int) -> None:
    """Restricts this process and its children to `count` cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
