"""Charts of several runs of one fine-tuning, which differ in the seed or in seed and learning rate."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.reporting.chart import Chart, Series
from bert_jax.reporting.curves import NATS, show_of, title_of
from bert_jax.train.metrics import METRICS_FILE, read_metrics

COLOURS = 4  # of reporting/style.py: of more runs the mean, the highest and the lowest are shown

Lines = Sequence[Mapping[str, Any]]


def read_runs(workdir: Path) -> dict[str, Lines]:
    """The metrics of each run, by its name: `seed 0`, or `rate 5e-05, seed 0`; none for a run of one seed."""
    found: dict[str, Lines] = {}
    for pattern in (f"seed-*/{METRICS_FILE}", f"rate-*/seed-*/{METRICS_FILE}"):
        for path in sorted(workdir.glob(pattern), key=lambda path: _order(path, workdir)):
            parts = path.parent.relative_to(workdir).parts
            if lines := read_metrics(path.parent):
                found[", ".join(part.replace("-", " ", 1) for part in parts)] = lines
    return found


def seed_charts(runs: Mapping[str, Lines], loss_unit: str = NATS) -> list[Chart]:
    """A chart of each held-out metric and one of the training loss, with a curve for each run, or their range."""
    names = list(dict.fromkeys(name for lines in runs.values() for line in lines for name in line))
    wanted = [name for name in names if name.startswith("eval_")] + ["task_loss"] * ("task_loss" in names)
    charts = []
    for name in sorted(wanted, key=lambda name: (name.endswith("loss"), name == "task_loss", name)):
        found = {run: _points(lines, name) for run, lines in runs.items()}
        found = {run: points for run, points in found.items() if points}
        if not found:
            continue
        series = [Series(run, *_arrays(points)) for run, points in found.items()]
        loss = name.endswith("loss")
        title = "Training loss" if name == "task_loss" else f"{title_of(name.removeprefix('eval_'))}, held out"
        kept = tuple(series) if len(series) <= COLOURS else _range(found)
        charts.append(Chart(title, loss_unit if loss else "", kept, show_of(name), from_zero=False))
    return charts


def _range(found: Mapping[str, Mapping[float, float]]) -> tuple[Series, ...]:
    """The mean, the highest and the lowest value of the runs at the steps that all of them logged."""
    steps = sorted(set.intersection(*(set(points) for points in found.values())))
    values = np.array([[points[step] for step in steps] for points in found.values()])
    at = np.array(steps, np.float64)
    return (
        Series(f"mean of {len(found)} runs", at, values.mean(axis=0)),
        Series("highest", at, values.max(axis=0)),
        Series("lowest", at, values.min(axis=0)),
    )


def _points(lines: Lines, name: str) -> dict[float, float]:
    values = {float(line["step"]): line.get(name) for line in lines}
    return {
        step: float(value) for step, value in values.items() if isinstance(value, int | float) and np.isfinite(value)
    }


def _arrays(points: Mapping[float, float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(list(points), np.float64), np.array(list(points.values()), np.float64)


def _order(path: Path, workdir: Path) -> list[tuple[float, str]]:
    """A sort key that orders numbers in names by their value."""
    keys = []
    for part in path.parent.relative_to(workdir).parts:
        _, _, value = part.partition("-")
        try:
            keys.append((float(value), part))
        except ValueError:
            keys.append((float("inf"), part))
    return keys
