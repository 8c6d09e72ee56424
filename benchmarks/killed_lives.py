"""Starts processes that train, and kills them at random instants until they may finish.

Kills fall at start-up, in training, and in saving: once a half-written checkpoint exists, also one that is staged for
S3, or uploaded in part.
"""

import collections
import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import REPOSITORY
from bert_jax.errors import UserError
from bert_jax.storage.location import Location, is_stored
from bert_jax.train.metrics import read_metrics
from bert_jax.train.orbax_io import BEGUN, is_staged
from bert_jax.train.workdir import CHECKPOINTS, latest_step, saved_steps

SECONDS_A_LIFE = 600.0
POLL, STORE_POLL = 0.002, 0.1  # seconds between two looks at a workdir; in a store each is several requests
SAVING, STAGED_SAVING = 0.1, 0.6  # seconds within which a kill follows the beginning of a save
STAGING = "bert_jax-staging-*/checkpoints/*/*/"  # items of steps, in TMPDIR (storage/files.py)


@dataclass
class Lives:
    """A record of the processes that ran on one workdir, one life after another."""

    kills: collections.Counter[str] = field(default_factory=collections.Counter)  # by the phase in which they fell
    steps_lost: int = 0
    seconds: list[float] = field(default_factory=list)
    seconds_to_save: float = 5.0  # from a start to its first checkpoint, as last measured


def start_process(line: Sequence[str], devices: int, work: Path, log_name: str = "log.txt") -> subprocess.Popen[bytes]:
    """Starts a process with so many CPU devices in a folder, where its output is appended to a file."""
    environment = dict(os.environ, JAX_PLATFORMS="cpu")
    given = os.environ.get("XLA_FLAGS", "")
    environment["XLA_FLAGS"] = f"{given} --xla_force_host_platform_device_count={devices}"
    environment["PYTHONPATH"] = str(REPOSITORY)
    with (work / log_name).open("ab") as log:
        return subprocess.Popen(line, cwd=work, env=environment, stdout=log, stderr=log)


def killed_until(
    start: Callable[[int], list[subprocess.Popen[bytes]]], workdir: Location, steps: int, kills: int, seed: int
) -> Lives:
    """Starts processes on a workdir and kills them at a random instant, `kills` times; then lets them finish.

    start(life) returns the processes of a life. A life is killed, at the latest, when it has saved its share of the
    remaining steps, so that every life has steps left to train.
    """
    rng, lives = random.Random(seed), Lives()
    for life in range(kills):
        before = _newest(workdir)
        allowance = max((steps - before) // (kills - life + 1), 1)
        watched = _Watched(workdir, start(life))
        lives.kills[watched.kill(rng, before, allowance, lives)] += 1
        lines = read_metrics(workdir)
        lives.steps_lost += max((lines[-1]["step"] if lines else 0) - _newest(workdir), 0)
    last = start(kills)
    for process in last:
        process.wait()
    if any(process.returncode for process in last):
        raise UserError(f"the last of {kills + 1} lives on {workdir} failed; see log.txt in the same folder")
    return lives


class _Watched:
    """The processes of one life, observed through their workdir."""

    def __init__(self, workdir: Location, processes: list[subprocess.Popen[bytes]]) -> None:
        self._workdir, self._processes = workdir, processes
        self._between_looks = STORE_POLL if is_stored(workdir) else POLL
        self._is_staged = is_staged(workdir)
        self._began = time.monotonic()
        self._stale = self._unfinished() | self._staged()

    def kill(self, rng: random.Random, before: int, allowance: int, lives: Lives) -> str:
        """Kills the processes at a random instant, and returns its phase: start, training, saving or uploading."""
        aim = rng.choice(("start", "training", "saving", "saving"))
        if aim == "start":
            end = self._began + rng.uniform(0, lives.seconds_to_save)
            self._wait(lambda: time.monotonic() > end or _newest(self._workdir) >= before + allowance)
        else:
            wanted = before + rng.randint(1, allowance)
            self._wait(lambda: _newest(self._workdir) >= wanted)
            if aim == "saving" and self._is_staged:
                self._between_looks = POLL
                self._wait(lambda: bool(self._staged() - self._stale))
            elif aim == "saving":
                self._wait(lambda: bool(self._unfinished() - self._stale))
            time.sleep(rng.uniform(0, STAGED_SAVING if self._is_staged else SAVING))
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        lives.seconds.append(time.monotonic() - self._began)
        if self._unfinished() - self._stale:
            return "uploading" if self._is_staged else "saving"
        if self._staged() - self._stale:
            return "saving"
        if _newest(self._workdir) == before:
            return "start"
        lives.seconds_to_save = lives.seconds[-1]
        return "training"

    def _unfinished(self) -> set[tuple[str, Any]]:
        """Half-written checkpoints, by name and inode; in a store by name and the record of their beginning."""
        found: set[tuple[str, Any]] = set()
        folder = self._workdir / CHECKPOINTS
        if isinstance(folder, Path):
            for step in folder.glob("*.orbax-checkpoint-tmp*"):
                with contextlib.suppress(FileNotFoundError):  # it is complete now
                    found.add((step.name, step.stat().st_ino))
            return found
        with contextlib.suppress(FileNotFoundError):
            complete = set(map(str, saved_steps(self._workdir)))
            for name in {step.name for step in folder.iterdir()} - complete:
                with contextlib.suppress(FileNotFoundError):
                    found.add((name, (folder / name / BEGUN).read_bytes()))
        return found

    def _staged(self) -> set[tuple[str, Any]]:
        """Checkpoints that Orbax writes, or that are uploaded, by name and inode; none where they are not staged."""
        found: set[tuple[str, Any]] = set()
        for item in Path(os.environ.get("TMPDIR", tempfile.gettempdir())).glob(STAGING) if self._is_staged else ():
            with contextlib.suppress(FileNotFoundError):
                if item.parent.name[0].isdecimal():  # and not of a step that is being removed
                    found.add((item.parent.name, item.parent.stat().st_ino))
        return found

    def _wait(self, until: Callable[[], bool]) -> None:
        deadline = self._began + SECONDS_A_LIFE
        while not until():
            ended = [process.returncode for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                problem = f"ended with code {ended[0]}" if ended else f"made no progress in {SECONDS_A_LIFE:g} s"
                raise UserError(
                    f"training in {self._workdir} {problem}; see log.txt next to the uninterrupted run, and increase "
                    "--steps"
                )
            time.sleep(self._between_looks)


def _newest(workdir: Location) -> int:
    return latest_step(workdir) or 0
