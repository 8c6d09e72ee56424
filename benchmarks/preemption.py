"""Measures restarts and last saves of a run in an emulated bucket whose machines are preempted.

    python -m benchmarks.preemption --part restart              from a start to the first step, after a kill -9, with an
                                                                empty home on another machine
    python -m benchmarks.preemption --part save --processes 4   from SIGTERM to the last process's exit

The bucket is fake-gcs-server (the extra `stores`), whose requests take --delay seconds more. The model is tiny, so the
figures are those of everything but computing.
"""

import argparse
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.killed_lives import start_process
from benchmarks.resume import arguments, shards
from bert_jax import command_line
from bert_jax.command_line import EXIT_STOPPED
from bert_jax.errors import UserError
from bert_jax.storage import hold
from bert_jax.storage.location import location
from bert_jax.train.hooks import Hook, Point
from bert_jax.train.metrics import read_metrics
from bert_jax.train.workdir import latest_step

sys.path.append(str(common.REPOSITORY / "tests" / "helpers"))

CACHES = ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME")
MODEL = tuple(f"--config.model.{change}" for change in ("layers=1", "width=32", "heads=4", "feed_forward=48"))


class Mark(Hook):
    """Appends a line with the time for each step."""

    every = 1

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, point: Point) -> None:
        with self._path.open("a") as file:
            file.write(f"{point.step} {time.time()}\n")


def work(events: Path, flags: Sequence[str]) -> None:
    """Runs the training command as a process of another machine, and marks its steps."""
    from bert_jax.commands import pretrain as command
    from bert_jax.config import PretrainConfig
    from bert_jax.pretraining import pretrain
    from bert_jax.train import distributed
    from bert_jax.train.compilation import write_on_every_host

    here = hold.Record.of_this_process
    hold.Record.of_this_process = lambda: dataclasses.replace(here(), boot=os.urandom(8).hex())  # type: ignore[method-assign]
    options, config = command.read_arguments("pretrain", "", command.TrainOptions, PretrainConfig, flags)
    with distributed.processes(options, stall_timeout=options.stall_timeout):
        write_on_every_host()
        pretrain(config, options.workdir, hooks=[Mark(events)])


class Job:
    """A run that a scheduler starts again and again, every time on new machines."""

    def __init__(self, folder: Path, data: Path, workdir: str, steps: int, processes: int, *more: str) -> None:
        self.folder, self.workdir, self.processes = folder, workdir, processes
        folder.mkdir()
        self._flags = [*arguments(data, location(workdir), steps, 5, MODEL), "--config.log_every=1", *more]
        self._attempt = 0

    def start(self) -> list[subprocess.Popen[bytes]]:
        home = tempfile.mkdtemp(dir=self.folder, prefix="home-")
        with variables_of_a_job(HOME=home, JOBSET_NAME="job", JOBSET_RESTART_ATTEMPT=str(self._attempt)):
            self._attempt += 1
            with socket.create_server(("", 0)) as server:
                port = server.getsockname()[1]
            several = [f"--coordinator_address=127.0.0.1:{port}", f"--num_processes={self.processes}"]
            lines = [
                [sys.executable, "-m", "benchmarks.preemption", "--work", str(self.folder / f"events-{process}.txt")]
                + ["--", *self._flags, *([*several, f"--process_id={process}"] if self.processes > 1 else [])]
                for process in range(self.processes)
            ]
            return [start_process(line, 1, self.folder, f"log-{process}.txt") for process, line in enumerate(lines)]

    def marks(self) -> list[tuple[int, float]]:
        """The steps that process 0 has done, in order, with their times."""
        path = self.folder / "events-0.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(line.split()[0]), float(line.split()[1])) for line in lines if len(line.split()) == 2]

    def log(self, process: int = 0) -> str:
        return (self.folder / f"log-{process}.txt").read_text()[-2000:]


@contextlib.contextmanager
def variables_of_a_job(**variables: str) -> Iterator[None]:
    """Sets variables for the processes that are started meanwhile, which have no compilation cache of their own."""
    without = {name: value for name, value in os.environ.items() if name not in CACHES}
    with unittest.mock.patch.dict(os.environ, without | variables, clear=True):
        yield


def wait_for(job: Job, processes: Sequence[subprocess.Popen[bytes]], step: int, seconds: float = 300.0) -> float:
    """Waits until a step is marked, or saved; returns its time."""
    until, begun = time.time() + seconds, len(job.marks())
    while time.time() < until:
        for number, when in job.marks()[begun:]:
            if number >= step:
                return when
        if any(process.poll() is not None for process in processes):
            raise UserError(f"a process ended before step {step}: {job.log()}")
        time.sleep(0.02)
    raise UserError(f"no step {step} in {seconds:g} s: {job.log()}")


def restart(job: Job) -> dict[str, Any]:
    """Returns the seconds from a start to its first step: the first start, and the one after a kill -9."""
    began = time.time()
    processes = job.start()
    first = wait_for(job, processes, 1) - began
    while (saved := latest_step(job.workdir) or 0) < 5:
        time.sleep(0.2)
    for process in processes:
        process.kill()
        process.wait()
    began = time.time()
    processes = job.start()
    again = wait_for(job, processes, saved + 1) - began
    for process in processes:
        process.kill()
        process.wait()
    return {"first_start": round(first, 2), "restart": round(again, 2), "from_step": saved}


def save(job: Job) -> dict[str, Any]:
    """Returns the seconds from SIGTERM until all processes have saved and ended, and the saves of the log."""
    processes = job.start()
    wait_for(job, processes, 12)
    began = time.time()
    processes[-1].send_signal(signal.SIGTERM)
    codes = [process.wait(300) for process in processes]
    seconds = time.time() - began
    if set(codes) != {EXIT_STOPPED}:
        raise UserError(f"exit codes {codes}: {job.log()}")
    lines = read_metrics(location(job.workdir))
    saves = [line["checkpoint_seconds"] for line in lines if "checkpoint_seconds" in line]
    return {"sigterm_to_exit": round(seconds, 2), "checkpoint_seconds": [round(value, 2) for value in saves]}


def main(flags: Sequence[str]) -> None:
    import store_emulators

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("restart", "save"), default="restart")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--delay", type=float, default=0.1)
    options = parser.parse_args(flags)
    with tempfile.TemporaryDirectory() as folder, store_emulators.GOOGLE.run(delay=options.delay) as variables:
        os.environ.update(variables)
        directory = Path(folder)
        data = shards(directory)
        job = Job(directory / "job", data, "gs://bucket/run", 10_000, options.processes)
        measured = {"restart": restart, "save": save}[options.part](job)
    settings = {"processes": options.processes, "delay": options.delay, **measured}
    value = measured["restart" if options.part == "restart" else "sigterm_to_exit"]
    common.emit(f"preemption/{options.part}", value, "s", None, None, settings, lower_is_better=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        events, flags = Path(sys.argv[2]), sys.argv[4:]
        sys.argv[1:] = flags
        command_line.run(lambda arguments: work(events, arguments))
    command_line.run(main)
