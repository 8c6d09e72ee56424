"""Charts of several runs of one fine-tuning, which differ in the seed or in seed and learning rate."""

from collections.abc import Mapping

import numpy as np

from bert_jax.reporting.chart import Chart, Series
from bert_jax.reporting.curves import NATS, Lines, points, series_of, show_of, title_of
from bert_jax.storage.location import Location
from bert_jax.train.held_out import is_threshold
from bert_jax.train.metrics import read_metrics

COLOURS = 4  # of reporting/page.css: of more runs the mean, the highest and the lowest are shown


def read_runs(workdir: Location) -> dict[str, Lines]:
    """Returns the metrics of each run, by its name: `seed 0`, or `rate 5e-05, seed 0`; none for a run of one seed."""
    found: dict[str, Lines] = {}
    for pattern in ("seed-*", "rate-*/seed-*"):
        for path in sorted(workdir.glob(pattern), key=lambda path: _order(path, workdir)):
            parts = path.relative_to(workdir).parts
            if lines := read_metrics(path):
                found[", ".join(part.replace("-", " ", 1) for part in parts)] = lines
    return found


def seed_charts(runs: Mapping[str, Lines], loss_unit: str = NATS) -> list[Chart]:
    """Returns charts of the held-out metrics and of the training loss, with a curve for each run, or their range."""
    names = list(dict.fromkeys(name for lines in runs.values() for line in lines for name in line))
    wanted = [name for name in names if name.startswith("eval_") and not is_threshold(name)]
    wanted += ["task_loss"] * ("task_loss" in names)
    charts = []
    for name in sorted(wanted, key=lambda name: (name.endswith("loss"), name == "task_loss", name)):
        found = {run: values for run, lines in runs.items() if (values := points(lines, name))}
        if not found:
            continue
        loss = name.endswith("loss")
        title = "Training loss" if name == "task_loss" else f"{title_of(name.removeprefix('eval_'))}, held out"
        several = tuple(series_of(run, values) for run, values in found.items())
        alike = len(several) > COLOURS and set.intersection(*map(set, found.values()))
        kept = _range(found) if alike else several[:COLOURS]  # runs with a time budget may have no step in common
        charts.append(Chart(title, loss_unit if loss else "", kept, show_of(name), from_zero=False))
    return charts


def _range(found: Mapping[str, Mapping[float, float]]) -> tuple[Series, ...]:
    """Returns the mean, the highest and the lowest value of the runs at the steps that all of them logged."""
    steps = sorted(set.intersection(*map(set, found.values())))
    values = np.array([[run[step] for step in steps] for run in found.values()])
    at = np.array(steps, np.float64)
    return (
        Series(f"mean of {len(found)} runs", at, values.mean(axis=0)),
        Series("highest", at, values.max(axis=0)),
        Series("lowest", at, values.min(axis=0)),
    )


def _order(path: Location, workdir: Location) -> list[tuple[float, str]]:
    """Returns a sort key that orders numbers in names by their value."""
    keys = []
    for part in path.relative_to(workdir).parts:
        _, _, value = part.partition("-")
        try:
            keys.append((float(value), part))
        except ValueError:
            keys.append((float("inf"), part))
    return keys
