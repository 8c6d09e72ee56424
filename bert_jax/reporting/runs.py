"""The recorded runs of a report: what a workdir holds, its curves, several seeds, and several runs side by side.

`read_run` reads a workdir. `charts`, `seed_charts` and `source_section` are parts of the report of one run, and
`comparison` is the page about several.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bert_jax.errors import UserError
from bert_jax.reporting.document import (
    Chart,
    Charts,
    Document,
    Format,
    Reference,
    Section,
    Series,
    Table,
    flat_settings,
    number,
    percent,
)
from bert_jax.storage.location import Location, check_access
from bert_jax.train.evaluation import PREFIX, is_threshold, lower_is_better
from bert_jax.train.metrics import METRICS_FILE, duration, read_metrics
from bert_jax.train.run import RESULT_FILE
from bert_jax.train.workdir import WorkdirConfig, read_config

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

COLOURS = 4  # of page.css for the seeds of a run: of more seeds the mean, the highest and the lowest are shown
MOST_RUNS = 8  # of a comparison: the colours of page.css
EPOCHS = "epochs/"
NONE = "-"


@dataclass(frozen=True)
class RecordedRun:
    """What a workdir holds; result is None for a run that has not finished."""

    workdir: Location
    config: WorkdirConfig
    lines: list[dict[str, Any]]
    result: dict[str, Any] | None

    @property
    def loss_unit(self) -> str:
        """The unit of losses: mean squared errors for regression tasks, cross-entropies for all others."""
        return "squared error" if (self.config.task or {}).get("kind", "").endswith("regression") else NATS

    @property
    def kind(self) -> str:
        """Pretraining, or fine-tuning on which task."""
        if self.config.kind == "pretraining":
            return "Pretraining"
        name = (self.config.task or {}).get("name")
        return "Fine-tuning on files of your own" if name == "own" else f"Fine-tuning on {name}"

    def latest(self, name: str) -> float | None:
        """Returns a metric of the result, or the last logged value."""
        final = (self.result or {}).get(name)
        if final is not None:
            return final
        return next((line[name] for line in reversed(self.lines) if line.get(name) is not None), None)

    def settings(self) -> dict[str, Mapping[str, Any]]:
        """Returns the configuration in groups: the model, the task, and the training keys by their groups."""
        training = dict(self.config.training)
        groups = {name: training.pop(name) for name in list(training) if isinstance(training[name], Mapping)}
        groups = {f"config.{name}": values for name, values in groups.items()}
        heads = {f"head {name}": value for name, value in self.config.heads.to_json().items()}
        return {
            "model": {**asdict(self.config.model), **heads},
            "task": dict(self.config.task or {}),
            "config": training,
            **groups,
        }


def read_run(workdir: Location) -> RecordedRun:
    """Reads a workdir. Raises UserError for another folder, and for a run that has logged nothing yet."""
    check_access(workdir)
    if not workdir.is_dir():
        raise UserError(f"no workdir at {workdir}; name the --workdir of a pretraining or fine-tuning run")
    config = read_config(workdir)
    lines = read_metrics(workdir)
    if not lines:
        raise UserError(f"{workdir / METRICS_FILE} has no lines yet; the run logs its first after log_every steps")
    try:
        result = json.loads((workdir / RESULT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        result = None
    except ValueError as error:
        raise UserError(f"{workdir / RESULT_FILE} is not JSON ({error}); run the training command again") from error
    return RecordedRun(workdir, config, lines, result)


def show_of(metric: str) -> Format:
    """Returns the format of a metric's values: percent for shares of 1; losses and errors are plain numbers."""
    return number if lower_is_better(metric) else percent


def charts(lines: Lines, references: Mapping[str, Reference], loss_unit: str = NATS) -> list[Chart]:
    """Returns the charts of a run, in reading order, without those for which the run logged nothing.

    Values by source, such as eval_wiki/mlm_loss, are not plotted (source_section has a table of them).

    references  by the name of their metric, such as mlm_accuracy
    """
    names = {name for line in lines for name in line if "/" not in name}
    if sum(name.endswith("_loss") and not name.startswith("eval_") for name in names) == 1:
        names -= {"loss", "eval_loss"}  # a single term: its own chart shows the same
    shown: list[Chart] = []
    for name in sorted(names, key=reading_order):
        # A held-out curve is in the chart of its training curve; a task's own accuracy is logged as task_accuracy.
        trained = "task_accuracy" if name == "eval_accuracy" else name.removeprefix("eval_")
        if name.startswith("eval_") and trained in names:
            continue
        if (chart := _metric_chart(lines, name, references, loss_unit)) is not None:
            shown.append(chart)
    shares = {"time waiting for data": "data_wait_share", "positions of padding": "padding_share"}
    shown += [
        _plain_chart(lines, "Learning rate", "", {"learning rate": "learning_rate"}, number),
        _plain_chart(lines, "Gradient norm", "", {"before clipping": "gradient_norm"}, number),
        _plain_chart(lines, "Throughput", "tokens/s", {"real tokens": "tokens_per_second"}, number),
        _plain_chart(lines, "Waste", "", shares, percent),
        _plain_chart(lines, "Model FLOPs utilization", "share of peak", {"MFU": "mfu"}, percent),
        _plain_chart(lines, "Peak memory", "GB", {"fullest device": "peak_memory_gb"}, number),
    ]
    return [chart for chart in shown if chart.series]


def _metric_chart(lines: Lines, name: str, references: Mapping[str, Reference], loss_unit: str) -> Chart | None:
    """Returns the chart of a loss, an accuracy or a held-out metric; None for other metrics."""
    is_loss = name.endswith("loss")
    if not (is_loss or name.endswith("accuracy") or name.startswith("eval_")):
        return None
    own = HELD_OUT if name.startswith("eval_") else TRAINING
    held_out = name if name.startswith("eval_") else f"eval_{name}"
    if name == "task_accuracy" and any("eval_accuracy" in line for line in lines):
        held_out = "eval_accuracy"
    curves = {own: curve(lines, name, own), HELD_OUT: curve(lines, held_out, HELD_OUT)}
    series = tuple(filter(None, curves.values()))
    if not series:
        return None
    metric = name.removeprefix("eval_")
    compared = (references[metric],) if metric in references else ()
    unit, show = loss_unit if is_loss else "", show_of(metric)
    return Chart(title_of(metric), unit, series, show, from_zero=not is_loss, references=compared)


def title_of(metric: str) -> str:
    """Returns the name of a metric in words."""
    return TITLES.get(metric) or re.sub(r"\bf1\b", "F1", metric.replace("_", " ").capitalize())


def reading_order(name: str) -> tuple[int, str]:
    """Returns a sort key for names of metrics: those without a title, then those of TITLES in its order."""
    metric = name.removeprefix("eval_")
    return (list(TITLES).index(metric) if metric in TITLES else -1, name)


def _plain_chart(lines: Lines, title: str, unit: str, names: Mapping[str, str], show: Format) -> Chart:
    series = (curve(lines, name, label) for label, name in names.items())
    return Chart(title, unit, tuple(filter(None, series)), show)


def points(lines: Lines, name: str) -> dict[float, float]:
    """Returns the finite values of a metric by step, without the lines that have no value for it."""
    logged = {float(line["step"]): line.get(name) for line in lines}
    return {step: value for step, value in logged.items() if isinstance(value, int | float) and np.isfinite(value)}


def series_of(label: str, values: Mapping[float, float]) -> Series:
    """Returns a curve through values by step."""
    return Series(label, np.array(list(values), np.float64), np.array(list(values.values()), np.float64))


def curve(lines: Lines, name: str, label: str) -> Series | None:
    """Returns a metric by step, thinned and, if it has noise, smoothed for a screen; None if it was never logged."""
    values = points(lines, name)
    if not values:
        return None
    thinned = _thinned(series_of(label, values))
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


def read_runs(workdir: Location) -> dict[str, Lines]:
    """Returns the metrics of each run, by its name: `seed 0`, or `rate 5e-05, seed 0`; none for a run of one seed."""
    logs: dict[str, Lines] = {}
    for pattern in ("seed-*", "rate-*/seed-*"):
        for path in sorted(workdir.glob(pattern), key=lambda path: _order(path, workdir)):
            parts = path.relative_to(workdir).parts
            if lines := read_metrics(path):
                logs[", ".join(part.replace("-", " ", 1) for part in parts)] = lines
    return logs


def seed_charts(runs: Mapping[str, Lines], loss_unit: str = NATS) -> list[Chart]:
    """Returns charts of the held-out metrics and of the training loss, with a curve for each run, or their range."""
    names = list(dict.fromkeys(name for lines in runs.values() for line in lines for name in line))
    wanted = [name for name in names if name.startswith("eval_") and not is_threshold(name)]
    wanted += ["task_loss"] * ("task_loss" in names)
    charts = []
    for name in sorted(wanted, key=lambda name: (name.endswith("loss"), name == "task_loss", name)):
        curves = {run: values for run, lines in runs.items() if (values := points(lines, name))}
        if not curves:
            continue
        loss = name.endswith("loss")
        title = "Training loss" if name == "task_loss" else f"{title_of(name.removeprefix('eval_'))}, held out"
        several = tuple(series_of(run, values) for run, values in curves.items())
        # Runs with a time budget may have no step in common.
        alike = len(several) > COLOURS and set.intersection(*map(set, curves.values()))
        shown = _range(curves) if alike else several[:COLOURS]
        charts.append(Chart(title, loss_unit if loss else "", shown, show_of(name), from_zero=False))
    return charts


def _range(curves: Mapping[str, Mapping[float, float]]) -> tuple[Series, ...]:
    """Returns the mean, the highest and the lowest value of the runs at the steps that all of them logged."""
    steps = sorted(set.intersection(*map(set, curves.values())))
    values = np.array([[run[step] for step in steps] for run in curves.values()])
    at = np.array(steps, np.float64)
    return (
        Series(f"mean of {len(curves)} runs", at, values.mean(axis=0)),
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


def source_section(lines: Lines) -> Section:
    """A row for each source, with the epochs and metrics that were logged last; empty for a run without a mixture."""
    logged: dict[str, float] = {}
    for line in lines:
        logged |= {name: value for name, value in line.items() if "/" in name and value is not None}
    sources = [name.removeprefix(EPOCHS) for name in logged if name.startswith(EPOCHS)]
    scores = {name.removeprefix(PREFIX): value for name, value in logged.items() if name.startswith(PREFIX)}
    metrics = list(dict.fromkeys(name.partition("/")[2] for name in scores))
    if not sources:
        return Section("Sources of the mixture")
    rows = [
        [
            source,
            number(logged[EPOCHS + source]),
            *(show_of(name)(scores[f"{source}/{name}"]) if f"{source}/{name}" in scores else "-" for name in metrics),
        ]
        for source in sources
    ]
    note = "Epochs that were read of the training rows, and metrics of the held-out rows, as they were last logged."
    return Section("Sources of the mixture", [Table(["source", "epochs", *map(title_of, metrics)], [rows])], note)


def comparison(runs: Sequence[RecordedRun]) -> Document:
    """Returns the page. Raises UserError for too few or many runs, a run named twice, and runs of two kinds."""
    if not 2 <= len(runs) <= MOST_RUNS:
        raise UserError(f"{len(runs)} runs; a comparison has 2 to {MOST_RUNS}. Name fewer WORKDIRs")
    names = short_names([str(run.workdir) for run in runs])
    for run in runs[1:]:
        if run.config.kind != runs[0].config.kind:
            raise UserError(
                f"{runs[0].workdir} is {runs[0].kind.lower()} and {run.workdir} is {run.kind.lower()}; compare runs of "
                "one kind"
            )
    named = dict(zip(names, runs, strict=True))
    unfinished = [name for name, run in named.items() if run.result is None]
    differences = different_settings(named)
    note = "The other keys of model, task and configuration are equal." if differences else "All keys are equal."
    return Document(
        title=f"Comparison of {len(runs)} runs",
        program="bert-jax report",
        source=", ".join(str(run.workdir) for run in runs),
        lines=list(dict.fromkeys(run.kind for run in runs)),
        warning=f"Not finished, shown so far: {', '.join(unfinished)}." if unfinished else "",
        sections=[
            Section("Results", [Table(["figure", *names], result_rows(named))], "The last value of each run."),
            Section("Curves", [Charts(shared_charts(named))], NOTE),
            Section("What differs", [Table(["key", *names], [differences], words=True)] if differences else [], note),
        ],
    )


def short_names(workdirs: Sequence[str]) -> list[str]:
    """Returns the shortest last parts of the paths that tell them apart. Raises UserError for a path given twice."""
    if len(set(workdirs)) < len(workdirs):
        twice = next(path for path in workdirs if workdirs.count(path) > 1)
        raise UserError(f"{twice} is named twice; name different runs")
    parts = [path.rstrip("/").split("/") for path in workdirs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-depth:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return list(workdirs)


def result_rows(runs: Mapping[str, RecordedRun]) -> list[list[list[str]]]:
    """Returns the effort and the held-out metrics of each run, in two groups of rows; one column for each run."""

    def row(title: str, values: Sequence[str | None]) -> list[str]:
        return [title, *(value or NONE for value in values)]

    def of_result(name: str) -> list[float | int | None]:
        return [(run.result or {}).get(name) for run in runs.values()]

    rates = [
        [line["tokens_per_second"] for line in run.lines if line.get("tokens_per_second")] for run in runs.values()
    ]
    effort = [
        row("steps", [f"{run.lines[-1]['step']:,}" for run in runs.values()]),
        row("tokens", [None if value is None else number(float(value)) for value in of_result("tokens")]),
        row("training time", [None if value is None else duration(float(value)) for value in of_result("seconds")]),
        row("tokens/s, median", [number(float(np.median(each))) if each else None for each in rates]),
    ]
    metrics = [_metrics(run) for run in runs.values()]
    names = dict.fromkeys(name for values in metrics for name in values)
    scores = [row(name, [values.get(name) for values in metrics]) for name in names]
    return [[line for line in effort if set(line[1:]) != {NONE}], scores]


def _metrics(run: RecordedRun) -> dict[str, str]:
    """Returns the held-out metrics of a run as text: of fine-tuning with the deviation over seeds."""
    if (run.result or {}).get("metrics"):
        return {
            name: f"{metric['mean']:.4f}" + ("" if metric["std"] is None else f" ± {metric['std']:.4f}")
            for name, metric in run.result["metrics"].items()  # type: ignore[index]
            if metric["mean"] is not None and not is_threshold(name)
        }
    logged = dict.fromkeys(name for line in run.lines for name in line if name.startswith("eval_") and "/" not in name)
    values = {name: run.latest(name) for name in sorted(logged, key=reading_order)}
    return {name.removeprefix("eval_"): f"{value:.4f}" for name, value in values.items() if value is not None}


def shared_charts(runs: Mapping[str, RecordedRun]) -> list[Chart]:
    """Returns a chart of each held-out metric, of losses that are not held out, of learning rate and throughput."""
    logged = dict.fromkeys(name for run in runs.values() for line in run.lines for name in line if "/" not in name)
    held_out = sorted((name for name in logged if name.startswith("eval_")), key=reading_order)
    losses = [name for name in logged if name.endswith("loss") and not {name, f"eval_{name}"} & set(held_out)]
    units = {run.loss_unit for run in runs.values()}
    shared = []
    for name in (*held_out, *losses, "learning_rate", "tokens_per_second"):
        curves = [curve(run.lines, name, label) for label, run in runs.items()]
        # A run has the same colour in all charts, also where another run has no curve.
        series = tuple(dataclasses.replace(each, colour=index) for index, each in enumerate(curves) if each)
        metric, is_loss = name.removeprefix("eval_"), name.endswith("loss")
        unit = " or ".join(sorted(units)) if is_loss else ""
        title = {"learning_rate": "Learning rate", "tokens_per_second": "Tokens per second"}.get(name)
        title = title or f"{title_of(metric)}, {'held out' if name in held_out else 'training'}"
        show = number if name in ("learning_rate", "tokens_per_second") else show_of(metric)
        shared.append(Chart(title, unit, series, show, from_zero=not is_loss))
    return [chart for chart in shared if chart.series]


def different_settings(runs: Mapping[str, RecordedRun]) -> list[list[str]]:
    """Returns a row for each key of model, task and configuration whose values differ between the runs."""
    flat = [flat_settings(run.settings()) for run in runs.values()]
    known = {key for each in flat for key in each}
    # What a recipe says of the architecture is in the model as it was made.
    repeated = {key for key in known if key.startswith("config.model.") and key.removeprefix("config.") in known}
    keys = [key for key in dict.fromkeys(key for each in flat for key in each) if key not in repeated]
    rows = []
    for key in keys:
        # The prefix of the configuration tells its keys from those of the model and the task as they were made.
        short = key.removeprefix("config.")
        rows.append([key if short in known else short, *(each.get(key, NONE) for each in flat)])
    return [row for row in rows if len(set(row[1:])) > 1]
