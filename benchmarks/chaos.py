"""Kills training repeatedly, and compares the result with that of an uninterrupted run (law 4).

    python -m benchmarks.chaos                 100 SIGKILLs during one run of the command on a fixed mesh: bit-equal?
    python -m benchmarks.chaos --part elastic  killed and resumed on other numbers of devices and processes: equal
                                               batches, byte for byte, and the largest difference of a loss

Kills fall at random instants (benchmarks/killed_lives.py). Prints one JSON line, and exits with code 2 if anything
differs that must not.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.killed_lives import killed_until, start_process
from bert_jax import command
from bert_jax.command import UserError
from bert_jax.storage.location import Location
from bert_jax.train.metrics import read_metrics
from bert_jax.train.workdir import read_params
from data_prep import build_examples, train_tokenizer
from data_prep.build_options import BuildOptions
from data_prep.train_tokenizer import TokenizerOptions

SAMPLE = str(common.REPOSITORY / "data_prep" / "sample" / "books" / "*.txt.xz")
RECIPE = str(common.REPOSITORY / "configs" / "bert_tiny.py")
ROWS = 16
SAVE_EVERY = 5  # steps
ELASTIC_SAVE_EVERY = 10
# Fields of a log line that differ between any two runs.
TIMES = ("time", "tokens_per_second", "data_wait_share", "mfu", "peak_memory_gb")
# Devices and processes of successive lives: each process has devices/processes of them.
SHAPES = ((1, 1), (8, 1), (2, 2), (4, 1), (4, 4), (2, 1), (4, 2))
LOSS_TOLERANCE = 1e-6  # relative


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
        line = [sys.executable, "-m", "bert_jax", "pretrain", *arguments(data, workdir, steps, SAVE_EVERY, more)]
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
    parser = command.Parser("python -m benchmarks.chaos", __doc__ or "")
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
