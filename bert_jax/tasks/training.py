"""Trains the runs of a fine-tuning, one after another, and measures each."""

import dataclasses
from collections.abc import Mapping

from bert_jax.command import Stopped
from bert_jax.storage.location import Location
from bert_jax.tasks import measurement, registry
from bert_jax.tasks.example import TaskRows
from bert_jax.tasks.sweep import Trial
from bert_jax.tasks.task import Task
from bert_jax.tasks.task_json import to_json
from bert_jax.train import distributed, loop
from bert_jax.train.run import Result, Run
from bert_jax.train.workdir import read_config, write_config


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
