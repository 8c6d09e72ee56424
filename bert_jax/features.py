"""How much each layer of a frozen model knows of a tagging task: a small head over its vectors, layer by layer."""

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
from rich.console import Console
from rich.table import Table

from bert_jax import command
from bert_jax import config as config_lib
from bert_jax.command import UserError
from bert_jax.config import FinetuneConfig
from bert_jax.interop import checkpoint_average
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.layer_selection import LAYERS
from bert_jax.progress import Reporter
from bert_jax.storage.local import refuse_existing, write_json
from bert_jax.tasks import measurement, registry
from bert_jax.tasks.frozen_heads import HeadOptions, train_head
from bert_jax.tasks.frozen_vectors import DTYPES, bytes_needed, word_vectors
from bert_jax.tasks.kinds.tagging import TagRows
from bert_jax.tasks.metric_functions import TAGGING_METRICS, compute_metrics
from bert_jax.tasks.task import Task

# Devlin et al. 2019, table 7: dev F1 on CoNLL-2003 by features of BERT-Base cased.
PUBLISHED = {
    "embeddings": 91.0,
    "second_to_last": 95.6,
    "last": 94.9,
    "sum_last_4": 95.9,
    "concat_last_4": 96.1,
    "sum_all": 95.5,
}

DESCRIPTION = f"""Trains a small head on a tagging task over the vectors of a model that stays as it is, by layer.

  python -m bert_jax.features --checkpoint CHECKPOINT --config configs/tagging.py:task=conll2003 --output registry.json
  python -m bert_jax.features --checkpoint CHECKPOINT --config configs/tagging.py:task=ewt --layers last,4 --head linear

The vector of a word is that of its first piece. --layers: all, or names parted by commas:
{", ".join(LAYERS)}, or a number (0: the embeddings); see bert_jax.embed --help.
The head is a two-layer BiLSTM (Devlin et al. 2019, section 5.3, have --hidden 768) or linear; it stops when the task's
first metric on dev gets no better, and each layer has one for each seed. Vectors are computed once for all layers
and lie in a temporary folder (--scratch) meanwhile; how much they take is said at the start.

The configuration gives the task (task.*) alone; how a head is trained is said by the flags below."""


def features(
    checkpoint: str | Path | LoadedModel,
    config: FinetuneConfig | ml_collections.ConfigDict,
    *,
    layers: str = "all",
    options: HeadOptions | None = None,
    seeds: int = 3,
    max_sentences: int = 0,
    dtype: str = "float16",
    compute_dtype: str = "float32",
    scratch: str = "",
    average: str = "",
    quiet: bool = True,
) -> dict[str, Any]:
    """The table, as --output has it: `task, head, seeds, counts, layers`.

    layers holds by name `width`, `epochs` by seed, and by split (dev, and test where it has labels) each metric's
    `mean`, `std` (of the sample; None for one seed) and `values`. max_sentences takes the first so many of each split.
    Raises UserError for a task that is no tagging, one without a dev file, and a layer that the model does not have.
    """
    if isinstance(config, ml_collections.ConfigDict):
        config = config_lib.load(FinetuneConfig, config)
    if seeds < 1 or max_sentences < 0:
        raise UserError(f"--seeds is {seeds} and --max_sentences {max_sentences}; use 1 or more, and 0 (all) or more")
    if dtype not in DTYPES:
        raise UserError(f"--feature_dtype is {dtype!r}; use {' or '.join(DTYPES)}")
    options = options or HeadOptions()
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    task, splits, counts = _splits(loaded, config, max_sentences)
    names = _layer_names(layers, loaded.model.layers)
    size = bytes_needed(loaded, splits, names, dtype)
    _say(f"{size / 1e6:,.0f} MB of vectors ({dtype}) in {scratch or tempfile.gettempdir()} until the end", quiet)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=scratch or None, prefix="bert_jax-features-") as folder:
        vectors = word_vectors(
            loaded,
            splits,
            names,
            Path(folder),
            max_length=task.max_length,
            dtype=dtype,
            compute_dtype=compute_dtype,
            quiet=quiet,
        )
        with Reporter("heads", len(names) * seeds, ["heads"], quiet) as progress:
            for name in names:
                runs = []
                for seed in range(seeds):
                    runs.append(_run(task, splits, vectors[name], options, seed))
                    progress.update(len(found) * seeds + seed + 1, len(found) * seeds + seed + 1)
                width = int(vectors[name]["train"].vectors.shape[1])
                found[name] = {"width": width, "epochs": [epoch for epoch, _ in runs]} | _summary(
                    [one for _, one in runs]
                )
    return {
        "task": task.name,
        "head": dataclasses.asdict(options),
        "seeds": list(range(seeds)),
        "counts": counts,
        "layers": found,
    }


def result_table(result: dict[str, Any], metric: str) -> Table:
    """A line a layer name, with the published figures of another model beside CoNLL-2003's."""
    published = result["task"] == "conll2003" and metric == "f1"
    head = result["head"]["head"]
    title = f"{result['task']}: {head} head on frozen vectors, {metric} in %, {len(result['seeds'])} seed(s)"
    shown = Table(title=title, title_justify="left")
    columns = ["layers", "width", "dev", "test", *(["published"] if published else [])]
    for column in columns:
        shown.add_column(column, justify="left" if column == "layers" else "right")
    for name, line in result["layers"].items():
        cells = [_cell(line.get(split, {}).get(metric)) for split in ("dev", "test")]
        known = [f"{PUBLISHED[name]:.1f}" if name in PUBLISHED else ""] if published else []
        shown.add_row(name, str(line["width"]), *cells, *known)
    if published:
        shown.caption = (
            "published: another model's, BERT-Base cased with document context, a BiLSTM of 768 units, on dev "
            "(Devlin et al. 2019, table 7)"
        )
    return shown


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("bert_jax.features", DESCRIPTION)
    defaults = HeadOptions()
    parser.add_argument("--checkpoint", required=True, help="a workdir, a step in it, an export, a Hugging Face folder")
    parser.add_argument("--config", required=True, help="a recipe of tags, as configs/tagging.py:task=conll2003")
    parser.add_argument("--layers", default="all", metavar="NAME,...", help="see above (default: all)")
    parser.add_argument("--head", default=defaults.head, help="bilstm or linear (default: bilstm)")
    for name, said in (
        ("hidden", "units of the BiLSTM in each direction"),
        ("batch_size", "sentences"),
        ("epochs", "at most so many"),
        ("patience", "epochs without a better dev metric before it stops"),
    ):
        value = getattr(defaults, name)
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{said} (default: {value})")
    parser.add_argument("--learning_rate", type=float, default=defaults.learning_rate, help="Adam's (default: 1e-3)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="heads a layer name (default: 3)")
    parser.add_argument("--max_sentences", type=int, default=0, metavar="N", help="the first of each file (0: all)")
    parser.add_argument("--feature_dtype", default="float16", help="how vectors are kept: float16 or float32")
    parser.add_argument("--compute_dtype", default="float32", help="the model's: float32 or bfloat16")
    parser.add_argument("--scratch", default="", metavar="DIR", help="where vectors lie (default: the system's)")
    parser.add_argument("--output", default="", metavar="FILE.json", help="the table as JSON; it must not exist")
    checkpoint_average.add_argument(parser)
    known, overrides = parser.parse_known_args(list(arguments))
    if known.output:
        refuse_existing(Path(known.output))
    result = features(
        known.checkpoint,
        config_lib.read_flags(known.config, overrides),
        layers=known.layers,
        options=HeadOptions(**{field.name: getattr(known, field.name) for field in dataclasses.fields(HeadOptions)}),
        seeds=known.seeds,
        max_sentences=known.max_sentences,
        dtype=known.feature_dtype,
        compute_dtype=known.compute_dtype,
        scratch=known.scratch,
        average=known.average,
        quiet=False,
    )
    if known.output:
        write_json(Path(known.output), result)
    metric = next(iter(next(iter(result["layers"].values()))["dev"]))
    Console(stderr=True).print(result_table(result, metric))
    print(json.dumps(result))


def _splits(
    loaded: LoadedModel, config: FinetuneConfig, max_sentences: int
) -> tuple[Task, dict[str, TagRows], dict[str, dict[str, int]]]:
    task, files = registry.resolve(config.task)
    if task.kind != "tagging":
        raise UserError(f"task.kind is {task.kind!r}; features are of words: use a tagging task, as configs/tagging.py")
    if "dev" not in files:
        raise UserError("there is no dev file, and a head stops by it; name one: --config.task.dev=FILE")
    task.check_model(loaded.model)
    read = {name: registry.read(task, path, label_required=name != "test") for name, path in files.items()}
    task = task.complete(read["train"])
    rows: dict[str, TagRows] = {}
    counts = {}
    for name, split in read.items():
        if not split.labelled:
            continue
        cut = dataclasses.replace(split, items=split.items[: max_sentences or None])
        encoded = task.encode(cut, loaded.tokenizer)
        assert isinstance(encoded, TagRows)
        rows[name], counts[name] = encoded, measurement.counts(encoded, task, loaded.tokenizer)
    return task, rows, counts


def _layer_names(layers: str, count: int) -> list[str]:
    """The names that are asked for; `all` are those that the model has."""
    if layers == "all":
        return [name for name in LAYERS if count >= 4 or not name.endswith("_last_4")]
    names = [name.strip() for name in layers.split(",") if name.strip()]
    if not names:
        raise UserError(f"--layers is {layers!r}; use all, or names parted by commas: {', '.join(LAYERS)}")
    return list(dict.fromkeys(names))


def _run(
    task: Task, splits: dict[str, TagRows], vectors: dict[str, Any], options: HeadOptions, seed: int
) -> tuple[int, dict[str, dict[str, float]]]:
    """The epoch of the best head, and the metrics of its guesses by split."""

    def measured(split: str, guesses: np.ndarray) -> dict[str, float]:
        truth = splits[split].labels[splits[split].word_starts]
        return compute_metrics(
            TAGGING_METRICS, task.metrics, *(_by_sentence(task, splits[split], ids) for ids in (truth, guesses))
        )

    def score(guesses: np.ndarray) -> float:
        return measured("dev", guesses)[task.metrics[0]]

    trained = train_head(vectors, len(task.labels), options, seed, score)
    return trained.epoch, {split: measured(split, guesses) for split, guesses in trained.predictions.items()}


def _by_sentence(task: Task, rows: TagRows, ids: np.ndarray) -> list[list[str]]:
    tags = [task.labels[number] for number in ids]
    bounds = zip(rows.sentence_offsets[:-1], rows.sentence_offsets[1:], strict=True)
    return [tags[start:stop] for start, stop in bounds]


def _summary(runs: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By split and metric, over seeds."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for split, metrics in runs[0].items():
        found[split] = {}
        for name in metrics:
            values = [run[split][name] for run in runs]
            deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
            found[split][name] = {"mean": float(np.mean(values)), "std": deviation, "values": values}
    return found


def _cell(metric: dict[str, Any] | None) -> str:
    if metric is None:
        return "-"
    deviation = "" if metric["std"] is None else f" ± {100 * metric['std']:.1f}"
    return f"{100 * metric['mean']:.1f}{deviation}"


def _say(line: str, quiet: bool) -> None:
    Console(stderr=True, quiet=quiet).print(line, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    command.run(main)
