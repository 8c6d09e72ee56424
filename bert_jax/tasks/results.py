"""What came of the trials of a task: mean, deviation, each; the best of them, which the workdir opens as."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bert_jax.storage.local import write_json
from bert_jax.tasks import published
from bert_jax.tasks.sweep import Trial
from bert_jax.train import distributed
from bert_jax.train.early_stop import selected_step
from bert_jax.train.held_out import lower_is_better
from bert_jax.train.integrity import AVERAGE
from bert_jax.train.metrics import METRICS_FILE
from bert_jax.train.workdir import CHECKPOINTS, CONFIG_FILE, read_config, read_params, write_config, write_params

BEST_FILE = "best_seed.json"

Metrics = Mapping[str, float]


def result(
    task: str, chosen_by: str, by_trial: Mapping[Trial, Metrics], steps: Mapping[Trial, int], counts: Mapping[str, Any]
) -> dict[str, Any]:
    """What result.json holds: task, seeds, metrics {name: {mean, std, values}}, steps, counts, and of several the best.

    Of a sweep, metrics are those of the best rate, by the mean over its seeds, and learning_rates has those of each.
    chosen_by is the dev metric that chooses; steps are those that the parameters kept are of.
    """
    rates = list(dict.fromkeys(trial.learning_rate for trial in by_trial))
    of = {rate: [trial for trial in by_trial if trial.learning_rate == rate] for rate in rates}
    rate = best_rate(by_trial, chosen_by)

    def summed_up(trials: Sequence[Trial]) -> dict[str, Any]:
        return {
            "metrics": _summary([by_trial[trial] for trial in trials]),
            "steps": [steps[trial] for trial in trials],
        }

    found: dict[str, Any] = {
        "task": task,
        "seeds": [trial.seed for trial in of[rate]],
        **summed_up(of[rate]),
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
    if len(rates) > 1:
        found["learning_rates"] = [{"learning_rate": each, **summed_up(of[each])} for each in rates]
    return found


def best_rate(by_trial: Mapping[Trial, Metrics], chosen_by: str) -> float:
    """The learning rate with the best mean over its seeds; the first where nothing was measured."""
    scores: dict[float, list[float]] = {}
    for trial, metrics in by_trial.items():
        scores.setdefault(trial.learning_rate, []).append(_score(metrics, chosen_by))
    return max(scores, key=lambda rate: sum(scores[rate]) / len(scores[rate]))


def best(by_trial: Mapping[Trial, Metrics], chosen_by: str) -> Trial:
    """The best trial of the best rate; the first where nothing was measured."""
    rate = best_rate(by_trial, chosen_by)
    return max(
        (trial for trial in by_trial if trial.learning_rate == rate),
        key=lambda trial: _score(by_trial[trial], chosen_by),
    )


def _score(metrics: Metrics, name: str) -> float:
    value = metrics.get(name, math.nan)
    if math.isnan(value):
        return -math.inf
    return -value if lower_is_better(name) else value


def keep_best(workdir: Path, trial: Trial, averaged: bool) -> None:
    """Makes the workdir open as that trial; averaged says whether it has a moving average, too."""
    chosen = workdir / trial.folder
    note = workdir / BEST_FILE
    step = selected_step(chosen) or 0
    said = {"run": trial.folder, "step": step}
    if distributed.broadcast_from_primary(note.exists() and json.loads(note.read_text(encoding="utf-8")) == said):
        return
    if distributed.is_primary():
        note.unlink(missing_ok=True)  # of what is removed now, for we may be killed before another is there
        (workdir / CONFIG_FILE).unlink(missing_ok=True)  # comes last: without it nobody opens the folder
        for old in (CHECKPOINTS, "tokenizer"):
            shutil.rmtree(workdir / old, ignore_errors=True)
    distributed.broadcast_from_primary("removed")
    average = read_params(chosen, step, AVERAGE) if averaged else None
    write_params(workdir, step, read_params(chosen, step), average)  # by all processes together
    if distributed.is_primary():
        shutil.copytree(chosen / "tokenizer", workdir / "tokenizer")
        shutil.copy(chosen / METRICS_FILE, workdir / METRICS_FILE)
        write_config(workdir, read_config(chosen))
        write_json(note, said)


def _summary(by_seed: Sequence[Metrics]) -> dict[str, dict[str, Any]]:
    """Mean, sample deviation and values of each metric; None for what is undefined."""
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
    """The result to be shown: of the seeds, beside another model's published figures, and of the rates of a sweep."""
    seeds, others = found["seeds"], published.FIGURES.get(found["task"], {})
    title = f"{found['task']}: {len(seeds)} seed(s)"
    if "learning_rates" in found:
        title += f" at learning rate {found['best']['learning_rate']:g}"
    caption = f"another model: published figures of {published.MODEL}" if others else None
    shown = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    columns = ["metric", "mean", "deviation", *(f"seed {seed}" for seed in seeds)]
    for column in columns + (["another model"] if others else []):
        shown.add_column(column, justify="left" if column == "metric" else "right")
    for name, metric in found["metrics"].items():
        cells = [metric["mean"], metric["std"], *metric["values"], *([others.get(name)] if others else [])]
        shown.add_row(name, *map(_cell, cells))
    if "learning_rates" not in found:
        return [shown]
    name = found["best"]["metric"]
    sweep = Table(title=f"{found['task']}: {name} by learning rate", title_justify="left")
    for column in ("learning rate", "mean", "deviation", *(f"seed {seed}" for seed in seeds)):
        sweep.add_column(column, justify="right")
    for each in found["learning_rates"]:
        metric = each["metrics"].get(name, {"mean": None, "std": None, "values": [None] * len(seeds)})
        sweep.add_row(f"{each['learning_rate']:g}", *map(_cell, (metric["mean"], metric["std"], *metric["values"])))
    return [sweep, shown]


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
