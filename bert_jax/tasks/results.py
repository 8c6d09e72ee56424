"""The result of a fine-tuning over its trials: statistics of the metrics, tables, and the checkpoint of the best."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from bert_jax.storage.location import Location, copy_folder, remove_folder, write_json
from bert_jax.tasks import published
from bert_jax.tasks.sweep import Trial
from bert_jax.train import distributed
from bert_jax.train.early_stop import selected_step
from bert_jax.train.held_out import lower_is_better
from bert_jax.train.metrics import copy_metrics
from bert_jax.train.orbax_io import AVERAGE
from bert_jax.train.workdir import CHECKPOINTS, CONFIG_FILE, read_config, read_params, write_config, write_params

BEST_FILE = "best_seed.json"

Metrics = Mapping[str, float]


def result(
    task: str, chosen_by: str, by_trial: Mapping[Trial, Metrics], steps: Mapping[Trial, int], counts: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of result.json: task, seeds, metrics {name: {mean, std, values}}, steps, counts, and best of several.

    In a sweep, metrics are those of the learning rate with the best mean over its seeds, and learning_rates holds those
    of every rate. chosen_by is the dev metric that decides; steps are the steps of the parameters that are kept.
    """
    by_rate: dict[float, list[Trial]] = {}
    for trial in by_trial:
        by_rate.setdefault(trial.learning_rate, []).append(trial)
    summaries = {
        rate: {
            "metrics": summary([by_trial[trial] for trial in trials]),
            "steps": [steps[trial] for trial in trials],
        }
        for rate, trials in by_rate.items()
    }
    # The rate with the best mean over its seeds, so that one lucky seed does not choose it.
    rate = best(by_trial, chosen_by).learning_rate
    found: dict[str, Any] = {
        "task": task,
        "seeds": [trial.seed for trial in by_rate[rate]],
        **summaries[rate],
        "counts": dict(counts),
    }
    if len(by_trial) > 1:
        trial = best(by_trial, chosen_by)
        value = by_trial[trial].get(chosen_by, math.nan)
        found["best"] = {
            "seed": trial.seed,
            "learning_rate": trial.learning_rate,
            "run": trial.folder,
            "metric": chosen_by,
            "value": None if math.isnan(value) else value,
        }
    if len(by_rate) > 1:
        found["learning_rates"] = [{"learning_rate": each, **figures} for each, figures in summaries.items()]
    return found


def best(by_trial: Mapping[Trial, Metrics], chosen_by: str) -> Trial:
    """The best trial of the learning rate with the best mean over its seeds; the first one if nothing was measured."""
    by_rate: dict[float, dict[Trial, float]] = {}
    for trial, metrics in by_trial.items():
        by_rate.setdefault(trial.learning_rate, {})[trial] = _score(metrics, chosen_by)
    scores = max(by_rate.values(), key=lambda scores: sum(scores.values()) / len(scores))
    return max(scores, key=scores.__getitem__)


def _score(metrics: Metrics, name: str) -> float:
    value = metrics.get(name, math.nan)
    if math.isnan(value):
        return -math.inf
    return -value if lower_is_better(name) else value


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


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Tables of a result: the metrics by seed, next to published figures of another model; and a sweep by rate."""
    seeds, others = found["seeds"], published.FIGURES.get(found["task"])
    title = f"{found['task']}: {len(seeds)} seed(s)"
    if "learning_rates" in found:
        title += f" at learning rate {found['best']['learning_rate']:g}"
    caption = f"another model: published figures of {others.source}" if others else None
    shown = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    columns = ["metric", "mean", "deviation", *(f"seed {seed}" for seed in seeds)]
    for column in columns + (["another model"] if others else []):
        shown.add_column(column, justify="left" if column == "metric" else "right", no_wrap=column == "metric")
    for name, metric in found["metrics"].items():
        cells = [metric["mean"], metric["std"], *metric["values"], *([others.metrics.get(name)] if others else [])]
        shown.add_row(name, *map(cell, cells))
    if "learning_rates" not in found:
        return [shown]
    name = found["best"]["metric"]
    sweep = Table(title=f"{found['task']}: {name} by learning rate", title_justify="left")
    for column in ("learning rate", "mean", "deviation", *(f"seed {seed}" for seed in seeds)):
        sweep.add_column(column, justify="right")
    for each in found["learning_rates"]:
        metric = each["metrics"].get(name, {"mean": None, "std": None, "values": [None] * len(seeds)})
        sweep.add_row(f"{each['learning_rate']:g}", *map(cell, (metric["mean"], metric["std"], *metric["values"])))
    return [sweep, shown]


def cell(value: float | None) -> str:
    """A figure in a table; - for none."""
    return "-" if value is None else f"{value:.4f}"
