"""The charts of a run's metrics.jsonl, with no more points than a screen can show."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.reporting.chart import Chart, Format, Reference, Series, number, percent
from bert_jax.train.held_out import lower_is_better

Lines = Sequence[Mapping[str, Any]]  # of a metrics.jsonl

TRAINING, HELD_OUT = "training", "held out"
NATS = "nats"
NOTE = "Noisy curves have a bold running mean. Point at a chart to read values."
EXACT = ("learning_rate", "peak_memory_gb")  # without noise, so that a running mean would only blur them
# A chart is some 450 pixels wide; more points than these are averaged in buckets of equal length.
MOST_POINTS = 300
# Noisy curves of more points than this get a running mean over a SMOOTHING-th of the run.
SMOOTHED_ABOVE = 40
SMOOTHING = 25

# The terms in the order in which their charts are shown.
TITLES = {
    "mlm_accuracy": "Masked tokens: accuracy",
    "mlm_loss": "Masked tokens: loss",
    "sbo_accuracy": "Spans from their boundaries: accuracy",
    "sbo_loss": "Spans from their boundaries: loss",
    "lm_accuracy": "Next tokens: accuracy",
    "lm_loss": "Next tokens: loss",
    "forward_lm_accuracy": "Next tokens, forward: accuracy",
    "forward_lm_loss": "Next tokens, forward: loss",
    "backward_lm_accuracy": "Previous tokens, backward: accuracy",
    "backward_lm_loss": "Previous tokens, backward: loss",
    "mdm_accuracy": "Masked diffusion: accuracy",
    "mdm_loss": "Masked diffusion: bound",
    "nsp_accuracy": "Next sentence: accuracy",
    "nsp_loss": "Next sentence: loss",
    "soft_loss": "Predictions of the teacher: difference",
    "hidden_loss": "Hidden states of the teacher: difference",
    "task_accuracy": "Task: accuracy",
    "task_loss": "Task: loss",
    "test_task_loss": "Test: loss",
    "loss": "Loss, all terms",
}


def show_of(metric: str) -> Format:
    """Returns the format of a metric's values: percent for shares of 1; losses and errors are plain numbers."""
    return number if lower_is_better(metric) else percent


def charts(lines: Lines, references: Mapping[str, Reference], loss_unit: str = NATS) -> list[Chart]:
    """Returns the charts of a run, in reading order, without those for which the run logged nothing.

    Values by source, such as eval_wiki/mlm_loss, are not plotted (sources.py has a table of them).

    references  by the name of their metric, such as mlm_accuracy
    """
    names = {name for line in lines for name in line if "/" not in name}
    if sum(name.endswith("_loss") and not name.startswith("eval_") for name in names) == 1:
        names -= {"loss", "eval_loss"}  # a single term: its own chart shows the same
    found: list[Chart] = []
    for name in sorted(names, key=reading_order):
        if name.startswith("eval_") and _training_name(name) in names:
            continue  # in the chart of the training curve
        if (chart := _metric_chart(lines, name, references, loss_unit)) is not None:
            found.append(chart)
    shares = {"time waiting for data": "data_wait_share", "positions of padding": "padding_share"}
    found += [
        _plain_chart(lines, "Learning rate", "", {"learning rate": "learning_rate"}, number),
        _plain_chart(lines, "Gradient norm", "", {"before clipping": "gradient_norm"}, number),
        _plain_chart(lines, "Throughput", "tokens/s", {"real tokens": "tokens_per_second"}, number),
        _plain_chart(lines, "Waste", "", shares, percent),
        _plain_chart(lines, "Model FLOPs utilization", "share of peak", {"MFU": "mfu"}, percent),
        _plain_chart(lines, "Peak memory", "GB", {"fullest device": "peak_memory_gb"}, number),
    ]
    return [chart for chart in found if chart.series]


def _metric_chart(lines: Lines, name: str, references: Mapping[str, Reference], loss_unit: str) -> Chart | None:
    """Returns the chart of a loss, an accuracy or a held-out metric; None for other metrics."""
    is_loss = name.endswith("loss")
    if not (is_loss or name.endswith("accuracy") or name.startswith("eval_")):
        return None
    own = HELD_OUT if name.startswith("eval_") else TRAINING
    series = {own: curve(lines, name, own), HELD_OUT: curve(lines, _held_out_name(lines, name), HELD_OUT)}
    kept = tuple(one for one in series.values() if one is not None)
    if not kept:
        return None
    metric = name.removeprefix("eval_")
    compared = (references[metric],) if metric in references else ()
    unit, show = loss_unit if is_loss else "", show_of(metric)
    return Chart(title_of(metric), unit, kept, show, from_zero=not is_loss, references=compared)


def title_of(metric: str) -> str:
    """Returns the name of a metric in words."""
    return TITLES.get(metric) or re.sub(r"\bf1\b", "F1", metric.replace("_", " ").capitalize())


def reading_order(name: str) -> tuple[int, str]:
    """Returns a sort key for names of metrics: those without a title, then those of TITLES in its order."""
    metric = name.removeprefix("eval_")
    return (list(TITLES).index(metric) if metric in TITLES else -1, name)


def _training_name(held_out: str) -> str:
    """Returns the training metric in the chart of a held-out one. A task's own accuracy is logged as task_accuracy."""
    return "task_accuracy" if held_out == "eval_accuracy" else held_out.removeprefix("eval_")


def _held_out_name(lines: Lines, name: str) -> str:
    if name == "task_accuracy" and any("eval_accuracy" in line for line in lines):
        return "eval_accuracy"
    return name if name.startswith("eval_") else f"eval_{name}"


def _plain_chart(lines: Lines, title: str, unit: str, names: Mapping[str, str], show: Format) -> Chart:
    series = (curve(lines, name, label) for label, name in names.items())
    return Chart(title, unit, tuple(one for one in series if one is not None), show)


def points(lines: Lines, name: str) -> dict[float, float]:
    """Returns the finite values of a metric by step, without the lines that have no value for it."""
    logged = {float(line["step"]): line.get(name) for line in lines}
    return {step: value for step, value in logged.items() if isinstance(value, int | float) and np.isfinite(value)}


def series_of(label: str, values: Mapping[float, float]) -> Series:
    """Returns a curve through values by step."""
    return Series(label, np.array(list(values), np.float64), np.array(list(values.values()), np.float64))


def curve(lines: Lines, name: str, label: str) -> Series | None:
    """Returns a metric by step, thinned and, if it has noise, smoothed for a screen; None if it was never logged."""
    found = points(lines, name)
    if not found:
        return None
    thinned = _thinned(series_of(label, found))
    return thinned if name in EXACT else _smoothed(thinned)


def _thinned(series: Series) -> Series:
    """Returns at most MOST_POINTS points: means of neighbours, at the last step of each bucket."""
    count = len(series.steps)
    if count <= MOST_POINTS:
        return series
    starts = np.linspace(0, count, MOST_POINTS, endpoint=False).astype(int)
    sizes = np.diff(np.append(starts, count))
    return Series(series.name, series.steps[starts + sizes - 1], np.add.reduceat(series.values, starts) / sizes)


def _smoothed(series: Series) -> Series:
    count = len(series.values)
    if count <= SMOOTHED_ABOVE:
        return series
    reach = count // (2 * SMOOTHING)
    sums = np.concatenate([[0.0], np.cumsum(series.values)])
    first = np.maximum(np.arange(count) - reach, 0)
    last = np.minimum(np.arange(count) + reach + 1, count)
    return dataclasses.replace(series, trend=(sums[last] - sums[first]) / (last - first))
