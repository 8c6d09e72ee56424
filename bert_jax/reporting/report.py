"""Writes a report of a run, finished or not, as one HTML file: results, curves, predictions, configuration."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from bert_jax.data.shards import open_dataset
from bert_jax.errors import UserError
from bert_jax.reporting import page, runs
from bert_jax.reporting.document import (
    Charts,
    Document,
    Format,
    Reference,
    Section,
    Settings,
    Table,
    Tile,
    number,
    percent,
)
from bert_jax.reporting.finetuning import error_sections
from bert_jax.reporting.pretraining import masked_token_table, predict_masked_tokens, unigram_baseline
from bert_jax.reporting.runs import RecordedRun, comparison, read_run, read_runs, seed_charts, source_section
from bert_jax.storage.location import Location, absolute, location, write_file
from bert_jax.tasks.measurement import metric_prefix
from bert_jax.train.evaluation import is_threshold
from bert_jax.train.metrics import duration

REPORT = "report.html"
MASKED_TOKENS = 16  # in the table of predictions
EXAMPLES = 5000  # of a dev file: they take about a minute on two cores
_WHERE = " Its path is relative: make the report in the folder where training began."


def report(workdir: str | PurePath, examples: int | None = None) -> Location:
    """Writes WORKDIR/report.html and returns its path.

    examples  the maximum number of examples of a fine-tuned run's dev file to evaluate; None: EXAMPLES

    Raises UserError for a folder that is not the workdir of a run, or one that has logged nothing yet, and for a number
    of examples of a pretraining run.
    """
    run = read_run(location(workdir))
    finetuned = run.config.kind != "pretraining"
    if examples is not None and not finetuned:
        raise UserError("--examples is for the report of a fine-tuned run. Leave it out")
    references, predictions = ({}, []) if finetuned else _held_out(run)
    unfinished = f"Not finished: there is no result.json yet. The log up to step {run.lines[-1]['step']:,} is shown."
    document = Document(
        title=absolute(run.workdir).name,
        program="bert-jax report",
        source=str(run.workdir),
        lines=[_description(run)],
        warning="" if run.result is not None else unfinished,
        tiles=_task_tiles(run) if finetuned else _pretraining_tiles(run, references),
        sections=[
            *(_task_tables(run) if finetuned else ()),
            *(error_sections(run.workdir, run.config, examples or EXAMPLES) if finetuned else ()),
            *_seed_sections(run),
            Section("Curves", [Charts(runs.charts(run.lines, references, run.loss_unit))], runs.NOTE),
            source_section(run.lines),
            *predictions,
            Section("Configuration", [Settings(run.settings())]),
        ],
    )
    target = run.workdir / REPORT
    write_file(target, page.render(document).encode())
    return target


def compare(workdirs: Sequence[str | PurePath], output: str | PurePath) -> Path:
    """Writes one page about several runs (reporting/runs.py) to a local file and returns its path.

    Raises UserError for what `comparison` and `report` refuse, and for an output whose folder does not exist.
    """
    target = Path(output)
    if not target.absolute().parent.is_dir():
        raise UserError(f"--output {target}: no folder {target.parent}. Create it, or choose another file")
    document = comparison([read_run(location(workdir)) for workdir in workdirs])
    write_file(target, page.render(document).encode())
    return target


def _description(run: RecordedRun) -> str:
    model = run.config.model
    encoder = ("causal " if model.causal else "") + model.encoder.replace("_", "-")
    return f"{run.kind}: {encoder}, {model.layers} layers x {model.width}, vocabulary {model.vocab_size:,}"


def _held_out(run: RecordedRun) -> tuple[dict[str, Reference], list[Section]]:
    """Returns the held-out baselines by metric; and the table of predictions, or the reason why it is missing."""
    title = "Predictions for masked tokens"
    data = run.config.training.get("data", {})
    references: dict[str, Reference] = {}
    remark = ""
    if not run.config.heads.mlm:
        return {}, []
    try:
        shards, source = _held_out_shards(data)
        if not shards:
            return {}, []
        if not (data.get("mixture") or data.get("phases")):  # their rows are of several shards
            references, remark = _baselines(shards, data["train"], run.config.training["eval"]["max_rows"])
        masked_tokens = predict_masked_tokens(run.workdir, shards, MASKED_TOKENS)
        split = open_dataset(shards, "eval").masking.split
    except UserError as error:
        hint = "" if Path(data.get("eval") or data.get("train") or "/").is_absolute() else _WHERE
        return references, [Section(title, note=f"No table: {error}.{hint}")]
    first = sum(token.rank == 0 for token in masked_tokens)
    among = sum(token.rank is not None for token in masked_tokens)
    rows = f"held-out rows of {source}" if source else "held-out rows"
    _, random, unchanged = map(percent, split)
    others = f"Of the predicted tokens, {random} are random ones and {unchanged} are kept. " if split[0] < 1 else ""
    note = (
        f"{len(masked_tokens)} {rows}, sampled with a fixed seed, with the masks of the evaluation. In each row "
        "the middle masked token that hides a word is shown; none is selected by its result. Other masked tokens are "
        f"grey. {others}"
        f"The first prediction is correct in {first} of {len(masked_tokens)} rows, one of five in {among}.{remark}"
    )
    return references, [Section(title, [masked_token_table(masked_tokens)], note)]


def _held_out_shards(data: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the shards with the held-out rows of a run, or of its first source and its name; empty if none."""
    if data.get("eval"):
        return data["eval"], ""
    folder, source = data.get("train", ""), ""
    if data.get("mixture"):
        source, folder = next(iter(data["mixture"].items()))
        folder = folder if isinstance(folder, str) else folder[0]
    return str(open_dataset(folder, "train").directory) if folder else "", source  # DIR of DIR/train


def _baselines(shards: str, train: str, max_rows: int) -> tuple[dict[str, Reference], str]:
    """Returns the baselines by metric; or none, and a remark that says why."""
    try:
        baseline = unigram_baseline(shards, max_rows, train)
    except UserError as error:
        return {}, f" There is no unigram baseline: {error}."
    references = {
        "mlm_accuracy": Reference(f"always “{baseline.token}”", baseline.accuracy),
        "mlm_loss": Reference("unigram baseline", baseline.loss),
    }
    if baseline.next_sentence_accuracy is not None:
        references["nsp_accuracy"] = Reference("always the same label", baseline.next_sentence_accuracy)
    return references, ""


def _pretraining_tiles(run: RecordedRun, references: Mapping[str, Reference]) -> list[Tile]:
    def compared(name: str, show: Format) -> str:
        return f"{references[name].name}: {show(references[name].value)}" if name in references else ""

    tiles = []
    for name, what in (
        ("mlm_accuracy", "Masked-token accuracy"),
        ("lm_accuracy", "Next-token accuracy"),
        ("forward_lm_accuracy", "Next-token accuracy"),
        ("backward_lm_accuracy", "Previous-token accuracy"),
        ("mdm_accuracy", "Masked-token accuracy, mean of all mask rates"),
        ("nsp_accuracy", "Next-sentence accuracy"),
    ):
        if (value := run.latest(f"eval_{name}")) is not None:
            tiles.append(Tile(percent(value), f"{what}, held out", compared(name, percent)))
    for name, what in (
        ("mlm_loss", "Masked-token"),
        ("lm_loss", "Next-token"),
        ("forward_lm_loss", "Next-token"),
        ("backward_lm_loss", "Previous-token"),
        ("mdm_loss", "Masked diffusion"),
    ):
        if (loss := run.latest(f"eval_{name}")) is not None:
            notes = (f"perplexity {number(float(np.exp(loss)))}", compared(name, number), _end_of_phase(run, name))
            tiles.append(Tile(f"{loss:.3f}", f"{what} loss, held out (nats)", "; ".join(filter(None, notes))))
    if not tiles and (loss := run.latest("loss")) is not None:
        tiles.append(Tile(f"{loss:.3f}", "Training loss (nats)", "there is no held-out part, or no evaluation yet"))
    return tiles + _effort_tiles(run)


def _effort_tiles(run: RecordedRun) -> list[Tile]:
    """Returns steps, tokens, time and speed."""
    result = run.result or {}
    rates = [line["tokens_per_second"] for line in run.lines if line.get("tokens_per_second")]
    tiles = [Tile(f"{run.lines[-1]['step']:,}", "Steps")]
    if "tokens" in result:
        tiles.append(Tile(number(float(result["tokens"])), "Tokens seen"))
    if "seconds" in result:
        tiles.append(Tile(duration(float(result["seconds"])), "Training time"))
    if rates:
        tiles.append(Tile(number(float(np.median(rates))), "Tokens per second", "median of logged values"))
    return tiles


def _task_tiles(run: RecordedRun) -> list[Tile]:
    result = run.result or {}
    tiles = []
    for name, metric in result.get("metrics", {}).items():
        if not name.endswith("loss") and not is_threshold(name) and metric["mean"] is not None:
            show = runs.show_of(name)
            deviation = "" if metric["std"] is None else f"standard deviation over seeds: {show(metric['std'])}"
            split = _split_of(name, result["counts"])
            title = runs.title_of(name.removeprefix(metric_prefix(split)))
            tiles.append(Tile(show(metric["mean"]), f"{title}, {split.replace('_', ' ')}", deviation))
    return tiles + _effort_tiles(run)


def _split_of(metric: str, splits: Collection[str]) -> str:
    """Returns the split that the name of a metric begins with; dev if it begins with none."""
    named = [split for split in splits if metric_prefix(split) and metric.startswith(metric_prefix(split))]
    return max(named, key=len, default="dev")


def _task_tables(run: RecordedRun) -> list[Section]:
    """Returns metrics by seed, and what the files hold."""
    if run.result is None:
        return []
    seeds = [f"seed {seed}" for seed in run.result["seeds"]]
    metrics = []
    for name, metric in run.result["metrics"].items():
        values = (metric["mean"], metric["std"], *metric["values"])
        metrics.append([name, *("-" if value is None else f"{value:.4f}" for value in values)])
    counts = run.result["counts"]
    names = list(dict.fromkeys(name for part in counts.values() for name in part))
    files = [[split, *(f"{part[name]:,}" if name in part else "-" for name in names)] for split, part in counts.items()]
    return [
        Section("Metrics", [Table(["metric", "mean", "deviation", *seeds], [metrics])]),
        Section("Files", [Table(["split", *(name.replace("_", " ") for name in names)], [files])]),
    ]


def _seed_sections(run: RecordedRun) -> list[Section]:
    """Returns the curves of all runs, if there are several."""
    runs = read_runs(run.workdir)
    if len(runs) < 2:
        return []
    note = "The curves below are of the run with the best score on dev, which WORKDIR loads."
    return [Section("Curves by seed", [Charts(seed_charts(runs, run.loss_unit))], note)]


def _end_of_phase(run: RecordedRun, name: str) -> str:
    """Returns where a metric was last measured if later evaluations had another objective, else an empty string."""
    measured = [line["step"] for line in run.lines if line.get(f"eval_{name}") is not None]
    evaluated = [line["step"] for line in run.lines if line.get("eval_loss") is not None]
    return f"at step {measured[-1]:,}, where its phase was last measured" if measured[-1:] < evaluated[-1:] else ""
