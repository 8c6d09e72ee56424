"""Examples per second of fine-tuning several seeds in one program, compared with the same seeds in turn.

    BERT_JAX_DATA=DATA python -m benchmarks.seeds --checkpoint CHECKPOINT
    BERT_JAX_DATA=DATA python -m benchmarks.seeds --checkpoint CHECKPOINT --task rte --seeds 3 --steps 40

The runs are those of bert-jax finetune, with its batches and steps; evaluation and saving are the same either way, and
are omitted. The two programs take turns on the same steps. A step of each is a step of all seeds.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import common
from benchmarks.turns import Turn, alternate
from bert_jax import command
from bert_jax import config as config_lib
from bert_jax.config import FinetuneConfig
from bert_jax.tasks.prepared_runs import prepare
from bert_jax.train import initial_state, multi_seed, partitioning, setup, stacked_states
from bert_jax.train import steps as train_steps
from bert_jax.train.checkpoint import Checkpoints
from bert_jax.train.host_memory import keep_freed_memory
from bert_jax.train.run import Run, Source
from bert_jax.train.setup import OpenWorkdir

RECIPE = common.REPOSITORY / "configs" / "glue.py"
ROUNDS, WARMUP = 4, 1


def do_nothing() -> None:
    """Replaces the check of who holds a workdir: here, only the benchmark knows the folder."""


def turn_of(groups: Sequence[Sequence[Run]], sources: Sequence[Source], folder: Path, steps: int) -> Turn:
    """A turn of steps; each advances all groups of runs, one after another. The runs of a group are one program."""
    mesh = partitioning.make_mesh(groups[0][0].config.mesh)
    advance: list[Callable[[Any], Any]] = []
    for number, runs in enumerate(groups):
        plan = setup.make_plan(runs[0])
        with contextlib.ExitStack() as stack:
            opened = [
                OpenWorkdir(stack.enter_context(Checkpoints(folder / f"{number}-{place}", keep=1)), {}, [], do_nothing)
                for place in range(len(runs))
            ]
            if len(runs) == 1:
                state, _ = initial_state.restore_or_initialize(runs[0], plan, mesh, opened[0].checkpoints)
                step, arguments = train_steps.jitted(plan, mesh, state), (setup.training_key(runs[0], mesh),)
            else:
                seeds = [multi_seed.Seed(*pair) for pair in zip(runs, opened, strict=True)]
                running = [True] * len(runs)
                state = stacked_states.stack_states(multi_seed.restore_or_initialize(seeds, plan, mesh), running)
                step = stacked_states.jitted(plan, mesh, state)
                arguments = stacked_states.step_arguments(runs, running, mesh)
        advance.append(stepping(step, state, arguments))
    batches = [
        [partitioning.place(source.batch(step), source.rows_at(step), mesh) for source in sources]
        for step in range(steps)
    ]
    for first in {batch[0].input_ids.shape: batch for batch in batches}.values():  # compiles the step for each length
        jax.block_until_ready([step(batch) for step, batch in zip(advance, first, strict=True)])
    order = iter(batches)

    def run(count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            jax.block_until_ready([step(batch) for step, batch in zip(advance, next(order), strict=True)])
            seconds.append(time.perf_counter() - began)
        return seconds

    return run


def stepping(step: Any, state: Any, arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    """A function of a batch that keeps a state, advances it, and returns the metrics."""

    def advance(batch: Any) -> Any:
        nonlocal state
        state, metrics = step(state, batch, np.float32(0), *arguments)
        return metrics

    return advance


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="the checkpoint to fine-tune, as in config.init_from")
    parser.add_argument(
        "--task",
        default="mrpc",
        help="a task of configs/glue.py; its files are read from BERT_JAX_DATA (default: mrpc)",
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    parser.add_argument("--steps", type=int, default=24, help="measured steps of each seed (default: 24)")
    known = parser.parse_args(list(arguments))
    if common.shared_data() is None:
        raise command.UserError("BERT_JAX_DATA is not set. Set it to the folder with the files of the task")
    keep_freed_memory()
    overrides = [f"--config.init_from={known.checkpoint}", f"--config.seeds={known.seeds}"]
    config = config_lib.load(FinetuneConfig, config_lib.read_flags(f"{RECIPE}:task={known.task}", overrides))
    count = -(-known.steps // ROUNDS)
    steps = WARMUP + ROUNDS * count
    with tempfile.TemporaryDirectory() as name, jax.set_mesh(partitioning.make_mesh(config.mesh)):
        _, _, by_trial = prepare(config, Path(name) / "runs")
        runs = list(by_trial.values())
        as_one = turn_of([runs], [multi_seed.stacked_source(runs)], Path(name) / "together", steps)
        in_turn = turn_of([[run] for run in runs], [run.source for run in runs], Path(name) / "turns", steps)
        seconds = alternate([as_one, in_turn], ROUNDS, count, WARMUP)
    rates = [len(runs) * config.batch_size * len(found) / sum(found) for found in seconds]
    common.emit(
        "seeds_together",
        rates[0],
        "examples/s",
        "the same seeds in turn",
        rates[1],
        {
            "task": known.task,
            "seeds": len(runs),
            "steps": ROUNDS * count,
            "batch_size": config.batch_size,
            "model": {name: getattr(runs[0].model, name) for name in ("layers", "width", "vocab_size")},
            "device": jax.devices()[0].device_kind,
            "devices": jax.device_count(),
        },
    )


if __name__ == "__main__":
    command.run(main)
