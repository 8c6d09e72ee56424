"""A page about several runs: their results side by side, their curves in the same charts, and how they were set up."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.command import UserError
from bert_jax.reporting import curves
from bert_jax.reporting.chart import Chart, number
from bert_jax.reporting.document import Charts, Document, Section, Table
from bert_jax.reporting.recorded_run import RecordedRun
from bert_jax.train.held_out import is_threshold
from bert_jax.train.metrics import duration

MOST_RUNS = 8  # the colours of reporting/page.css
NONE = "-"


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
            Section(
                "Curves",
                [Charts(shared_charts(named))],
                curves.NOTE,
            ),
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
    found = [row(name, [values.get(name) for values in metrics]) for name in names]
    return [[line for line in effort if set(line[1:]) != {NONE}], found]


def _metrics(run: RecordedRun) -> dict[str, str]:
    """Returns the held-out metrics of a run as text: of fine-tuning with the deviation over seeds."""
    if (run.result or {}).get("metrics"):
        return {
            name: f"{metric['mean']:.4f}" + ("" if metric["std"] is None else f" ± {metric['std']:.4f}")
            for name, metric in run.result["metrics"].items()  # type: ignore[index]
            if metric["mean"] is not None and not is_threshold(name)
        }
    logged = dict.fromkeys(name for line in run.lines for name in line if name.startswith("eval_") and "/" not in name)
    values = {name: run.latest(name) for name in sorted(logged, key=curves.reading_order)}
    return {name.removeprefix("eval_"): f"{value:.4f}" for name, value in values.items() if value is not None}


def shared_charts(runs: Mapping[str, RecordedRun]) -> list[Chart]:
    """Returns a chart of each held-out metric, of losses that are not held out, of learning rate and throughput."""
    logged = dict.fromkeys(name for run in runs.values() for line in run.lines for name in line if "/" not in name)
    held_out = sorted((name for name in logged if name.startswith("eval_")), key=curves.reading_order)
    losses = [name for name in logged if name.endswith("loss") and not {name, f"eval_{name}"} & set(held_out)]
    units = {run.loss_unit for run in runs.values()}
    found = []
    for name in (*held_out, *losses, "learning_rate", "tokens_per_second"):
        series = [curves.curve(run.lines, name, label) for label, run in runs.items()]
        series = [one and dataclasses.replace(one, colour=index) for index, one in enumerate(series)]
        metric, is_loss = name.removeprefix("eval_"), name.endswith("loss")
        unit = " or ".join(sorted(units)) if is_loss else ""
        title = {"learning_rate": "Learning rate", "tokens_per_second": "Tokens per second"}.get(name)
        title = title or f"{curves.title_of(metric)}, {'held out' if name in held_out else 'training'}"
        show = number if name in ("learning_rate", "tokens_per_second") else curves.show_of(metric)
        kept = tuple(one for one in series if one is not None)
        found.append(Chart(title, unit, kept, show, from_zero=not is_loss))
    return [chart for chart in found if chart.series]


def different_settings(runs: Mapping[str, RecordedRun]) -> list[list[str]]:
    """Returns a row for each key of model, task and configuration whose values differ between the runs."""
    flat = [_flat({group: dict(values) for group, values in run.settings().items()}) for run in runs.values()]
    known = {key for each in flat for key in each}
    # What a recipe says of the architecture is in the model as it was made.
    repeated = {key for key in known if key.startswith("config.model.") and key.removeprefix("config.") in known}
    keys = [key for key in dict.fromkeys(key for each in flat for key in each) if key not in repeated]
    rows = [[_shown_key(key, known), *(each.get(key, NONE) for each in flat)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _shown_key(key: str, known: Collection[str]) -> str:
    """A key without the prefix of the configuration, unless the model or the task as it was made has the same one."""
    short = key.removeprefix("config.")
    return key if short in known else short


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            found[f"{prefix}{key}"] = NONE if value is None or shown == "" else shown
    return found
