"""The recorded runs behind a report: their workdirs, their curves, and the page that compares several runs.

`read_run` reads a workdir. `charts`, `seed_charts` and `source_section` are parts of one run's report, and
`comparison` is the page about several runs.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.config import to_dict
from bert_jax.errors import UserError
from bert_jax.reporting.document import (
    Chart,
    Charts,
    Document,
    Format,
    Reference,
    Section,
    Series,
    Settings,
    Table,
    flat_settings,
    number,
    percent,
)
from bert_jax.storage.location import Location, check_access
from bert_jax.train.evaluation import PREFIX, is_threshold, lower_is_better
from bert_jax.train.metrics import METRICS_FILE, duration, read_metrics
from bert_jax.train.run import RESULT_FILE
from bert_jax.train.run_record import read_starts
from bert_jax.train.workdir import WorkdirConfig, read_config

Lines = Sequence[Mapping[str, Any]]  # of a metrics.jsonl

TRAINING, HELD_OUT = "training", "held out"
NATS = "nats"
NOTE = "Noisy curves have a bold running mean. Point at a chart to read values."
# Without noise, so that a running mean would only blur them.
EXACT = ("learning_rate", "peak_memory_gb", "goodput", "checkpoint_seconds")
# A chart is some 450 pixels wide; more points than these are averaged in buckets of equal length.
MOST_POINTS = 300
# Noisy curves of more points than this get a running mean over a SMOOTHING-th of the run.
SMOOTHED_ABOVE = 40
SMOOTHING = 25

# The metrics in the order in which their charts are shown.
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
# The charts after those of the terms: title, unit, metrics by the names of their curves, format.
_OTHER_CHARTS: tuple[tuple[str, str, dict[str, str], Format], ...] = (
    ("Learning rate", "", {"learning rate": "learning_rate"}, number),
    ("Gradient norm", "", {"before clipping": "gradient_norm"}, number),
    ("Throughput", "tokens/s", {"real tokens": "tokens_per_second"}, number),
    ("Waste", "", {"time waiting for data": "data_wait_share", "positions of padding": "padding_share"}, percent),
    ("Goodput", "", {"share of time in steps": "goodput"}, percent),
    ("Time to save", "s", {"from asked to durable": "checkpoint_seconds"}, number),
    ("Model FLOPs utilization", "share of peak", {"MFU": "mfu"}, percent),
    ("Peak memory", "GB", {"fullest device": "peak_memory_gb"}, number),
)

COLOURS = 4  # of page.css for the seeds of a run: of more seeds the mean, the highest and the lowest are shown
MOST_RUNS = 8  # of a comparison: the colours of page.css
EPOCHS = "epochs/"
NONE = "-"


@dataclass(frozen=True)
class RecordedRun:
    """A workdir's content; an unfinished run has no result."""

    workdir: Location
    config: WorkdirConfig
    lines: list[dict[str, Any]]
    result: dict[str, Any] | None
    starts: Sequence[Mapping[str, Any]] = ()  # run.json

    @property
    def loss_unit(self) -> str:
        """The unit of losses: squared errors in regression tasks, cross-entropies in all others."""
        return "squared error" if (self.config.task or {}).get("kind", "").endswith("regression") else NATS

    @property
    def kind(self) -> str:
        """Pretraining, or fine-tuning on a named task."""
        if self.config.kind == "pretraining":
            return "Pretraining"
        name = (self.config.task or {}).get("name")
        return "Fine-tuning on files of your own" if name == "own" else f"Fine-tuning on {name}"

    def latest(self, name: str) -> float | None:
        """Returns a metric from the result, or else its last logged value."""
        final = (self.result or {}).get(name)
        if final is not None:
            return final
        return next((line[name] for line in reversed(self.lines) if line.get(name) is not None), None)

    def effort(self) -> dict[str, str]:
        """Returns steps, tokens, time and speed as text, NONE if unknown."""
        result = self.result or {}
        rates = [line["tokens_per_second"] for line in self.lines if line.get("tokens_per_second")]
        return {
            "Steps": f"{self.lines[-1]['step']:,}",
            "Tokens seen": number(float(result["tokens"])) if "tokens" in result else NONE,
            "Training time": duration(float(result["seconds"])) if "seconds" in result else NONE,
            "Tokens per second, median": number(float(np.median(rates))) if rates else NONE,
        }

    def settings(self) -> dict[str, Mapping[str, Any]]:
        """Returns the configuration in groups: the model, the task, and the training keys by their groups."""
        training = dict(self.config.training)
        groups = {name: training.pop(name) for name in list(training) if isinstance(training[name], Mapping)}
        groups = {f"config.{name}": values for name, values in groups.items()}
        heads = {f"head {name}": value for name, value in self.config.heads.to_json().items()}
        return {
            "model": {**to_dict(self.config.model), **heads},
            "task": dict(self.config.task or {}),
            "config": training,
            **groups,
        }


def read_run(workdir: Location) -> RecordedRun:
    """Reads a workdir.

    Raises:
        UserError: the folder is no workdir, its result is not JSON, or its run has logged nothing yet.
    """
    check_access(workdir)
    if not workdir.is_dir():
        raise UserError(f"no workdir at {workdir}; name the --workdir of a pretraining or fine-tuning run")
    config = read_config(workdir)
    lines = read_metrics(workdir)
    if not lines:
        raise UserError(f"{workdir / METRICS_FILE} has no lines yet; the run logs its first after log_every steps")
    try:
        result = json.loads((workdir / RESULT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:  # the run has not finished
        result = None
    except ValueError as error:
        raise UserError(f"{workdir / RESULT_FILE} is not JSON ({error}); run the training command again") from error
    return RecordedRun(workdir, config, lines, result, read_starts(workdir))


def metric_title(metric: str) -> str:
    """Returns a metric's name in words."""
    return TITLES.get(metric) or re.sub(r"\bf1\b", "F1", metric.replace("_", " ").capitalize())


def metric_format(metric: str) -> Format:
    """Returns the format for a metric's values: percent for shares, plain numbers for losses and errors."""
    return number if lower_is_better(metric) else percent


def reading_order(name: str) -> tuple[int, str]:
    """Returns a sort key for metrics: first those without a title, then those in TITLES, in its order."""
    metric = name.removeprefix(PREFIX)
    return (list(TITLES).index(metric) if metric in TITLES else -1, name)


def charts(lines: Lines, references: Mapping[str, Reference], loss_unit: str = NATS) -> list[Chart]:
    """Returns a run's charts in reading order, without those for which the run logged nothing.

    Values by source, such as eval_wiki/mlm_loss, are not plotted (source_section lists them).

    Args:
        references: levels to compare with, keyed by their metric, e.g. mlm_accuracy.
    """
    names = {name for line in lines for name in line if "/" not in name}
    if sum(name.endswith("_loss") and not name.startswith(PREFIX) for name in names) == 1:
        names -= {"loss", "eval_loss"}  # a single term: its own chart shows the same
    shown = []
    for name in sorted(names, key=reading_order):
        metric, is_loss = name.removeprefix(PREFIX), name.endswith("loss")
        # A held-out curve is in its training curve's chart; a task's own accuracy is logged as task_accuracy.
        if name.startswith(PREFIX):
            if ("task_accuracy" if name == "eval_accuracy" else metric) in names:
                continue
            curves = {HELD_OUT: name}
        elif is_loss or name.endswith("accuracy"):
            held_out = "eval_accuracy" if name == "task_accuracy" and "eval_accuracy" in names else PREFIX + name
            curves = {TRAINING: name, HELD_OUT: held_out}
        else:
            continue
        compared = (references[metric],) if metric in references else ()
        unit = loss_unit if is_loss else ""
        series = _curves(lines, curves)
        # On an axis from 0, the changes of a loss would be too small to see.
        shown.append(Chart(metric_title(metric), unit, series, metric_format(metric), not is_loss, compared))
    shown += [Chart(title, unit, _curves(lines, names), show) for title, unit, names, show in _OTHER_CHARTS]
    return [chart for chart in shown if chart.series]


def _curves(lines: Lines, names: Mapping[str, str]) -> tuple[Series, ...]:
    """Returns the metrics' curves by label; leaves out metrics that were never logged."""
    return tuple(filter(None, (curve(lines, name, label) for label, name in names.items())))


def curve(lines: Lines, name: str, label: str) -> Series | None:
    """Returns a metric by step, thinned and, if it has noise, smoothed for a screen; None if it was never logged."""
    values = points(lines, name)
    if not values:
        return None
    series = _series(label, values)
    if len(values) > MOST_POINTS:
        # Each bucket becomes the mean of its values, at its last step.
        starts = np.linspace(0, len(values), MOST_POINTS, endpoint=False).astype(int)
        sizes = np.diff(np.append(starts, len(values)))
        series = Series(label, series.steps[starts + sizes - 1], np.add.reduceat(series.values, starts) / sizes)
    count = len(series.values)
    if name in EXACT or count <= SMOOTHED_ABOVE:
        return series
    # The running mean over `reach` points on both sides, fewer at the ends.
    reach = count // (2 * SMOOTHING)
    sums = np.concatenate([[0.0], np.cumsum(series.values)])
    first = np.maximum(np.arange(count) - reach, 0)
    last = np.minimum(np.arange(count) + reach + 1, count)
    return series._replace(trend=(sums[last] - sums[first]) / (last - first))


def points(lines: Lines, name: str) -> dict[float, float]:
    """Returns a metric's finite values by step."""
    logged = {float(line["step"]): line.get(name) for line in lines}
    return {step: value for step, value in logged.items() if isinstance(value, int | float) and np.isfinite(value)}


def _series(label: str, values: Mapping[float, float]) -> Series:
    return Series(label, np.array(list(values), np.float64), np.array(list(values.values()), np.float64))


def read_runs(workdir: Location) -> dict[str, Lines]:
    """Returns the metrics by run (`seed 0`, or `rate 5e-05, seed 0`); empty for a workdir with one seed."""

    def order(path: Location) -> list[tuple[float, str]]:
        """Orders numbers in names by their value."""
        keys = []
        for part in path.relative_to(workdir).parts:
            try:
                keys.append((float(part.partition("-")[2]), part))
            except ValueError:
                keys.append((float("inf"), part))
        return keys

    # Without a sweep, seeds have folders in the workdir, otherwise in the folder of their learning rate.
    logs: dict[str, Lines] = {}
    for pattern in ("seed-*", "rate-*/seed-*"):
        for path in sorted(workdir.glob(pattern), key=order):
            if lines := read_metrics(path):
                logs[", ".join(part.replace("-", " ", 1) for part in path.relative_to(workdir).parts)] = lines
    return logs


def seed_charts(runs: Mapping[str, Lines], loss_unit: str = NATS) -> list[Chart]:
    """Plots the held-out metrics and the training loss, with a curve for each run, or with their range."""
    names = {name for lines in runs.values() for line in lines for name in line}
    wanted = [name for name in names if name == "task_loss" or (name.startswith(PREFIX) and not is_threshold(name))]
    shown = []
    for name in sorted(wanted, key=lambda name: (name.endswith("loss"), name == "task_loss", name)):
        logged = {run: values for run, lines in runs.items() if (values := points(lines, name))}
        if not logged:
            continue
        series = tuple(_series(run, values) for run, values in logged.items())
        # Runs with a time budget may have no step in common; then only the first ones are shown.
        steps = sorted(set.intersection(*map(set, logged.values())))
        if len(series) > COLOURS and steps:
            table = np.array([[run[step] for step in steps] for run in logged.values()])
            ranges = {f"mean of {len(logged)} runs": table.mean(axis=0)}
            ranges |= {"highest": table.max(axis=0), "lowest": table.min(axis=0)}
            series = tuple(Series(label, np.array(steps, np.float64), level) for label, level in ranges.items())
        title = "Training loss" if name == "task_loss" else f"{metric_title(name.removeprefix(PREFIX))}, held out"
        unit = loss_unit if name.endswith("loss") else ""
        shown.append(Chart(title, unit, series[:COLOURS], metric_format(name), from_zero=False))
    return shown


def source_section(lines: Lines) -> Section:
    """Lists a mixture's sources with their last logged epochs and metrics; empty without a mixture."""
    # Names with a slash are values by source; later lines replace earlier ones.
    logged: dict[str, float] = {}
    for line in lines:
        logged |= {name: value for name, value in line.items() if "/" in name and value is not None}
    sources = [name.removeprefix(EPOCHS) for name in logged if name.startswith(EPOCHS)]
    if not sources:
        return Section("Sources of the mixture")
    scores = {name.removeprefix(PREFIX): value for name, value in logged.items() if name.startswith(PREFIX)}
    metrics = list(dict.fromkeys(name.partition("/")[2] for name in scores))
    rows = []
    for source in sources:
        values = [(name, scores.get(f"{source}/{name}")) for name in metrics]
        shown = (NONE if value is None else metric_format(name)(value) for name, value in values)
        rows.append([source, number(logged[EPOCHS + source]), *shown])
    note = "Epochs that were read of the training rows, and metrics of the held-out rows, as they were last logged."
    header = ["source", "epochs", *map(metric_title, metrics)]
    return Section("Sources of the mixture", [Table(header, [rows])], note)


def start_section(run: RecordedRun) -> Section:
    """Lists when, where and with what a run was started; empty for a run without run.json."""
    if not run.starts:
        return Section("Starts")
    rows = []
    for start in run.starts:
        versions = [f"{name} {version}" for name, version in start["versions"].items() if name != "device"]
        # The hash is shortened, but the mark for uncommitted changes stays.
        commit = start["commit"][:12] + ("+changes" if start["commit"].endswith("+changes") else "")
        place = f"{start['host']}: {start['devices']}"
        rows.append([start["time"], f"{start['step']:,}", place, commit or NONE, ", ".join(versions), start["command"]])
    configuration = run.starts[-1]["configuration"]
    changed = {key: value for key, value in configuration["changed"].items() if value != ""}
    blocks: list[Table | Settings] = [
        Table(["time", "step", "devices", "commit", "versions", "command"], [rows], words=True)
    ]
    if changed:
        blocks.append(Settings({f"changed from the recipe {configuration['recipe'] or 'of defaults'}": changed}))
    return Section("Starts", blocks)


def comparison(runs: Sequence[RecordedRun]) -> Document:
    """Returns the page that compares several runs.

    Raises:
        UserError: there are too few or too many runs, one is named twice, or their kinds differ.
    """
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
    differences = different_settings(runs)
    note = "The other keys of model, task and configuration are equal." if differences else "All keys are equal."
    effort = [row for row in _rows([run.effort() for run in runs]) if set(row[1:]) != {NONE}]
    results = [effort, _rows([_scores(run) for run in runs])]
    return Document(
        title=f"Comparison of {len(runs)} runs",
        program="bert-jax report",
        source=", ".join(str(run.workdir) for run in runs),
        lines=list(dict.fromkeys(run.kind for run in runs)),
        warning=f"Not finished, shown so far: {', '.join(unfinished)}." if unfinished else "",
        sections=[
            Section("Results", [Table(["figure", *names], results)], "The last value of each run."),
            Section("Curves", [Charts(shared_charts(named))], NOTE),
            Section("What differs", [Table(["key", *names], [differences], words=True)] if differences else [], note),
        ],
    )


def short_names(workdirs: Sequence[str]) -> list[str]:
    """Shortens paths to the last parts that tell them apart.

    Raises:
        UserError: a path is given twice.
    """
    if repeated := [path for path in workdirs if workdirs.count(path) > 1]:
        raise UserError(f"{repeated[0]} is named twice; name different runs")
    parts = [path.rstrip("/").split("/") for path in workdirs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-depth:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return list(workdirs)


def _rows(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Returns a row for each name in any column; a column without it has a dash."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, NONE) for column in columns)] for name in names]


def _scores(run: RecordedRun) -> dict[str, str]:
    """Returns a run's held-out metrics as text, for fine-tuning with the deviation over seeds."""
    if metrics := (run.result or {}).get("metrics"):
        return {
            name: f"{metric['mean']:.4f}" + ("" if metric["std"] is None else f" ± {metric['std']:.4f}")
            for name, metric in metrics.items()
            if metric["mean"] is not None and not is_threshold(name)
        }
    logged = {name for line in run.lines for name in line if name.startswith(PREFIX) and "/" not in name}
    values = {name.removeprefix(PREFIX): run.latest(name) for name in sorted(logged, key=reading_order)}
    return {name: f"{value:.4f}" for name, value in values.items() if value is not None}


def shared_charts(runs: Mapping[str, RecordedRun]) -> list[Chart]:
    """Plots the held-out metrics, the losses without a held-out one, learning rate and throughput."""
    logged = dict.fromkeys(name for run in runs.values() for line in run.lines for name in line if "/" not in name)
    held_out = sorted((name for name in logged if name.startswith(PREFIX)), key=reading_order)
    losses = [name for name in logged if name.endswith("loss") and not {name, PREFIX + name} & set(held_out)]
    titles = {name: f"{metric_title(name.removeprefix(PREFIX))}, {HELD_OUT}" for name in held_out}
    titles |= {name: f"{metric_title(name)}, {TRAINING}" for name in losses}
    titles |= {"learning_rate": "Learning rate", "tokens_per_second": "Tokens per second"}
    loss_unit = " or ".join(sorted({run.loss_unit for run in runs.values()}))
    shown = []
    for name, title in titles.items():
        curves = [curve(run.lines, name, label) for label, run in runs.items()]
        # A run has the same colour in all charts, even if another run has no curve.
        series = tuple(line._replace(colour=index) for index, line in enumerate(curves) if line)
        is_loss = name.endswith("loss")
        show = metric_format(name) if name in (*held_out, *losses) else number
        shown.append(Chart(title, loss_unit if is_loss else "", series, show, from_zero=not is_loss))
    return [chart for chart in shown if chart.series]


def different_settings(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Returns a row for each key (model, task, configuration) whose values differ between the runs."""
    rows = _rows([flat_settings(run.settings()) for run in runs])
    known = {key for key, *_ in rows}
    different = []
    for key, *values in rows:
        short = key.removeprefix("config.")
        # The recipe's architecture is repeated in the model that was made. Otherwise, the prefix tells the
        # configuration's keys from those of the model and the task.
        repeats_model = key.startswith("config.model.") and short in known
        if len(set(values)) > 1 and not repeats_model:
            different.append([key if short in known else short, *values])
    return different
