"""Starts the same training command twice on one workdir: are the files those of one run, bit for bit?

    python -m benchmarks.double_start              50 pairs of processes of configs/bert_tiny.py (see --help)

The second process starts at the same moment as the first, or at a random later one, or immediately after the first was
killed at a random moment. One of the two must train, and the other must be refused with exit code 2 and a line that
names the holder of the workdir. Prints one JSON line, and exits with code 2 if anything differs that must not.
"""

import collections
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import chaos, common, killed_lives
from bert_jax import command
from bert_jax.command import EXIT_USER_ERROR, UserError
from bert_jax.storage.holder import HOLDER_FILE

KINDS = ("together", "later", "after a kill")
REFUSED = re.compile(r"^error: \S+ is held by another run: process \d+ on \S+, since .* UTC\. Wait ", re.MULTILINE)


def pairs(data: Path, work: Path, starts: int, steps: int, seed: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """Starts the command twice on each of `starts` workdirs and returns the measurements, `wrong` among them.

    `more` are further arguments of the command.
    """
    rng, ends, wrong = random.Random(seed), collections.Counter[str](), list[str]()
    seconds = _alone(data, work, steps, more)
    for number in range(starts):
        name, kind = f"pair-{number}", KINDS[number % len(KINDS)]
        delay = 0.0 if kind == "together" else rng.uniform(0, seconds)
        first = _start(data, work, name, "first", steps, more)
        time.sleep(delay)
        if kind == "after a kill":
            first.kill()  # and is not waited for: it may be there still when the second one arrives
        second = _start(data, work, name, "second", steps, more)
        codes = first.wait(), second.wait()
        end = _end(kind, codes, [_log(work, name, which) for which in ("first", "second")], steps)
        ends[end] += 1
        differing = chaos.compare(work / "whole", work / name) if "wrong" not in end else [end]
        if (work / name / HOLDER_FILE).exists():
            differing.append(HOLDER_FILE)
        if differing:
            wrong.append(f"{name} ({kind}, {delay:.2f} s): {', '.join(differing[:3])}")
    return {"starts": starts, "steps": steps, "ends": dict(ends), "seconds_alone": round(seconds, 1), "wrong": wrong}


def _alone(data: Path, work: Path, steps: int, more: Sequence[str]) -> float:
    """The seconds of one process on a workdir of its own, whose files the others must equal."""
    began = time.monotonic()
    if _start(data, work, "whole", "alone", steps, more).wait():
        raise UserError(f"the run of one process failed: {_log(work, 'whole', 'alone')[-500:]}")
    return time.monotonic() - began


def _start(data: Path, work: Path, name: str, which: str, steps: int, more: Sequence[str]) -> "subprocess.Popen[bytes]":
    line = [sys.executable, "-m", "bert_jax", "pretrain"]
    line += chaos.arguments(data, work / name, steps, chaos.SAVE_EVERY, more)
    return killed_lives.start_process(line, 1, work, f"{name}-{which}.txt")


def _log(work: Path, name: str, which: str) -> str:
    return (work / f"{name}-{which}.txt").read_text()


def _end(kind: str, codes: Sequence[int], logs: Sequence[str], steps: int) -> str:
    """How a pair ended, in words; contains "wrong" if it must not end so."""
    if kind == "after a kill" and codes[1] == 0 and codes[0] in (0, -9):
        return "the second replaced the first" if codes[0] else "the second found a finished run"
    if sorted(codes) == [0, EXIT_USER_ERROR] and REFUSED.search(logs[codes.index(EXIT_USER_ERROR)]):
        return f"the {('second', 'first')[codes.index(0)]} was refused"
    if list(codes) == [0, 0] and any(f"resuming from step {steps} of" in log for log in logs):
        return "the second found a finished run"
    return f"wrong: exit codes {codes[0]} and {codes[1]}: {command.one_line(logs[1][-300:])}"


def measure(starts: int, steps: int, seed: int) -> dict[str, Any]:
    """Runs the pairs, prints their JSON line, and raises UserError if the files of one differ."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        figures = pairs(chaos.shards(work), work, starts, steps, seed)
    settings = figures | {"recipe": "bert_tiny", "batch_size": chaos.ROWS, "seq_len": 64, "seed": seed}
    unit = f"of {starts} double starts that left other files than one run"
    result = common.emit("double start", float(len(figures["wrong"])), unit, None, None, settings, lower_is_better=True)
    if figures["wrong"]:
        raise UserError(f"not the files of one run: {'; '.join(figures['wrong'][:3])}")
    return result


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("python -m benchmarks.double_start", __doc__ or "")
    parser.add_argument("--starts", type=int, default=50, help="number of double starts (default: 50)")
    parser.add_argument("--steps", type=int, default=60, help="training steps (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments (default: 0)")
    flags = parser.parse_args(arguments)
    measure(flags.starts, flags.steps, flags.seed)


if __name__ == "__main__":
    command.run(main)
