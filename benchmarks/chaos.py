"""Kills training repeatedly, and compares the result with that of an uninterrupted run (law 4).

    python -m benchmarks.chaos                 100 SIGKILLs during one run of the command on a fixed mesh: bit-equal?
    python -m benchmarks.chaos --part elastic  killed and resumed on other numbers of devices and processes: equal
                                               batches, byte for byte, and the largest difference of a loss

Kills fall at random instants of start-up, of training, and of saving (once a half-written checkpoint exists, also one
that is staged for S3, or uploaded in part). Prints one JSON line, and exits with code 2 if anything differs that must
not.
"""

import collections
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from bert_jax import command
from bert_jax.command import UserError
from bert_jax.storage.location import Location, is_stored
from bert_jax.train.metrics import read_metrics
from bert_jax.train.orbax_workarounds import BEGUN, is_staged
from bert_jax.train.workdir import CHECKPOINTS, latest_step, read_params, saved_steps
from data_prep import build_examples, train_tokenizer
from data_prep.build_options import BuildOptions
from data_prep.train_tokenizer import TokenizerOptions

SAMPLE = str(common.REPOSITORY / "data_prep" / "sample" / "books" / "*.txt.xz")
RECIPE = str(common.REPOSITORY / "configs" / "bert_tiny.py")
ROWS = 16
SAVE_EVERY = 5  # steps
ELASTIC_SAVE_EVERY = 10
TIMES = (
    "time",
    "tokens_per_second",
    "data_wait_share",
    "mfu",
    "peak_memory_gb",
)  # fields of a log line that differ between any two runs
# Devices and processes of successive lives: each process has devices/processes of them.
SHAPES = ((1, 1), (8, 1), (2, 2), (4, 1), (4, 4), (2, 1), (4, 2))
LOSS_TOLERANCE = 1e-6  # relative
SECONDS_A_LIFE = 600.0
POLL, STORE_POLL = 0.002, 0.1  # seconds between two looks at a workdir; in a store each is several requests
SAVING, STAGED_SAVING = 0.1, 0.6  # seconds within which a kill follows the beginning of a save
STAGING = "bert_jax-staging-*/checkpoints/*/*/"  # items of steps, in TMPDIR (storage/scratch.py)


@dataclass
class Lives:
    """A record of the processes that ran on one workdir, one life after another."""

    kills: collections.Counter[str] = field(default_factory=collections.Counter)  # by the phase in which they fell
    steps_lost: int = 0
    seconds: list[float] = field(default_factory=list)
    seconds_to_save: float = 5.0  # from a start to its first checkpoint, as last measured


def shards(directory: Path) -> Path:
    """Shards of the text in the repository, T=64, with a held-out part."""
    train_tokenizer.train(TokenizerOptions(SAMPLE, directory / "vocabulary", vocab_size=2000, lowercase=True))
    build_examples.build(
        BuildOptions(SAMPLE, directory / "vocabulary", directory / "shards", 64, eval_fraction=0.05, workers=1)
    )
    return directory / "shards"


def arguments(data: Path, workdir: Location, steps: int, save_every: int, more: Sequence[str] = ()) -> list[str]:
    return [
        f"--config={RECIPE}",
        f"--workdir={workdir}",
        f"--config.data.train={data}",
        f"--config.batch_size={ROWS}",
        f"--config.steps={steps}",
        "--config.log_every=1",
        f"--config.checkpoint.every_steps={save_every}",
        "--config.checkpoint.keep=3",
        "--config.eval.max_rows=64",
        *more,
    ]


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


def compare(whole: Location, killed: Location) -> list[str]:
    """The differences between two finished workdirs apart from timings; there must be none."""
    differing = []
    for item in ("params", "optimizer"):
        one, other = (read_params(workdir, item=item) for workdir in (whole, killed))
        if one.keys() != other.keys():
            differing.append(f"the names in {item}")
        differing += [f"{item}/{name}" for name in one if one[name].tobytes() != other[name].tobytes()]
    logs = [
        [{name: value for name, value in line.items() if name not in TIMES} for line in read_metrics(workdir)]
        for workdir in (whole, killed)
    ]
    if logs[0] != logs[1]:
        differing.append("metrics.jsonl")
    results = [json.loads((workdir / "result.json").read_text()) for workdir in (whole, killed)]
    if any(results[0][name] != results[1][name] for name in results[0] if name != "seconds"):
        differing.append("result.json")
    return differing


def fixed(
    data: Path,
    work: Path,
    kills: int,
    steps: int,
    seed: int,
    more: Sequence[str] = (),
    killed: Location | None = None,
) -> dict[str, Any]:
    """Runs the command on one device, killed `kills` times, and returns the measurements, `differing` among them.

    more     further arguments of the command
    killed   the workdir of the run that is killed; None: a folder of `work`. The uninterrupted run has one there.
    """
    killed = killed or work / "killed"

    def start(workdir: Location) -> list[subprocess.Popen[bytes]]:
        line = [sys.executable, "-m", "bert_jax.pretrain", *arguments(data, workdir, steps, SAVE_EVERY, more)]
        return [start_process(line, 1, work)]

    began = time.monotonic()
    if start(work / "whole")[0].wait():
        raise UserError(f"the uninterrupted run failed; see {work / 'log.txt'}")
    alone = time.monotonic() - began
    lives = killed_until(lambda _: start(killed), killed, steps, kills, seed)
    return {
        "kills": dict(lives.kills),
        "steps": steps,
        "checkpoint_every": SAVE_EVERY,
        "steps_trained_again": lives.steps_lost,
        "seconds_alone": round(alone, 1),
        "seconds_killed": round(sum(lives.seconds), 1),
        "differing": compare(work / "whole", killed),
    }


def elastic(
    data: Path,
    work: Path,
    kills: int,
    steps: int,
    seed: int,
    shapes: Sequence[tuple[int, int]],
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """Runs the command on changing numbers of devices and processes, and returns the measurements; see `fixed`."""

    def start(name: str, shape: tuple[int, int]) -> list[subprocess.Popen[bytes]]:
        devices, processes = shape
        log = work / f"{name}-batches"
        made = arguments(data, work / name, steps, ELASTIC_SAVE_EVERY, more)
        line = [sys.executable, "-m", "benchmarks.chaos_worker", str(log), *made]
        port = f"--coordinator_address=127.0.0.1:{_free_port()}"
        others = [
            [port, f"--num_processes={processes}", f"--process_id={number}"] if processes > 1 else []
            for number in range(processes)
        ]
        return [start_process([*line, *other], devices // processes, work) for other in others]

    if start("whole", (1, 1))[0].wait():
        raise UserError(f"the uninterrupted run failed; see {work / 'log.txt'}")
    turns = [shapes[number % len(shapes)] for number in range(kills + 1)]
    lives = killed_until(lambda life: start("killed", turns[life]), work / "killed", steps, kills, seed)
    wanted = dict(read_hashes(work / "whole-batches"))
    found = list(read_hashes(work / "killed-batches"))
    other = sorted({place for place, value in found if wanted.get(place, value) != value})
    missing = {(step, row) for step in range(steps) for row in range(ROWS)} - {place for place, _ in found}
    losses = [{line["step"]: line["loss"] for line in read_metrics(work / name)} for name in ("whole", "killed")]
    if losses[0].keys() != losses[1].keys():
        raise UserError(f"the logs of {work / 'whole'} and {work / 'killed'} cover different steps")
    apart = {step: abs(losses[1][step] / loss - 1) for step, loss in losses[0].items()}
    return {
        "kills": dict(lives.kills),
        "steps": steps,
        "devices_and_processes": [list(turn) for turn in turns],
        "rows_compared": len(found),
        "rows_that_differ": len(other),
        "rows_never_read": len(missing),
        "largest_relative_difference_of_a_loss": max(apart.values()),
        "at_step": max(apart, key=lambda step: apart[step]),
    }


def read_hashes(folder: Path) -> Iterator[tuple[tuple[int, int], str]]:
    """((step, row), hash) of every row that any process of any life made. Lines that a kill cut short are ignored."""
    for file in sorted(folder.iterdir()):
        for line in file.read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            for row, value in zip(entry["rows"], entry["hashes"], strict=True):
                yield (entry["step"], row), value


def start_process(line: Sequence[str], devices: int, work: Path, log_name: str = "log.txt") -> subprocess.Popen[bytes]:
    """Starts a process with so many CPU devices in a folder, where its output is appended to a file."""
    environment = dict(os.environ, JAX_PLATFORMS="cpu")
    given = os.environ.get("XLA_FLAGS", "")
    environment["XLA_FLAGS"] = f"{given} --xla_force_host_platform_device_count={devices}"
    environment["PYTHONPATH"] = str(common.REPOSITORY)
    with (work / log_name).open("ab") as log:
        return subprocess.Popen(line, cwd=work, env=environment, stdout=log, stderr=log)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check(part: str, figures: Mapping[str, Any]) -> None:
    """Raises UserError if law 4 is violated."""
    if part == "fixed" and figures["differing"]:
        raise UserError(f"differs from the uninterrupted run: {', '.join(figures['differing'][:5])}")
    if part == "elastic":
        if figures["rows_that_differ"] or figures["rows_never_read"]:
            raise UserError(f"{figures['rows_that_differ']} rows differ, {figures['rows_never_read']} were never read")
        if (worst := figures["largest_relative_difference_of_a_loss"]) > LOSS_TOLERANCE:
            raise UserError(
                f"a loss differs by {worst:.2g}, more than {LOSS_TOLERANCE:g}, at step {figures['at_step']}"
            )


def measure(part: str, kills: int, steps: int, seed: int, one_process: bool) -> dict[str, Any]:
    """Runs a part, prints its JSON line, and checks the result."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        data = shards(work)
        if part == "fixed":
            figures = fixed(data, work, kills, steps, seed)
            value, unit = float(len(figures["differing"])), f"tensors or files that differ after {kills} SIGKILLs"
        else:
            shapes = [shape for shape in SHAPES if shape[1] == 1 or not one_process]
            figures = elastic(data, work, kills, steps, seed, shapes)
            value = figures["largest_relative_difference_of_a_loss"]
            unit = f"largest relative difference of a loss in {steps} steps"
    settings = figures | {"recipe": "bert_tiny", "batch_size": ROWS, "seq_len": 64, "seed": seed}
    result = common.emit(f"chaos, {part}", value, unit, None, None, settings, lower_is_better=True)
    check(part, figures)
    return result


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("benchmarks.chaos", __doc__ or "")
    parser.add_argument(
        "--part", choices=("fixed", "elastic"), default="fixed", help="the part to run (default: fixed)"
    )
    parser.add_argument("--kills", type=int, default=0, help="number of SIGKILLs (default: 100, elastic 20)")
    parser.add_argument("--steps", type=int, default=0, help="training steps (default: 1200, elastic 400)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random instants (default: 0)")
    parser.add_switch("one_process", help="elastic: change the number of devices only")
    flags = parser.parse_args(arguments)
    kills = flags.kills or (100 if flags.part == "fixed" else 20)
    steps = flags.steps or (1200 if flags.part == "fixed" else 400)
    measure(flags.part, kills, steps, flags.seed, bool(flags.one_process))


if __name__ == "__main__":
    command.run(main)
