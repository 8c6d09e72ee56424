"""Writes a run's report, finished or not, as one HTML file: results, curves, predictions, configuration."""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

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
from bert_jax.reporting.runs import RecordedRun, comparison, read_run
from bert_jax.storage.location import Location, absolute, location, write_file
from bert_jax.tasks.measurement import metric_prefix
from bert_jax.train.evaluation import is_threshold

REPORT = "report.html"
MASKED_TOKENS = 16  # in the table of predictions
EXAMPLES = 5000  # of a dev file: they take about a minute on two cores

# Terms of pretraining losses, with the titles of their accuracy and loss; "" if the loss has no tile.
_TERMS = (
    ("mlm", "Masked-token accuracy", "Masked-token"),
    ("lm", "Next-token accuracy", "Next-token"),
    ("forward_lm", "Next-token accuracy", "Next-token"),
    ("backward_lm", "Previous-token accuracy", "Previous-token"),
    ("mdm", "Masked-token accuracy, mean of all mask rates", "Masked diffusion"),
    ("nsp", "Next-sentence accuracy", ""),
)


def report(workdir: str | PurePath, examples: int | None = None) -> Location:
    """Writes WORKDIR/report.html and returns its path.

    Args:
        examples: the most dev examples to evaluate, for a fine-tuned run; None: EXAMPLES.

    Raises:
        UserError: for a folder that is not a workdir, or one that has logged nothing yet, and for `examples` with a
            pretraining run.
    """
    run = read_run(location(workdir))
    references: dict[str, Reference] = {}
    results: list[Section] = []
    predictions: list[Section] = []
    if run.config.kind != "pretraining":
        results = [*_task_tables(run), *error_sections(run.workdir, run.config, examples or EXAMPLES)]
        tiles = _task_tiles(run)
    elif examples is not None:
        raise UserError("--examples is for the report of a fine-tuned run. Leave it out")
    else:
        references, predictions = _held_out(run)
        tiles = _pretraining_tiles(run, references)
    # The curves of all seeds, if there are several.
    logs = runs.read_runs(run.workdir)
    if len(logs) > 1:
        note = "The curves below are of the run with the best score on dev, which WORKDIR loads."
        results.append(Section("Curves by seed", [Charts(runs.seed_charts(logs, run.loss_unit))], note))
    effort = [Tile(value, name) for name, value in run.effort().items() if value != runs.NONE]
    model = run.config.model
    encoder = ("causal " if model.causal else "") + model.encoder.kind.replace("_", "-")
    unfinished = f"Not finished: there is no result.json yet. The log up to step {run.lines[-1]['step']:,} is shown."
    document = Document(
        title=absolute(run.workdir).name,
        program="bert-jax report",
        source=str(run.workdir),
        lines=[f"{run.kind}: {encoder}, {model.layers} layers x {model.width}, vocabulary {model.vocab_size:,}"],
        warning="" if run.result is not None else unfinished,
        tiles=tiles + effort,
        sections=[
            *results,
            Section("Curves", [Charts(runs.charts(run.lines, references, run.loss_unit))], runs.NOTE),
            runs.source_section(run.lines),
            *predictions,
            runs.start_section(run),
            Section("Configuration", [Settings(run.settings())]),
        ],
    )
    target = run.workdir / REPORT
    write_file(target, page.render(document).encode())
    return target


def compare(workdirs: Sequence[str | PurePath], output: str | PurePath) -> Path:
    """Writes one page about several runs to a local file and returns its path.

    Raises:
        UserError: the output's folder does not exist, a run cannot be read, or the runs cannot be compared.
    """
    target = Path(output)
    if not target.absolute().parent.is_dir():
        raise UserError(f"--output {target}: no folder {target.parent}. Create it, or choose another file")
    # Read after the check, since workdirs may be in an object store and take long.
    document = comparison([read_run(location(workdir)) for workdir in workdirs])
    write_file(target, page.render(document).encode())
    return target


def _held_out(run: RecordedRun) -> tuple[dict[str, Reference], list[Section]]:
    """Returns the held-out baselines by metric, and a section with predictions or the reason why they are missing."""
    title = "Predictions for masked tokens"
    data = run.config.training.get("data", {})
    shards, source = data.get("eval") or "", ""
    references: dict[str, Reference] = {}
    remark = ""
    if not run.config.heads.mlm:
        return {}, []
    try:
        if not shards:
            # A mixture's held-out rows are those of its first source.
            folder = data.get("train", "")
            if data.get("mixture"):
                source, folder = next(iter(data["mixture"].items()))
                folder = folder if isinstance(folder, str) else folder[0]  # with its share of the rows
            if not folder:
                return {}, []
            shards = str(open_dataset(folder, "train").directory)  # DIR of DIR/train
        if not (data.get("mixture") or data.get("phases")):  # their rows come from several shards
            references, remark = _baselines(shards, data["train"], run.config.training["eval"]["max_rows"])
        masked_tokens = predict_masked_tokens(run.workdir, shards, MASKED_TOKENS)
        split = open_dataset(shards, "eval").masking.split
    except UserError as error:
        # Shards are often moved or removed after training, and the report is useful without this table.
        is_absolute = Path(data.get("eval") or data.get("train") or "/").is_absolute()
        hint = "" if is_absolute else " Its path is relative: make the report in the folder where training began."
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


def _baselines(shards: str, train: str, max_rows: int) -> tuple[dict[str, Reference], str]:
    """Returns the baselines by metric; or none, and a remark with the reason."""
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

    accuracies, losses = [], []
    for term, accuracy_title, loss_title in _TERMS:
        if (value := run.latest(f"eval_{term}_accuracy")) is not None:
            note = compared(f"{term}_accuracy", percent)
            accuracies.append(Tile(percent(value), f"{accuracy_title}, held out", note))
        if loss_title and (loss := run.latest(f"eval_{term}_loss")) is not None:
            notes = [f"perplexity {number(float(np.exp(loss)))}", compared(f"{term}_loss", number)]
            # Later phases may have another objective, which does not measure this loss.
            measured = [line["step"] for line in run.lines if line.get(f"eval_{term}_loss") is not None]
            evaluated = [line["step"] for line in run.lines if line.get("eval_loss") is not None]
            if measured and measured[-1:] < evaluated[-1:]:
                notes.append(f"at step {measured[-1]:,}, where its phase was last measured")
            losses.append(Tile(f"{loss:.3f}", f"{loss_title} loss, held out (nats)", "; ".join(filter(None, notes))))
    if not accuracies + losses and (loss := run.latest("loss")) is not None:
        losses.append(Tile(f"{loss:.3f}", "Training loss (nats)", "there is no held-out part, or no evaluation yet"))
    return accuracies + losses


def _task_tiles(run: RecordedRun) -> list[Tile]:
    result = run.result or {}
    tiles = []
    for name, metric in result.get("metrics", {}).items():
        if not name.endswith("loss") and not is_threshold(name) and metric["mean"] is not None:
            show = runs.metric_format(name)
            deviation = "" if metric["std"] is None else f"standard deviation over seeds: {show(metric['std'])}"
            # The metric's name begins with its split, e.g. dev_mismatched_accuracy; with none, the split is dev.
            prefixes = {split: metric_prefix(split) for split in result["counts"]}
            named = [split for split, prefix in prefixes.items() if prefix and name.startswith(prefix)]
            split = max(named, key=len, default="dev")
            title = runs.metric_title(name.removeprefix(metric_prefix(split)))
            tiles.append(Tile(show(metric["mean"]), f"{title}, {split.replace('_', ' ')}", deviation))
    return tiles


def _task_tables(run: RecordedRun) -> list[Section]:
    """Returns metrics by seed, and counts by file."""
    if run.result is None:
        return []
    seeds = [f"seed {seed}" for seed in run.result["seeds"]]
    metrics, baseline = [], run.result.get("baseline") or {}
    for name, metric in run.result["metrics"].items():
        compared = [baseline["metrics"].get(name)] if baseline else []
        values = (metric["mean"], *compared, metric["std"], *metric["values"])
        metrics.append([name, *(runs.NONE if value is None else f"{value:.4f}" for value in values)])
    header = ["metric", "mean", *([baseline["name"]] if baseline else []), "deviation", *seeds]
    counts = run.result["counts"]
    names = dict.fromkeys(name for part in counts.values() for name in part)
    files = [
        [split, *(f"{part[name]:,}" if name in part else runs.NONE for name in names)] for split, part in counts.items()
    ]
    return [
        Section("Metrics", [Table(header, [metrics])]),
        Section("Files", [Table(["split", *(name.replace("_", " ") for name in names)], [files])]),
    ]
