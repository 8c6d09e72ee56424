"""The table and the page of benchmarks/lineage.py, from the content of lineage.json."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.lineage_parts import FINETUNED, HELD_OUT, PRETRAINING, PROBES
from benchmarks.lineage_systems import SYSTEMS, System
from bert_jax.reporting import page as pages
from bert_jax.reporting.chart import Chart, Series, number
from bert_jax.reporting.curves import NATS
from bert_jax.reporting.document import Bullets, Charts, Document, Section, Settings, Table

Data = Mapping[str, Any]  # the content of a lineage.json

BEGIN, END = "<!-- lineage: benchmarks/lineage.py -->\n", "<!-- end of lineage -->\n"
NONE = "-"
HEADER = (
    "system",
    "parameters, M",
    "tokens, M",
    "FLOPs, 10^15",
    "perplexity",
    "pseudo-perplexity",
    "EWT tags",
    "CoNLL F1",
    "SST-2",
    "MRPC",
    "RTE",
    "CoLA",
    "STS-B",
)
NOTES = (
    "All systems read the same text with the same vocabulary and hold out the same documents, and are trained for the "
    "same minutes with the same tokens per batch, warmup and decay. The step is compiled before, in a run of one step.",
    "Parameters are all that are trained. Widths are chosen so that their number is near that of BERT. FLOPs are those "
    "of the matmuls in the program of the training step (bert_jax/planning/program.py).",
    "Rows are single segments of documents. BERT has rows of next sentences instead, ALBERT of sentence order with "
    "masked n-grams, and SpanBERT the same rows as the others with masked spans: their objectives need these. "
    "Perplexities are measured on the single segments for all.",
    "Perplexity is per token. Of the biLM it is forward / backward; of diffusion it is an upper bound. Special tokens "
    "are predicted by language models only. Pseudo-perplexity masks each token in turn (Salazar et al. 2020), in some "
    "of the held-out rows; of ELECTRA it is the generator's. It is not comparable with a perplexity.",
    "EWT tags and CoNLL F1: a linear layer on the frozen last layer, on dev, in percent. The others: fine-tuned, on "
    "dev, in percent, mean and standard deviation of the seeds, all with mean pooling: accuracy, CoLA Matthews "
    "correlation, STS-B Spearman correlation.",
)
CURVES = (
    "In training, over the minutes of the budget. ALBERT masks n-grams of sentence pairs and ModernBERT 30% of the "
    "tokens, so their losses cannot be compared with those of BERT and RoBERTa in the same chart."
)


def rows(data: Data) -> list[list[str]]:
    """The cells of the table, one row for each system, in the order of the history."""
    return [[system.title, *_figures(parts)] for system, parts in _present(data)]


def markdown(data: Data) -> str:
    """The table, and what its run was."""
    lines = [f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows(data)]
    return "\n".join([*lines, "", _description(data), ""])


def write_table(data: Data, path: Path) -> None:
    """Writes the table into a page, between its two markers. Raises UserError for a page without them."""
    common.replace_block(path, BEGIN, markdown(data), END)


def page(data: Data, source: str) -> str:
    """The page as HTML: the table, the curves of pretraining, and the settings."""
    present = _present(data)
    models = {
        f"model of {system.title} ({system.source})": parts[PRETRAINING]["model"]
        for system, parts in present
        if PRETRAINING in parts
    }
    sections = [
        Section("Results", [Table(HEADER, [rows(data)]), Bullets(NOTES)]),
        Section("Pretraining loss", [Charts(charts(data))], CURVES),
        Section("Settings", [Settings({"all": data["settings"]} | models)]),
    ]
    return pages.render(
        Document(
            title="Encoders and language models, trained alike",
            program="benchmarks.lineage",
            source=source,
            lines=[_description(data)],
            sections=sections,
        )
    )


def charts(data: Data) -> list[Chart]:
    """The loss of each system over its minutes of training; losses of one kind share a chart."""
    found: dict[str, list[Series]] = {}
    for system, parts in _present(data):
        curve = parts.get(PRETRAINING, {}).get("curve", {"minutes": []})
        if not curve["minutes"]:
            continue
        for loss in system.losses:
            name = system.title if len(system.losses) == 1 else loss.removesuffix("_lm_loss")
            series = Series(name, np.array(curve["minutes"], np.float64), np.array(curve[loss], np.float64))
            found.setdefault(system.chart, []).append(series)
    return [
        Chart(title, NATS, tuple(series), number, from_zero=False, axis="minute") for title, series in found.items()
    ]


def _present(data: Data) -> list[tuple[System, Data]]:
    return [(system, data["systems"][system.name]) for system in SYSTEMS if system.name in data["systems"]]


def _figures(parts: Data) -> Iterator[str]:
    trained = parts.get(PRETRAINING)
    if trained:
        yield f"{trained['parameters']['all'] / 1e6:.2f}"
        yield f"{trained['tokens'] / 1e6:.2f}"
        yield f"{trained['flops'] / 1e15:.3g}"
    else:
        yield from (NONE,) * 3
    measured = parts.get(HELD_OUT, {})
    yield _perplexity(measured.get("metrics", {}))
    yield _plain(measured.get("pseudo", {}).get("pseudo_perplexity"))
    for task, metric in PROBES.items():
        layers = parts.get(task, {}).get("layers", {})
        yield _score(next(iter(layers.values()))["dev"].get(metric)) if layers else NONE
    for task, metric in FINETUNED.items():
        yield _score(parts.get(task, {}).get("metrics", {}).get(metric))


def _perplexity(metrics: Data) -> str:
    if "mdm_perplexity" in metrics:
        return f"≤ {_plain(metrics['mdm_perplexity'])}"
    directions = [f"{name}_lm_perplexity" for name in ("forward", "backward")]
    if all(name in metrics for name in directions):
        return " / ".join(_plain(metrics[name]) for name in directions)
    return _plain(metrics.get("perplexity"))


def _plain(value: float | None) -> str:
    return NONE if value is None else f"{value:,.1f}"


def _score(metric: Data | None) -> str:
    """Mean and deviation in percent. A value that is undefined in a seed (a constant prediction) makes it undefined."""
    if metric is None or metric["mean"] is None or math.isnan(metric["mean"]):
        return NONE
    deviation = "" if metric["std"] is None else f" ± {100 * metric['std']:.1f}"
    return f"{100 * metric['mean']:.1f}{deviation}"


def _description(data: Data) -> str:
    settings = data["settings"]
    text = [
        f"{settings['budget_minutes']:g} minutes of training each, {settings['seeds']} seed(s) of each fine-tuning, "
        f"vocabulary of {settings['vocab_size']:,}, rows of {settings['length']}."
    ]
    if single := data["shards"].get("single"):
        tokens = single["counts"]["tokens"] / 1e6
        text.append(
            f"Text: {tokens:.1f} M tokens, {single['rows']['train']:,} rows and {single['rows']['eval']:,} held out."
        )
    if where := _origin(data):
        text.append(where)
    return " ".join(text)


def _origin(data: Data) -> str:
    """The machine and the commits of the pretraining runs."""
    parts = [parts[PRETRAINING] for parts in data["systems"].values() if PRETRAINING in parts]
    machines = _distinct([f"{part['machine']['cores']} cores ({part['machine']['processor']})" for part in parts])
    commits = _distinct([common.short_commit(part["commit"]) for part in parts])
    return f"Machine: {', '.join(machines)}. Commit: {', '.join(commits)}." if machines else ""


def _distinct(values: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(values))
