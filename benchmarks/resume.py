"""Kills training repeatedly, resumes it, and compares the result with an uninterrupted run (law 4).

    python -m benchmarks.resume                   100 SIGKILLs of one run on a fixed mesh: bit-equal?
    python -m benchmarks.resume --workdir gs://BUCKET/killed --changes model.layers=1   the same in an object store
    python -m benchmarks.resume --part elastic    killed, and resumed on other numbers of devices and processes: equal
                                                  batches, byte for byte, and the largest difference of a loss
    python -m benchmarks.resume --part starts     50 pairs of processes on one workdir: are files as by one run?
    python -m benchmarks.resume --part position   the time to the first step at any position of 10,000 shards

Kills fall at random instants (benchmarks/killed_lives.py). The peer is the uninterrupted run, and a line's value is the
difference from it. Exits with code 2 if anything differs that must not. --changes KEY=VALUE changes the recipe,
configs/bert_tiny.py.

starts     The second process starts at the same moment as the first, at a random later one, or immediately after the
           first was killed. One of them must train, and the other must be refused with exit code 2 and a line that
           names the holder of the workdir.
position   Positions range from the first step to after many epochs. Every position has its own process, with a warm
           compilation cache. The value is the longest time from the end of compiling to the end of the first step. The
           shards are hard links to real ones; the checkpoint is the one of the first step, renamed to the position.
"""

import argparse
import collections
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common, loader
from benchmarks.killed_lives import killed_until, start_process
from bert_jax import command_line, errors
from bert_jax.command_line import EXIT_USER_ERROR
from bert_jax.data.shards import open_dataset
from bert_jax.errors import UserError
from bert_jax.storage.hold import HOLDER_FILE
from bert_jax.storage.location import Location, is_stored, location
from bert_jax.train.metrics import TIMED, read_metrics
from bert_jax.train.workdir import CHECKPOINTS, read_params
from data_prep import build
from data_prep.build_options import BuildOptions
from data_prep.vocabulary import TokenizerOptions, train

RECIPE = str(common.REPOSITORY / "configs" / "bert_tiny.py")
ROWS = 16
SAVE_EVERY, ELASTIC_SAVE_EVERY = 5, 10  # steps
# Devices and processes of successive lives: each process has devices/processes of them.
SHAPES = ((1, 1), (8, 1), (2, 2), (4, 1), (4, 4), (2, 1), (4, 2))
LOSS_TOLERANCE = 1e-6  # relative
KINDS = ("together", "later", "after a kill")
REFUSED = re.compile(r"^error: \S+ is held by another run: process \d+ on \S+, since .* UTC\. Wait ", re.MULTILINE)
POSITION_ROWS = 256
SHARES = (0.0, 0.37, 0.999, 3.5, 40.1)  # epochs before a position


def shards(directory: Path) -> Path:
    """Shards of the text in the repository, T=64, with a held-out part."""
    text = loader.SAMPLE
    train(TokenizerOptions(text, directory / "vocabulary", vocab_size=2000, lowercase=True, strip_accents=True))
    build.build(BuildOptions(text, directory / "vocabulary", directory / "shards", 64, eval_fraction=0.05, workers=1))
    return directory / "shards"


def arguments(data: Path, workdir: Location, steps: int, save_every: int, more: Sequence[str] = ()) -> list[str]:
    """The arguments of the pretraining command; `more` are further ones."""
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


def compare(whole: Location, killed: Location) -> list[str]:
    """The differences between two finished workdirs apart from timings; there must be none."""
    differing = []
    for item in ("params", "optimizer"):
        one, other = (read_params(workdir, item=item) for workdir in (whole, killed))
        if one.keys() != other.keys():
            differing.append(f"the names in {item}")
        differing += [f"{item}/{name}" for name in one if one[name].tobytes() != other[name].tobytes()]
    logs = [
        [{name: value for name, value in line.items() if name not in TIMED} for line in read_metrics(workdir)]
        for workdir in (whole, killed)
    ]
    if logs[0] != logs[1]:
        differing.append("metrics.jsonl")
    results = [json.loads((workdir / "result.json").read_text()) for workdir in (whole, killed)]
    if any(results[0][name] != results[1][name] for name in results[0] if name != "seconds"):
        differing.append("result.json")
    return differing


def kills(
    data: Path,
    work: Path,
    count: int,
    steps: int,
    seed: int,
    more: Sequence[str] = (),
    killed: Location | None = None,
) -> dict[str, Any]:
    """Runs the command on one device, killed `count` times, and returns the measurements, `differing` among them.

    more     further arguments of the command
    killed   the workdir of the run that is killed; None: a folder of `work`. The uninterrupted run has one there.
    """
    killed = killed or work / "killed"

    def start(workdir: Location) -> list[subprocess.Popen[bytes]]:
        line = [sys.executable, "-m", "bert_jax", "pretrain", *arguments(data, workdir, steps, SAVE_EVERY, more)]
        return [start_process(line, 1, work)]

    # killed_until looks in TMPDIR for checkpoints that are staged for S3.
    with unittest.mock.patch.dict(os.environ, {"TMPDIR": str(work)} if is_stored(killed) else {}):
        began = time.monotonic()
        _finish(start(work / "whole")[0], work / "log.txt")
        alone = time.monotonic() - began
        lives = killed_until(lambda _: start(killed), killed, steps, count, seed)
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
    count: int,
    steps: int,
    seed: int,
    more: Sequence[str] = (),
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> dict[str, Any]:
    """Runs the command on changing numbers of devices and processes, and returns the measurements; see `kills`."""

    def start(name: str, shape: tuple[int, int]) -> list[subprocess.Popen[bytes]]:
        devices, processes = shape
        made = arguments(data, work / name, steps, ELASTIC_SAVE_EVERY, more)
        line = [sys.executable, "-m", "benchmarks.resume_worker", str(work / f"{name}-batches"), *made]
        port = f"--coordinator_address=127.0.0.1:{_free_port()}"
        others = [
            [port, f"--num_processes={processes}", f"--process_id={number}"] if processes > 1 else []
            for number in range(processes)
        ]
        return [start_process([*line, *other], devices // processes, work) for other in others]

    _finish(start("whole", (1, 1))[0], work / "log.txt")
    turns = [shapes[number % len(shapes)] for number in range(count + 1)]
    lives = killed_until(lambda life: start("killed", turns[life]), work / "killed", steps, count, seed)
    wanted = dict(read_hashes(work / "whole-batches"))
    found = list(read_hashes(work / "killed-batches"))
    other = sorted({place for place, value in found if wanted.get(place, value) != value})
    missing = {(step, row) for step in range(steps) for row in range(ROWS)} - {place for place, _ in found}
    losses = [{line["step"]: line["loss"] for line in read_metrics(work / name)} for name in ("whole", "killed")]
    if losses[0].keys() != losses[1].keys():
        raise UserError(f"the logs of {work / 'whole'} and {work / 'killed'} cover different steps")
    apart = {step: abs(losses[1][step] / loss - 1) for step, loss in losses[0].items()}
    worst = max(apart, key=lambda step: apart[step])
    problems = [f"rows {other[:3]} of {len(other)}"] if other else []
    problems += [f"{len(missing)} rows were never read"] if missing else []
    problems += [f"a loss by {apart[worst]:.2g} at step {worst}"] if apart[worst] > LOSS_TOLERANCE else []
    return {
        "kills": dict(lives.kills),
        "steps": steps,
        "devices_and_processes": [list(turn) for turn in turns],
        "rows_compared": len(found),
        "largest_relative_difference_of_a_loss": apart[worst],
        "at_step": worst,
        "differing": problems,
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


def starts(data: Path, work: Path, count: int, steps: int, seed: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """Starts the command twice on each of `count` workdirs, and returns the measurements; see `kills`."""

    def start(name: str, which: str) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "bert_jax", "pretrain", *arguments(data, work / name, steps, SAVE_EVERY, more)]
        return start_process(line, 1, work, f"{name}-{which}.txt")

    rng, ends, differing = random.Random(seed), collections.Counter[str](), list[str]()
    began = time.monotonic()
    _finish(start("whole", "alone"), work / "whole-alone.txt")
    seconds = time.monotonic() - began
    for number in range(count):
        name, kind = f"pair-{number}", KINDS[number % len(KINDS)]
        delay = 0.0 if kind == "together" else rng.uniform(0, seconds)
        first = start(name, "first")
        time.sleep(delay)
        if kind == "after a kill":
            first.kill()  # and is not waited for: it may be there still when the second one arrives
        second = start(name, "second")
        codes = first.wait(), second.wait()
        end = _end(kind, codes, [(work / f"{name}-{which}.txt").read_text() for which in ("first", "second")], steps)
        ends[end] += 1
        found = compare(work / "whole", work / name) if "wrong" not in end else [end]
        if (work / name / HOLDER_FILE).exists():
            found.append(HOLDER_FILE)
        if found:
            differing.append(f"{name} ({kind}, {delay:.2f} s): {', '.join(found[:3])}")
    return {"steps": steps, "ends": dict(ends), "seconds_alone": round(seconds, 1), "differing": differing}


def _end(kind: str, codes: Sequence[int], logs: Sequence[str], steps: int) -> str:
    """How a pair ended, in words; contains "wrong" if it must not end so."""
    if kind == "after a kill" and codes[1] == 0 and codes[0] in (0, -9):
        return "the second replaced the first" if codes[0] else "the second found a finished run"
    if sorted(codes) == [0, EXIT_USER_ERROR] and REFUSED.search(logs[codes.index(EXIT_USER_ERROR)]):
        return f"the {('second', 'first')[codes.index(0)]} was refused"
    if list(codes) == [0, 0] and any(f"resuming from step {steps} of" in log for log in logs):
        return "the second found a finished run"
    return f"wrong: exit codes {codes[0]} and {codes[1]}: {errors.one_line(logs[1][-300:])}"


def _finish(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.wait():
        raise UserError(f"the uninterrupted run failed: {errors.one_line(log.read_text()[-500:])}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def position(work: Path, more: Sequence[str]) -> None:
    """Builds shards, resumes at each position, and prints the JSON line."""
    vocabulary, built, workdir = work / "vocabulary", work / "built", work / "run"
    train(TokenizerOptions(loader.SAMPLE, vocabulary, vocab_size=8000, lowercase=True, strip_accents=True))
    build.build(BuildOptions(loader.SAMPLE, vocabulary, built, 128, mask_unit="word", workers=1))
    data = loader.many_shards(built, work / "many")
    epoch = open_dataset(data, "train").rows // POSITION_ROWS

    def run(steps: int) -> dict[str, float]:
        changes = (f"batch_size={POSITION_ROWS}", "checkpoint.every_minutes=0", "optimizer.schedule=constant")
        made = arguments(data, workdir, steps, 0, [*(f"--config.{change}" for change in changes), *more])
        printed = common.run_command([sys.executable, "-m", "benchmarks.resume_worker", "--timed", *made])
        return json.loads(printed.splitlines()[-1])  # after the result of the run

    run(1)  # writes a checkpoint, and fills the compilation cache
    shutil.copytree(workdir, work / "first")
    found = []
    for share in SHARES:
        at = max(int(share * epoch), 1)
        shutil.rmtree(workdir)
        shutil.copytree(work / "first", workdir)
        (workdir / CHECKPOINTS / "1").rename(workdir / CHECKPOINTS / str(at))
        found.append({"position": at, **run(at + 2)})
    name, unit = f"first step at any position of {loader.MANY_SHARDS} shards", "s after compiling"
    settings = {"batch_size": POSITION_ROWS, "steps_in_an_epoch": epoch, "positions": found, "changes": list(more)}
    slowest = max(entry["after_compiling"] for entry in found)
    common.emit(name, slowest, unit, "at the first step", found[0]["after_compiling"], settings, lower_is_better=True)


# The function of a part, and the number of its kills or pairs and of its steps.
PARTS = {"kills": (kills, 100, 1200), "elastic": (elastic, 20, 400), "starts": (starts, 50, 60)}


def measure(flags: argparse.Namespace, more: Sequence[str], work: Path) -> None:
    """Runs a part that compares, prints its JSON line, and raises UserError if anything differs."""
    part, count, steps = PARTS[flags.part]
    count, steps = flags.count or count, flags.steps or steps
    where = {"killed": location(flags.workdir)} if flags.workdir else {}
    figures = part(shards(work), work, count, steps, flags.seed, more, **where)
    value, unit = float(len(figures["differing"])), f"differences after {count} {flags.part}"
    if flags.part == "elastic":
        value, unit = figures["largest_relative_difference_of_a_loss"], f"of a loss at most, in {steps} steps"
    changes = {"store": flags.workdir.partition("://")[0], "changes": list(more)}
    settings = figures | changes | {"recipe": "bert_tiny", "batch_size": ROWS, "seq_len": 64, "seed": flags.seed}
    common.emit(f"resume, {flags.part}", value, unit, "the uninterrupted run", 0.0, settings, lower_is_better=True)
    if figures["differing"]:
        raise UserError(f"differs from the uninterrupted run: {', '.join(figures['differing'][:5])}")


def main(arguments: Sequence[str]) -> None:
    parser = command_line.Parser("benchmarks.resume", __doc__ or "")
    add = parser.add_argument
    add("--part", choices=(*PARTS, "position"), default="kills", help="the part to run (default: kills)")
    add("--count", type=int, default=0, help="kills, or pairs of starts (default: kills 100, elastic 20, starts 50)")
    add("--steps", type=int, default=0, help="training steps (default: kills 1200, elastic 400, starts 60)")
    add("--seed", type=int, default=0, help="seed of the random instants (default: 0)")
    add("--workdir", default="", help="kills: the workdir of the killed run, also in a store (default: temporary)")
    add("--changes", nargs="+", default=[], metavar="KEY=VALUE", help="changes to the recipe, such as model.layers=1")
    flags = parser.parse_args(arguments)
    more = [f"--config.{change}" for change in flags.changes]
    if flags.workdir and flags.part != "kills":
        raise UserError("--workdir applies only to --part kills; remove it")
    with tempfile.TemporaryDirectory() as folder:
        if flags.part == "position":
            position(Path(folder), more)
        else:
            measure(flags, more, Path(folder))


if __name__ == "__main__":
    command_line.run(main)
