"""The time until a resumed run finishes its first step, at any position in a data set of 10,000 shards.

    python -m benchmarks.resume [--input GLOB] [--preset tiny]

Positions range from the first step to after many epochs, each in a process of its own with a warm compilation cache.
The value is the longest time from the end of compiling the train step to the end of the first step. The settings also
give the total time from opening the data: shards, checkpoint, batch and compiling. The shards are hard links to those
of a real folder; the checkpoint is that of the first step, renamed to the position. Prints one JSON line.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import common, loader
from bert_jax import command, pretraining
from bert_jax import config as config_lib
from bert_jax.command import UserError
from bert_jax.data.shards import open_dataset
from bert_jax.train.compilation_cache import enable_compilation_cache
from bert_jax.train.metrics import read_metrics
from bert_jax.train.workdir import CHECKPOINTS, latest_step
from data_prep import build_examples, train_tokenizer
from data_prep.build_options import BuildOptions
from data_prep.train_tokenizer import TokenizerOptions

RECIPE = common.REPOSITORY / "configs" / "bert_tiny.py"
ROWS = 256
SHARES = (0.0, 0.37, 0.999, 3.5, 40.1)  # epochs before a position
COMPILED = "/jax/core/compile/backend_compile_duration"


def first_step(data: Path, workdir: Path, preset: str) -> dict[str, float]:
    """Resumes a run for two steps; seconds from the call and from the last compilation to the end of the first."""
    compiled: list[float] = []

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILED:
            compiled.append(time.time())

    jax.monitoring.register_event_duration_secs_listener(note)
    at = latest_step(workdir) or 0
    began = time.time()
    pretraining.pretrain(_config(data, preset, at + 2), workdir)
    first = next(line["time"] for line in read_metrics(workdir) if line["step"] == at + 1)
    return {
        "position": at,
        "after_compiling": first - max(moment for moment in compiled if moment < first),
        "all": first - began,
    }


def _config(data: Path, preset: str, steps: int) -> Any:
    overrides = {
        "data.train": data,
        "model.preset": preset,
        "batch_size": ROWS,
        "steps": steps,
        "log_every": 1,
        "checkpoint.every_minutes": 0.0,
        "optimizer.schedule": "constant",
    }
    return config_lib.read_flags(str(RECIPE), [f"--config.{name}={value}" for name, value in overrides.items()])


def measure(input: str, preset: str) -> dict[str, Any]:
    """Builds the shards, resumes at each position, prints the JSON line and returns it."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        train_tokenizer.train(TokenizerOptions(input, work / "vocabulary", vocab_size=8000, lowercase=True))
        build_examples.build(BuildOptions(input, work / "vocabulary", work / "built", 128, mask_unit="word", workers=1))
        data = loader.many_shards(work / "built", work / "many")
        epoch = open_dataset(data, "train").rows // ROWS
        workdir = work / "run"
        pretraining.pretrain(_config(data, preset, 1), workdir)  # writes a checkpoint, and fills the compilation cache
        found = []
        for share in SHARES:
            checkpoints = workdir / CHECKPOINTS
            newest = latest_step(workdir)
            (checkpoints / str(newest)).rename(checkpoints / "moved")
            for other in checkpoint_steps(checkpoints):
                (checkpoints / other).rename(work / f"left-{other}-{share}")
            (checkpoints / "moved").rename(checkpoints / str(max(int(share * epoch), 1)))
            found.append(_in_a_process(data, workdir, preset))
    slowest = max(found, key=lambda entry: entry["after_compiling"])
    return common.emit(
        f"first step at any position of {loader.MANY_SHARDS} shards",
        slowest["after_compiling"],
        "s after compiling",
        None,
        None,
        {
            "preset": preset,
            "batch_size": ROWS,
            "steps_in_an_epoch": epoch,
            "positions": [int(entry["position"]) for entry in found],
            "after_compiling": [round(entry["after_compiling"], 3) for entry in found],
            "from_opening_the_data": [round(entry["all"], 3) for entry in found],
        },
        lower_is_better=True,
    )


def checkpoint_steps(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.isdecimal()]


def _in_a_process(data: Path, workdir: Path, preset: str) -> dict[str, float]:
    line = [sys.executable, "-m", "benchmarks.resume", "--go_on", str(data), str(workdir), f"--preset={preset}"]
    environment = os.environ | {"PYTHONPATH": str(common.REPOSITORY)}
    ran = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
    if ran.returncode:
        raise UserError(f"the resumed run failed: {ran.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(ran.stdout.splitlines()[-1]))


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("python -m benchmarks.resume", __doc__ or "")
    parser.add_argument(
        "--input", default=loader.SAMPLE, help="text to build the rows from (default: data_prep/sample)"
    )
    parser.add_argument("--preset", default="tiny", help="model size (default: tiny)")
    parser.add_argument(
        "--go_on", nargs=2, type=Path, metavar=("DATA", "WORKDIR"), help="measure one position in this process"
    )
    flags = parser.parse_args(arguments)
    enable_compilation_cache()
    if flags.go_on:
        data, workdir = flags.go_on
        print(json.dumps(first_step(data, workdir, flags.preset)), flush=True)
    else:
        measure(flags.input, flags.preset)


if __name__ == "__main__":
    command.run(main)
