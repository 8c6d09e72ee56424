"""The trials of a fine-tuning, one for each seed.

In order: the trials of a configuration and the settings of each, the result over all of them and the copy of the best
checkpoint, and `train`, which trains and measures them one after another.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from bert_jax.config import FinetuneConfig
from bert_jax.config.training import SEEDS
from bert_jax.errors import Stopped, UserError
from bert_jax.storage.location import Location, copy_folder, remove_folder, write_json
from bert_jax.tasks import measurement, registry
from bert_jax.tasks.kinds.tagging import TaggingTask
from bert_jax.tasks.registry import to_json
from bert_jax.tasks.rows import TaskRows
from bert_jax.tasks.task import Task
from bert_jax.train import distributed, loop, rules
from bert_jax.train.evaluation import PREFIX, lower_is_better
from bert_jax.train.metrics import copy_metrics
from bert_jax.train.orbax_io import AVERAGE
from bert_jax.train.run import Result, Run
from bert_jax.train.workdir import (
    CHECKPOINTS,
    CONFIG_FILE,
    read_config,
    read_params,
    selected_step,
    write_config,
    write_params,
)

# Fine-tuning with run_classifier.py of google-research/bert warms up over a tenth of the steps (--warmup_proportion).
WARMUP_SHARE = 0.1
MOST_SEEDS = 100  # a larger number of seeds is more likely meant as a seed
CRF_PATH = "^crf/"
# Where a workdir holds config.json, by what it is: one seed, several seeds, a sweep.
_CONFIGS = ("config.json", "seed-*/config.json", "sweep-*")


@dataclass(frozen=True)
class Trial:
    """One run: its seed, and its folder in the workdir (empty: the workdir itself)."""

    seed: int
    folder: str = ""


def trials_of(config: FinetuneConfig) -> list[Trial]:
    """The trials of a configuration, one for each seed. Raises UserError for invalid or repeated seeds."""
    seeds = config.seeds
    if isinstance(seeds, int):
        if seeds > MOST_SEEDS:
            raise UserError(
                f"seeds is {seeds}, but the number of seeds is at most {MOST_SEEDS}; to train with this seed, use "
                f"--config.seed={seeds}"
            )
        seeds = tuple(range(config.seed, config.seed + seeds))
    if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed < SEEDS for seed in seeds):
        raise UserError(
            f"seeds is {config.seeds}; give the number of seeds, such as --config.seeds=5, or several different seeds "
            f"from 0 to {SEEDS - 1}, such as --config.seeds=0,1,2"
        )
    return [Trial(seed, f"seed-{seed}" if len(seeds) > 1 else "") for seed in seeds]


def check_seeds(config: FinetuneConfig, workdir: Location) -> None:
    """Raises UserError for keys out of range, and for a workdir that holds another kind of trials."""
    if config.early_stop < 0:
        raise UserError(f"early_stop is {config.early_stop}; use a number of evaluations, 0 to train to the end")
    kinds = ("a run of one seed", "runs of several seeds", "a sweep")
    wanted = 2 if config.sweep else int(len(trials_of(config)) > 1)
    # The last kind that is there decides, because WORKDIR/config.json may also be that of the best of several runs.
    present = next((kind for kind in (2, 1, 0) if any(workdir.glob(_CONFIGS[kind]))), wanted)
    if present != wanted:
        others = ("", ", or give all of their seeds", ", or give the sweep")[present]
        raise UserError(f"{workdir} holds {kinds[present]}. Name another --workdir for {kinds[wanted]}{others}")


def chosen_by(config: FinetuneConfig, task: Task) -> str:
    """The dev metric that selects the seed: checkpoint.best, or the task's first.

    With early_stop it also selects the step of a run, which otherwise is the last one.
    """
    return config.checkpoint.best.removeprefix(PREFIX) or task.metrics[0]


def settings(config: FinetuneConfig, trial: Trial, task: Task, rows: int, measured: bool) -> FinetuneConfig:
    """The configuration of a trial, as if it were run alone, with its length, warmup and evaluation given in steps.

    rows is the number of rows of the training file; measured is whether there is a dev file. Raises UserError for
    early_stop without a dev file.
    """
    if config.early_stop:
        check_measured("early_stop", config.early_stop, measured)
    epoch = math.ceil(rows / config.batch_size)
    length = config.steps or math.ceil(rows * config.epochs / config.batch_size)
    schedule = config.optimizer.schedule
    warmup, share = schedule.warmup_steps, schedule.warmup_share
    if warmup < 0:
        if share <= 0 and config.budget_minutes > 0:  # the number of steps is not known in advance
            share = WARMUP_SHARE
        warmup = 0 if share > 0 else math.ceil(WARMUP_SHARE * length)
    best = config.checkpoint.best or (PREFIX + chosen_by(config, task) if config.early_stop else "")
    return dataclasses.replace(
        config,
        seed=trial.seed,
        seeds=1,
        steps=config.steps if config.budget_minutes > 0 else length,
        optimizer=dataclasses.replace(
            config.optimizer,
            schedule=dataclasses.replace(schedule, warmup_steps=warmup, warmup_share=share),
            rates=_with_crf_rate(config.optimizer.rates, task),
        ),
        eval=dataclasses.replace(config.eval, every_steps=config.eval.every_steps or epoch),
        checkpoint=dataclasses.replace(config.checkpoint, best=best),
    )


def check_measured(key: str, value: Any, measured: bool) -> None:
    """Raises UserError for a key that compares evaluations, without a dev file."""
    if not measured:
        raise UserError(
            f"{key}={value}, but there is no dev file to evaluate. Name one with --config.task.dev, or omit {key}"
        )


def _with_crf_rate(rates: dict[str, float], task: Task) -> dict[str, int | float]:
    """optimizer.rates with the rate of a CRF (task.crf_rate), unless it has one already."""
    return {CRF_PATH: task.crf_rate, **rates} if isinstance(task, TaggingTask) and task.crf else rates


def unfreeze_every(config: FinetuneConfig, rows: int) -> int:
    """The number of steps between unfreezing one layer and the next with train_layers=gradual; otherwise 0."""
    epochs = rules.gradual_epochs(config.train_layers)
    return 0 if epochs is None else max(1, round(epochs * rows / config.batch_size))


def never_unfrozen(config: FinetuneConfig, rows: int, steps: int, layers: int) -> str:
    """A line about what train_layers=gradual never trains in a run of at most so many steps, with a value that fits.

    It is empty if everything trains, and if the number of steps is not known (0).
    """
    every = unfreeze_every(config, rows)
    stages = (steps - 1) // every if every and steps else layers + 1  # a stage for each layer, and for the embeddings
    if stages > layers:
        return ""
    left = f"{layers - stages} of {layers} layers and " if stages < layers else ""
    line = f"train_layers={config.train_layers} leaves {left}the embeddings as they are in {steps} steps"
    if not (fitting := (steps - 1) // (layers + 1)):
        return f"{line}; use more steps"
    epochs = fitting * config.batch_size / rows
    unit = 10.0 ** (math.floor(math.log10(epochs)) - 1)  # two digits, rounded down
    return f"{line}; --config.train_layers=gradual:{math.floor(epochs / unit) * unit:.2g} trains all"


# The result of a fine-tuning over its trials: statistics of the metrics, tables, and the checkpoint of the best.


BEST_FILE = "best_seed.json"

Metrics = Mapping[str, float]


def result(
    task: str, chosen_by: str, by_trial: Mapping[Trial, Metrics], steps: Mapping[Trial, int], counts: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of result.json: task, seeds, metrics {name: {mean, std, values}}, steps, counts, and best of several.

    chosen_by is the dev metric that decides; steps are the steps of the parameters that are kept.
    """
    found: dict[str, Any] = {
        "task": task,
        "seeds": [trial.seed for trial in by_trial],
        "metrics": summary(list(by_trial.values())),
        "steps": [steps[trial] for trial in by_trial],
        "counts": dict(counts),
    }
    if len(by_trial) > 1:
        trial = best(by_trial, chosen_by)
        value = by_trial[trial].get(chosen_by, math.nan)
        found["best"] = {
            "seed": trial.seed,
            "run": trial.folder,
            "metric": chosen_by,
            "value": None if math.isnan(value) else value,
        }
    return found


def best(by_trial: Mapping[Trial, Metrics], chosen_by: str) -> Trial:
    """The trial with the best value; the first one if nothing was measured."""
    return max(by_trial, key=lambda trial: score(by_trial[trial].get(chosen_by), chosen_by))


def score(value: float | None, metric: str) -> float:
    """The value of a metric as a number of which the highest is the best; an undefined one is the worst."""
    if value is None or math.isnan(value):
        return -math.inf
    return -value if lower_is_better(metric) else value


def keep_best(workdir: Location, trial: Trial, averaged: bool) -> None:
    """Copies the checkpoint of a trial to the workdir itself. averaged: the trial also has a moving average."""
    chosen = workdir / trial.folder
    note = workdir / BEST_FILE
    step = distributed.broadcast_from_primary(selected_step(chosen) or 0)
    content = {"run": trial.folder, "step": step}
    if distributed.broadcast_from_primary(note.exists() and json.loads(note.read_text(encoding="utf-8")) == content):
        return
    if distributed.is_primary():
        # The process may be killed at any point from here on. The note is removed first and written last, so that it
        # never describes another checkpoint. Without config.json, nothing opens the folder as a checkpoint.
        note.unlink(missing_ok=True)
        (workdir / CONFIG_FILE).unlink(missing_ok=True)
        for old in (CHECKPOINTS, "tokenizer"):
            remove_folder(workdir / old)
    distributed.broadcast_from_primary("removed")
    average = read_params(chosen, step, AVERAGE) if averaged else None
    write_params(workdir, step, read_params(chosen, step), average)  # by all processes together
    if distributed.is_primary():
        copy_folder(chosen / "tokenizer", workdir / "tokenizer")
        copy_metrics(chosen, workdir)
        write_config(workdir, read_config(chosen))
        write_json(note, content)
    distributed.broadcast_from_primary("kept")  # the others may open the workdir from here on


def summary(by_seed: Sequence[Metrics]) -> dict[str, dict[str, Any]]:
    """`mean`, `std` (sample standard deviation) and `values` of each metric; None for what is undefined."""
    found = {}
    for name in by_seed[0]:
        values = [metrics[name] for metrics in by_seed]
        known = not any(math.isnan(value) for value in values)
        found[name] = {
            "mean": float(np.mean(values)) if known else None,
            "std": float(np.std(values, ddof=1)) if known and len(values) > 1 else None,
            "values": [None if math.isnan(value) else value for value in values],
        }
    return found


def table(found: Mapping[str, Any]) -> Table:
    """A table of a result: the metrics by seed, next to published figures of another model."""
    seeds, others = found["seeds"], registry.FIGURES.get(found["task"])
    caption = f"another model: published figures of {others.source}" if others else None
    title = f"{found['task']}: {len(seeds)} seed(s)"
    shown = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    columns = ["metric", "mean", "std", *(f"seed {seed}" for seed in seeds)]
    for column in columns + (["another model"] if others else []):
        shown.add_column(column, justify="left" if column == "metric" else "right", no_wrap=column == "metric")
    for name, metric in found["metrics"].items():
        cells = [metric["mean"], metric["std"], *metric["values"], *([others.metrics.get(name)] if others else [])]
        shown.add_row(name, *map(_cell, cells))
    return shown


def comparison(found: Mapping[str, Any]) -> Table:
    """A table of the metric that selects in a sweep, one row for each setting."""
    metric, keys = found["best"]["metric"], list(found["best"]["values"])
    shown = Table(title=f"{found['task']}: {metric} by setting", title_justify="left")
    for column in (*keys, "mean", "std", *(f"seed {seed}" for seed in found["seeds"])):
        shown.add_column(column, justify="right")
    missing = {"mean": None, "std": None, "values": [None] * len(found["seeds"])}
    for setting in found["sweep"]:
        measured = setting["metrics"].get(metric, missing)
        cells = map(_cell, (measured["mean"], measured["std"], *measured["values"]))
        shown.add_row(*map(str, setting["values"].values()), *cells)
    return shown


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def train(
    task: Task, rows: Mapping[str, TaskRows], runs: Mapping[Trial, Run]
) -> tuple[dict[Trial, dict[str, float]], dict[Trial, int], bool]:
    """Trains or resumes all runs, and measures them; rows holds those of each split.

    Returns the final metrics, the step of the parameters that are kept, and whether SIGTERM arrived at the end: start
    nothing more then. Raises what loop.fit raises, and Stopped if SIGTERM arrives before the last run.
    """
    metrics: dict[Trial, dict[str, float]] = {}
    steps: dict[Trial, int] = {}
    stop = False
    for trial, run in runs.items():
        result = loop.fit(run)
        if (stop := result.stop_requested) and trial != list(runs)[-1]:
            raise Stopped(f"SIGTERM: {run.workdir} is complete, later seeds are not; run the same command to resume")
        metrics[trial], steps[trial] = _measured(task, rows, run, result), result.kept
        del result  # its parameters are on the devices, where the next seed needs the memory
    return metrics, steps, stop


def _measured(task: Task, rows: Mapping[str, TaskRows], run: Run, result: Result) -> dict[str, float]:
    """The metrics of dev, from training, and of the other splits except train, measured here."""
    metrics = dict(result.evaluation)
    calibrated = _calibrated(task, run.workdir, metrics if "dev" in rows else {})
    for split in [name for name in rows if name not in ("train", "dev")]:
        of_split = registry.metrics_of(calibrated, split)
        found = measurement.measure(of_split, run.model, run.config, result.params, rows[split])
        metrics |= {f"{measurement.metric_prefix(split)}{name}": value for name, value in found.items()}
    return metrics


def _calibrated(task: Task, folder: Location, metrics: Mapping[str, float]) -> Task:
    """The task with the thresholds that were found on dev; they are also written to config.json of its run."""
    calibrated = task.calibrated(metrics)
    if calibrated != task and distributed.is_primary():
        write_config(folder, dataclasses.replace(read_config(folder), task=to_json(calibrated)))
    return calibrated
