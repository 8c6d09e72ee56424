"""LoRA against full fine-tuning, on MRPC and STS-B, over several seeds.

    BERT_JAX_DATA=DATA python -m benchmarks.lora --model FOLDER --runs RUNS
    BERT_JAX_DATA=DATA python -m benchmarks.lora --model FOLDER --runs RUNS --seeds 1 --steps 20     (a short trial)

FOLDER is any checkpoint; the target is stated for all-MiniLM-L6-v2 (benchmarks/scores.py says where to get it). Each
line of METHODS is `python -m bert_jax.finetune` with the same data, seeds and number of epochs, run into
RUNS/TASK-METHOD; an interrupted run is resumed, and a finished one is read. The last line of the output is JSON: for
each task the mean and the deviation of both methods, their difference in points, and whether it is within one point.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from bert_jax import command

METRICS = {"mrpc": "f1", "stsb": "pearson"}
METHODS = {
    "full": ("optimizer.learning_rate=5e-5",),
    # Adapters of rank 8 start at zero and learn at ten times the rate (Hu et al. 2021, table 9: 4e-4 to 5e-4).
    "lora": ("optimizer.learning_rate=5e-4", "lora.rank=8", "lora.alpha=16"),
}
TARGET = 1.0  # points that LoRA may lose


def arguments_of(task: str, method: str, model: str, runs: Path, seeds: int, steps: int, epochs: float) -> list[str]:
    """The command line of one method on one task. steps is 0 for `epochs` epochs."""
    length = f"steps={steps}" if steps else f"epochs={epochs:g}"
    options = (*METHODS[method], f"seeds={seeds}", length, f"init_from={Path(model).absolute()}")
    return common.glue_command(task, runs / f"{task}-{method}", options)


def compare(results: Mapping[str, Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """The figures of one task, in points (hundredths), from the result.json of each method."""
    found = common.points(results, metric)
    found["lost"] = round(found["full"]["mean"] - found["lora"]["mean"], 2)
    found["within_target"] = found["lost"] <= TARGET
    return found


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the checkpoint to adapt")
    parser.add_argument("--runs", required=True, type=Path, help="the folder of the workdirs")
    parser.add_argument("--tasks", default=",".join(METRICS), help="tasks, separated by commas (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each method (default: %(default)s)")
    parser.add_argument("--epochs", type=float, default=5.0, help="epochs of each run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=0, help="steps of each run, for a short trial; 0: by epochs")
    options = parser.parse_args(arguments)
    found = {}
    for task in options.tasks.split(","):
        results = {}
        for method in METHODS:
            line = arguments_of(task, method, options.model, options.runs, options.seeds, options.steps, options.epochs)
            common.run_command([sys.executable, *line])
            file = options.runs / f"{task}-{method}" / "result.json"
            results[method] = json.loads(file.read_text(encoding="utf-8"))
        found[task] = compare(results, METRICS[task])
    settings = {"model": Path(options.model).name, "epochs": options.epochs, "steps": options.steps, "methods": METHODS}
    common.emit_results("lora", found, settings)


if __name__ == "__main__":
    command.run(main)
