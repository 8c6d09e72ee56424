"""The trials of a fine-tuning, one for each seed.

In order: a configuration's trials and their settings, their common result, the copy of the best one, and `train`, which
trains and measures them one after another.
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
from bert_jax.train.run_record import copy_starts
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
# Where a workdir holds config.json, by its kind: one seed, several seeds, a sweep.
_CONFIGS = ("config.json", "seed-*/config.json", "sweep-*")
BEST_FILE = "best_seed.json"

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Trial:
    """One run: its seed, and its folder in the workdir (empty: the workdir itself)."""

    seed: int
    folder: str = ""


def list_trials(config: FinetuneConfig) -> list[Trial]:
    """Returns the trials of a configuration by seed. Raises UserError for invalid or repeated seeds."""
    seeds = config.seeds
    too_many = isinstance(seeds, int) and seeds > MOST_SEEDS
    if isinstance(seeds, int) and not too_many:
        seeds = tuple(range(config.seed, config.seed + seeds))
    if (
        isinstance(seeds, int)
        or not seeds
        or len({*seeds}) < len(seeds)
        or not all(0 <= seed < SEEDS for seed in seeds)
    ):
        raise UserError(
            f"seeds is {config.seeds}; give the number of seeds, at most {MOST_SEEDS}, such as --config.seeds=5, or "
            f"several different seeds from 0 to {SEEDS - 1}, such as --config.seeds=0,1,2. --config.seed=SEED trains "
            "with a single seed"
        )
    return [Trial(seed, f"seed-{seed}" if len(seeds) > 1 else "") for seed in seeds]


def check_workdir(config: FinetuneConfig, workdir: Location) -> None:
    """Raises UserError if a workdir holds another kind of trials."""
    kinds = ("a run of one seed", "runs of several seeds", "a sweep")
    wanted = 2 if config.sweep else int(len(list_trials(config)) > 1)
    # The last kind that is there decides, because WORKDIR/config.json may also belong to the best of several runs.
    present = next((kind for kind in (2, 1, 0) if any(workdir.glob(_CONFIGS[kind]))), wanted)
    if present != wanted:
        others = ("", ", or give all of their seeds", ", or give the sweep")[present]
        raise UserError(f"{workdir} holds {kinds[present]}. Name another --workdir for {kinds[wanted]}{others}")


def chosen_by(config: FinetuneConfig, task: Task) -> str:
    """Returns the dev metric that selects the seed: checkpoint.best, or the task's first.

    With early_stop it also selects the step of a run, which otherwise is the last one.
    """
    return config.checkpoint.best.removeprefix(PREFIX) or task.metrics[0]


def settings(config: FinetuneConfig, trial: Trial, task: Task, rows: int, measured: bool) -> FinetuneConfig:
    """Returns a trial's configuration, as if it were run alone, with length, warmup, pools and evaluation in steps.

    Args:
        rows: The number of rows in the training file.
        measured: Whether there is a dev file.

    Raises:
        UserError: There is no dev file, which early_stop needs.
    """
    if config.early_stop:
        check_measured("early_stop", config.early_stop, measured)
    # A step has rows of the next epoch rather than fewer rows, so the last step is rounded up.
    epoch = math.ceil(rows / config.batch_size)
    length = config.steps or math.ceil(rows * config.epochs / config.batch_size)
    schedule = config.optimizer.schedule
    warmup, share = schedule.warmup_steps, schedule.warmup_share
    if warmup < 0:
        # With a budget in minutes, the number of steps is not known in advance.
        if share <= 0 and config.budget_minutes > 0:
            share = WARMUP_SHARE
        warmup = 0 if share > 0 else math.ceil(WARMUP_SHARE * length)
    rates: dict[str, int | float] = {**config.optimizer.rates}
    if isinstance(task, TaggingTask) and task.crf:
        rates = {CRF_PATH: task.crf_rate, **rates}  # unless optimizer.rates has one for it
    best = config.checkpoint.best or (PREFIX + chosen_by(config, task) if config.early_stop else "")
    return dataclasses.replace(
        config,
        seed=trial.seed,
        seeds=1,
        # A pool with most of an epoch would have rows of the next one, so that a batch holds the same row twice.
        length_pool=min(config.length_pool or task.length_pool, max(epoch // 4, 1)),
        # A budget in minutes ends the run, unless the number of steps is given too.
        steps=config.steps if config.budget_minutes > 0 else length,
        optimizer=dataclasses.replace(
            config.optimizer,
            schedule=dataclasses.replace(schedule, warmup_steps=warmup, warmup_share=share),
            rates=rates,
        ),
        eval=dataclasses.replace(config.eval, every_steps=config.eval.every_steps or epoch),
        checkpoint=dataclasses.replace(config.checkpoint, best=best),
    )


def check_measured(key: str, value: Any, measured: bool) -> None:
    """Raises UserError for a key that compares evaluations, without a dev file."""
    if not measured:
        raise UserError(
            f"{key}={value}, but there is no dev file to evaluate. Name one with --config.task.dev, hold out a part of "
            f"the training file with --config.task.dev_share=0.1, or omit {key}"
        )


def unfreeze_every(config: FinetuneConfig, rows: int) -> int:
    """Returns the steps between unfreezing one layer and the next with train_layers=gradual; otherwise 0."""
    epochs = rules.gradual_epochs(config.train_layers)
    return 0 if epochs is None else max(1, round(epochs * rows / config.batch_size))


def never_unfrozen(config: FinetuneConfig, rows: int, steps: int, layers: int) -> str:
    """Says which layers train_layers=gradual never trains in so many steps (0: unknown), and a value that fits."""
    every = unfreeze_every(config, rows)
    # Every layer has a stage, and the embeddings have the last one.
    stages = (steps - 1) // every if every and steps else layers + 1
    if stages > layers:
        return ""
    left = f"{layers - stages} of {layers} layers and " if stages < layers else ""
    line = f"train_layers={config.train_layers} leaves {left}the embeddings as they are in {steps} steps"
    if not (fitting := (steps - 1) // (layers + 1)):
        return f"{line}; use more steps"
    epochs = fitting * config.batch_size / rows
    # Rounded down, so that the advice certainly fits; two digits.
    unit = 10.0 ** (math.floor(math.log10(epochs)) - 1)  # two digits, rounded down
    return f"{line}; --config.train_layers=gradual:{math.floor(epochs / unit) * unit:.2g} trains all"


def result(
    task: str, chosen_by: str, by_trial: Mapping[Trial, Metrics], steps: Mapping[Trial, int], counts: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns result.json: task, seeds, metrics {name: {mean, std, values}}, steps, counts, and the best of several.

    Args:
        chosen_by: The dev metric that decides.
        steps: The steps of the parameters that are kept.
    """
    content: dict[str, Any] = {
        "task": task,
        "seeds": [trial.seed for trial in by_trial],
        "metrics": summary(list(by_trial.values())),
        "steps": [steps[trial] for trial in by_trial],
        "counts": dict(counts),
    }
    if len(by_trial) > 1:
        trial = best(by_trial, chosen_by)
        value = _known(by_trial[trial].get(chosen_by, math.nan))
        content["best"] = {"seed": trial.seed, "run": trial.folder, "metric": chosen_by, "value": value}
    return content


def best(by_trial: Mapping[Trial, Metrics], chosen_by: str) -> Trial:
    """Returns the trial with the best value; the first one if nothing was measured."""
    return max(by_trial, key=lambda trial: score(by_trial[trial].get(chosen_by), chosen_by))


def score(value: float | None, metric: str) -> float:
    """Returns a metric's value as a number of which the highest is the best; an undefined one is the worst."""
    if value is None or math.isnan(value):
        return -math.inf
    return -value if lower_is_better(metric) else value


def keep_best(workdir: Location, trial: Trial, averaged: bool) -> None:
    """Copies a trial's checkpoint to the workdir itself. averaged: whether the trial also has a moving average."""
    chosen = workdir / trial.folder
    note = workdir / BEST_FILE
    # All processes take the step that the first one sees, because files may appear later for others.
    step = distributed.broadcast_from_primary(selected_step(chosen) or 0)
    content = {"run": trial.folder, "step": step}
    if distributed.broadcast_from_primary(note.exists() and json.loads(note.read_text(encoding="utf-8")) == content):
        return
    # The process may be killed at any point from here on. The note is removed first and written last, so that it never
    # describes another checkpoint. Without config.json, nothing opens the folder as a checkpoint.
    if distributed.is_primary():
        note.unlink(missing_ok=True)
        (workdir / CONFIG_FILE).unlink(missing_ok=True)
        for old in (CHECKPOINTS, "tokenizer"):
            remove_folder(workdir / old)
    distributed.broadcast_from_primary("removed")
    average = read_params(chosen, step, AVERAGE) if averaged else None
    # All processes write together.
    write_params(workdir, step, read_params(chosen, step), average)
    if distributed.is_primary():
        copy_folder(chosen / "tokenizer", workdir / "tokenizer")
        copy_metrics(chosen, workdir)
        copy_starts(chosen, workdir)
        write_config(workdir, read_config(chosen))
        write_json(note, content)
    # The other processes may open the workdir from here on.
    distributed.broadcast_from_primary("kept")


def summary(by_seed: Sequence[Metrics]) -> dict[str, dict[str, Any]]:
    """Returns `mean`, `std` (sample standard deviation) and `values` by metric; None if undefined."""
    statistics = {}
    for name in by_seed[0]:
        values = [metrics[name] for metrics in by_seed]
        # The mean over the other seeds would not compare with a mean over all of them.
        known = not any(map(math.isnan, values))
        statistics[name] = {
            "mean": float(np.mean(values)) if known else None,
            "std": float(np.std(values, ddof=1)) if known and len(values) > 1 else None,
            "values": [_known(value) for value in values],
        }
    return statistics


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value  # JSON has no NaN


def table(content: Mapping[str, Any]) -> Table:
    """Shows a result's metrics by seed, next to another model's published figures."""
    seeds, others = content["seeds"], registry.FIGURES.get(content["task"])
    caption = f"another model: published figures of {others.source}" if others else None
    title = f"{content['task']}: {len(seeds)} seed(s)"
    shown = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    baseline = content.get("baseline") or {}
    columns = ["metric", "mean", *([baseline["name"]] if baseline else []), "std", *(f"seed {seed}" for seed in seeds)]
    for column in columns + (["another model"] if others else []):
        shown.add_column(column, justify="left" if column == "metric" else "right", no_wrap=column == "metric")
    for name, metric in content["metrics"].items():
        compared = [baseline["metrics"].get(name)] if baseline else []
        cells = [metric["mean"], *compared, metric["std"], *metric["values"]]
        cells += [others.metrics.get(name)] if others else []
        shown.add_row(name, *map(_cell, cells))
    return shown


def comparison(content: Mapping[str, Any]) -> Table:
    """Shows the metric that selects in a sweep by setting."""
    metric, keys = content["best"]["metric"], list(content["best"]["values"])
    shown = Table(title=f"{content['task']}: {metric} by setting", title_justify="left")
    for column in (*keys, "mean", "std", *(f"seed {seed}" for seed in content["seeds"])):
        shown.add_column(column, justify="right")
    missing = {"mean": None, "std": None, "values": [None] * len(content["seeds"])}
    for setting in content["sweep"]:
        measured = setting["metrics"].get(metric, missing)
        cells = map(_cell, (measured["mean"], measured["std"], *measured["values"]))
        shown.add_row(*map(str, setting["values"].values()), *cells)
    return shown


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def train(
    task: Task, rows: Mapping[str, TaskRows], runs: Mapping[Trial, Run]
) -> tuple[dict[Trial, dict[str, float]], dict[Trial, int], str]:
    """Trains or resumes all runs, and measures them.

    Args:
        rows: The rows by split.

    Returns:
        By trial the final metrics and the step of the parameters that are kept, and the signal that arrived at the end:
        start nothing more then.

    Raises:
        Stopped: SIGTERM arrived before the last run, or as in loop.fit.
    """
    metrics: dict[Trial, dict[str, float]] = {}
    steps: dict[Trial, int] = {}
    stop = ""
    for trial, run in runs.items():
        result = loop.fit(run)
        if (stop := result.stopped_by) and trial != list(runs)[-1]:
            raise Stopped(f"{run.workdir} is complete, later seeds are not; run the same command to resume", stop)
        metrics[trial], steps[trial] = _measured(task, rows, run, result), result.kept
        # Its parameters are on the devices, where the next seed needs the memory.
        del result
    return metrics, steps, stop


def _measured(task: Task, rows: Mapping[str, TaskRows], run: Run, result: Result) -> dict[str, float]:
    """Returns the metrics on dev, from training, and on the other splits except train, measured here."""
    metrics = dict(result.evaluation)
    # The thresholds that were found on dev are used for the other splits, and kept with the run.
    calibrated = task.calibrated(metrics if "dev" in rows else {})
    if calibrated != task and distributed.is_primary():
        write_config(run.workdir, dataclasses.replace(read_config(run.workdir), task=to_json(calibrated)))
    for split in [name for name in rows if name not in ("train", "dev")]:
        split_task = registry.with_split_metrics(calibrated, split)
        measured = measurement.measure(split_task, run.model, run.config, result.params, rows[split])
        metrics |= {f"{measurement.metric_prefix(split)}{name}": value for name, value in measured.items()}
    return metrics
