"""Draws a run, finished or not, as one HTML file: results, curves, guesses, configuration."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax import command
from bert_jax.command import UserError
from bert_jax.reporting import curves, page
from bert_jax.reporting.curves import Reference, number, percent
from bert_jax.reporting.finetuning import error_sections
from bert_jax.reporting.masked_predictions import predict_masked_tokens
from bert_jax.reporting.page import Tile
from bert_jax.reporting.seed_curves import read_runs, seed_charts
from bert_jax.reporting.unigram_baseline import unigram_baseline
from bert_jax.storage.local import write_atomic
from bert_jax.train.metrics import METRICS_FILE, duration, read_metrics
from bert_jax.train.run import RESULT_FILE
from bert_jax.train.workdir import WorkdirConfig, read_config

REPORT = "report.html"
BLANKS = 16  # sentences in the table of guesses
EXAMPLES = 5000  # of a dev file: a minute or so on two cores

DESCRIPTION = """Draws a run as one HTML file, WORKDIR/report.html, which needs no network and no other file.

  python -m bert_jax.report runs/tiny

In it: the results, curves (losses, accuracies, learning rate, throughput, waiting and padding), the whole
configuration; for pretraining a table of masked held-out sentences with the model's five likeliest guesses and the
truth; for fine-tuning the metrics and curves by seed, and what the model says of its dev file, anew: classes or tags
that it confuses, how sure it is and how right, entities found and missed, its worst examples. A run that goes on, or
was killed, can be drawn too: what there is so far.
"""


@dataclass(frozen=True)
class Run:
    """What a workdir holds of a run; result is None for one that has not ended."""

    workdir: Path
    config: WorkdirConfig
    lines: list[dict[str, Any]]
    result: dict[str, Any] | None


def report(workdir: str | Path, examples: int = EXAMPLES) -> Path:
    """Writes WORKDIR/report.html and returns its path.

    Of a fine-tuned run's dev file it looks at no more than so many examples. Raises UserError for a folder that is not
    the workdir of a run, or one that has logged nothing yet.
    """
    run = _read(Path(workdir))
    pretraining = run.config.kind == "pretraining"
    guessing = _guessing(run) if pretraining else Guessing()
    sections = [
        page.tiles(_pretraining_tiles(run, guessing) if pretraining else _task_tiles(run)),
        "" if pretraining else _task_tables(run),
        *(() if pretraining else error_sections(run.workdir, run.config, examples)),
        _seed_section(run),
        page.section(
            "Curves",
            page.chart_grid(curves.charts(run.lines, guessing.references, _loss_unit(run))),
            "Bold: a running mean, where a curve is noisy. Move a pointer over a chart to read it.",
        ),
        guessing.section,
        page.section("Configuration", page.settings(_settings(run.config))),
        f"<footer>Drawn by bert_jax.report from {page.text(run.workdir)}.</footer>",
    ]
    target = run.workdir / REPORT
    write_atomic(target, page.page(run.workdir.absolute().name, _header(run), sections).encode())
    return target


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("bert_jax.report", DESCRIPTION)
    parser.add_argument("workdir", metavar="WORKDIR", help="the folder of a pretraining or fine-tuning run")
    what = f"of a fine-tuned run, look at so many examples of its dev file at most (default: {EXAMPLES:,})"
    parser.add_argument("--examples", type=int, default=EXAMPLES, metavar="N", help=what)
    options = parser.parse_args(list(arguments))
    if options.examples < 1:
        raise UserError(f"--examples is {options.examples}; use 1 or more")
    print(report(options.workdir, options.examples))


def _read(workdir: Path) -> Run:
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
    return Run(workdir, config, lines, result)


def _header(run: Run) -> str:
    model = run.config.model
    kind = (
        "Pretraining" if run.config.kind == "pretraining" else f"Fine-tuning on {(run.config.task or {}).get('name')}"
    )
    size = f"{kind}: BERT, {model.layers} layers x {model.width}, vocabulary {model.vocab_size:,}"
    if run.result is not None:
        return f"<p>{page.text(size)}</p>"
    state = f"Not finished: there is no result.json yet. What was logged up to step {run.lines[-1]['step']:,} is shown."
    return f'<p>{page.text(size)}</p><p class="state">{page.text(state)}</p>'


@dataclass(frozen=True)
class Guessing:
    """What the held-out shards add to a report of pretraining: levels to compare with, and the model's guesses."""

    references: Mapping[str, Reference] = field(default_factory=dict)
    section: str = ""


def _guessing(run: Run) -> Guessing:
    """The unigram guess and the table of blanks, or a section that says why there is none."""
    title = "What the model guesses"
    data = run.config.training.get("data", {})
    held_out = data.get("eval") or data.get("train")
    if not held_out or not run.config.heads.mlm:
        return Guessing()
    try:
        levels = unigram_baseline(held_out, run.config.training["eval"]["max_rows"])
        references = {
            "mlm_accuracy": Reference(f"always “{levels.token}”", levels.accuracy),
            "mlm_loss": Reference("guessing by frequency", levels.loss),
        }
        if levels.next_sentence_accuracy is not None:
            references["nsp_accuracy"] = Reference("one answer always", levels.next_sentence_accuracy)
    except UserError as error:
        return Guessing(section=page.section(title, "", f"No table: {error}."))
    try:
        blanks = predict_masked_tokens(run.workdir, held_out, BLANKS)
    except UserError as error:
        return Guessing(references, page.section(title, "", f"No table: {error}."))
    note = (
        f"{len(blanks)} held-out rows drawn by a fixed seed, with the masks of the evaluation, and of each row the "
        "middle blank that hides a word: nothing was picked by its result. Other masked tokens are grey; of all masked "
        "tokens 10% are shown as random ones and 10% as they were, as in training."
    )
    right = sum(blank.guesses[0].token == blank.truth for blank in blanks)
    among = sum(any(guess.token == blank.truth for guess in blank.guesses) for blank in blanks)
    count = f" First guess right in {right} of {len(blanks)}, one of five in {among}."
    return Guessing(references, page.section(title, page.blanks_table(blanks), note + count))


def _pretraining_tiles(run: Run, guessing: Guessing) -> list[Tile]:
    tiles = []
    for name, said in (
        ("mlm_accuracy", "Masked tokens right"),
        ("lm_accuracy", "Next tokens right"),
        ("nsp_accuracy", "Next sentences right"),
    ):
        if (value := _latest(run, f"eval_{name}")) is not None:
            tiles.append(Tile(percent(value), f"{said}, held out", _beside(guessing, name, percent)))
    for name, said in (("mlm_loss", "Masked-token"), ("lm_loss", "Next-token")):
        if (loss := _latest(run, f"eval_{name}")) is not None:
            perplexity = f"perplexity {number(float(np.exp(loss)))}"
            beside = "; ".join(part for part in (perplexity, _beside(guessing, name, number)) if part)
            tiles.append(Tile(f"{loss:.3f}", f"{said} loss, held out (nats)", beside))
    if not tiles and (loss := _latest(run, "loss")) is not None:
        tiles.append(Tile(f"{loss:.3f}", "Training loss (nats)", "nothing was held out, or not measured yet"))
    return tiles + _effort_tiles(run)


def _effort_tiles(run: Run) -> list[Tile]:
    """Steps, tokens, time and speed."""
    ended = run.result or {}
    rates = [line["tokens_per_second"] for line in run.lines if line.get("tokens_per_second")]
    tiles = [Tile(f"{run.lines[-1]['step']:,}", "Steps")]
    if "tokens" in ended:
        tiles.append(Tile(number(float(ended["tokens"])), "Tokens seen"))
    if "seconds" in ended:
        tiles.append(Tile(duration(float(ended["seconds"])), "Training time"))
    if rates:
        tiles.append(Tile(number(float(np.median(rates))), "Tokens a second", "median of the log"))
    return tiles


def _task_tiles(run: Run) -> list[Tile]:
    metrics = (run.result or {}).get("metrics", {})
    tiles = []
    for name, metric in metrics.items():
        if not name.endswith("loss") and metric["mean"] is not None:
            show = curves.show_of(name)
            deviation = "" if metric["std"] is None else f"deviation {show(metric['std'])} over seeds"
            split = "test" if name.startswith("test_") else "dev"
            tiles.append(
                Tile(show(metric["mean"]), f"{curves.title_of(name.removeprefix('test_'))}, {split}", deviation)
            )
    return tiles + _effort_tiles(run)


def _task_tables(run: Run) -> str:
    """Metrics by seed, and what the files held."""
    if run.result is None:
        return ""
    seeds = [f"seed {seed}" for seed in run.result["seeds"]]
    shown = [
        [name, *(_digits(value) for value in (metric["mean"], metric["std"], *metric["values"]))]
        for name, metric in run.result["metrics"].items()
    ]
    counts = run.result["counts"]
    names = list(dict.fromkeys(name for part in counts.values() for name in part))
    held = [[split, *(f"{part[name]:,}" if name in part else "-" for name in names)] for split, part in counts.items()]
    return page.section("Metrics", page.table(["metric", "mean", "deviation", *seeds], shown)) + page.section(
        "Files", page.table(["split", *(name.replace("_", " ") for name in names)], held)
    )


def _seed_section(run: Run) -> str:
    """The curves of all runs, where there are several."""
    runs = read_runs(run.workdir)
    if len(runs) < 2:
        return ""
    note = "Each run's own; below are those of the run that WORKDIR opens as, the best by dev."
    return page.section("Curves by seed", page.chart_grid(seed_charts(runs, _loss_unit(run))), note)


def _loss_unit(run: Run) -> str:
    """Losses are cross-entropies, but those of numbers: the mean of their squared errors."""
    return "squared error" if (run.config.task or {}).get("kind", "").endswith("regression") else curves.NATS


def _settings(config: WorkdirConfig) -> dict[str, Mapping[str, Any]]:
    """The groups of the configuration: what was built, the task, and the training keys, those in groups apart."""
    training = dict(config.training)
    groups = {name: training.pop(name) for name in list(training) if isinstance(training[name], Mapping)}
    groups = {f"config.{name}": values for name, values in groups.items()}
    model = {**asdict(config.model), **{f"head {name}": value for name, value in config.heads.to_json().items()}}
    return {"model": model, "task": dict(config.task or {}), "config": training, **groups}


def _beside(guessing: Guessing, name: str, show: curves.Format) -> str:
    reference = guessing.references.get(name)
    return f"{reference.name}: {show(reference.value)}" if reference else ""


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _latest(run: Run, name: str) -> float | None:
    """A metric of the result, or else the last that was logged."""
    ended = (run.result or {}).get(name)
    if ended is not None:
        return ended
    return next((line[name] for line in reversed(run.lines) if line.get(name) is not None), None)


if __name__ == "__main__":
    command.run(main)
