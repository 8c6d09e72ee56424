"""LoRA against full fine-tuning, on MRPC and STS-B, over several seeds.

    BERT_JAX_DATA=DATA python -m benchmarks.lora --model FOLDER --runs RUNS
    BERT_JAX_DATA=DATA python -m benchmarks.lora --model FOLDER --runs RUNS --seeds 1 --steps 20     (a short trial)

FOLDER is any checkpoint; the target is stated for all-MiniLM-L6-v2 (benchmarks/scores.py says where to get it). Each
line of METHODS is `bert-jax finetune` with the same data, seeds and number of epochs, run into
RUNS/TASK-METHOD; an interrupted run is resumed, and a finished one is read. The last line of the output is JSON: for
each task the mean and the deviation of each method, and how many points adapters lose against training everything.
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
FULL = "full"
# Adapters of rank 8 start at zero and learn at ten times the rate (Hu et al. 2021, table 9: 4e-4 to 5e-4).
_LORA = ("optimizer.learning_rate=5e-4", "lora.rank=8", "lora.alpha=16")
METHODS = {
    FULL: ("optimizer.learning_rate=5e-5",),
    "lora": (*_LORA, "lora.targets=attention/(query|value)$"),  # as in that paper
    "lora_all": (*_LORA, "lora.targets=.*"),  # the default, as in Dettmers et al. 2023, section 4
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
    for method in results:
        if FULL in results and method != FULL:
            lost = round(found[FULL]["mean"] - found[method]["mean"], 2)
            found[method] |= {"lost": lost, "within_target": lost <= TARGET}
    return found


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the checkpoint to adapt")
    parser.add_argument("--runs", required=True, type=Path, help="the folder of the workdirs")
    parser.add_argument("--tasks", default=",".join(METRICS), help="tasks, separated by commas (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS], help="methods (default: all)")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each method (default: %(default)s)")
    parser.add_argument("--epochs", type=float, default=5.0, help="epochs of each run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=0, help="steps of each run, for a short trial; 0: by epochs")
    options = parser.parse_args(arguments)
    found = {}
    for task in options.tasks.split(","):
        results = {}
        for method in options.methods:
            line = arguments_of(task, method, options.model, options.runs, options.seeds, options.steps, options.epochs)
            common.run_command([sys.executable, *line])
            file = options.runs / f"{task}-{method}" / "result.json"
            results[method] = json.loads(file.read_text(encoding="utf-8"))
        found[task] = compare(results, METRICS[task])
    methods = {name: METHODS[name] for name in options.methods}
    settings = {"model": Path(options.model).name, "epochs": options.epochs, "steps": options.steps, "methods": methods}
    common.emit_results("lora", found, settings)


if __name__ == "__main__":
    command.run(main)
