"""Compares the layers of a frozen model on a tagging task by training a small head on the vectors of each."""

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

# Dev F1 on CoNLL-2003 with features of BERT-Base cased (Devlin et al. 2019, table 7).
PUBLISHED = {
    "embeddings": 91.0,
    "second_to_last": 95.6,
    "last": 94.9,
    "sum_last_4": 95.9,
    "concat_last_4": 96.1,
    "sum_all": 95.5,
}

DESCRIPTION = f"""Trains a small tagging head on the frozen vectors of each layer of a model, and compares the layers.

  python -m bert_jax.features --checkpoint CHECKPOINT --config configs/tagging.py:task=conll2003 --output layers.json
  python -m bert_jax.features --checkpoint CHECKPOINT --config configs/tagging.py:task=ewt --layers last,4 --head linear

A word is represented by the vector of its first piece. --layers is all, or a comma-separated list of
{", ".join(LAYERS)}, or numbers (0: the embeddings); see
python -m bert_jax.embed --help.

The head is a two-layer BiLSTM (Devlin et al. 2019, section 5.3, use --hidden 768) or a linear layer. Its training stops
when the task's first metric on dev no longer improves. One head is trained for each layer and seed. The vectors are
computed once and stored in a temporary folder (--scratch) until the command ends; their size is printed at the start.

Only the task.* keys of the configuration are used; the flags below set how the heads are trained."""


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
    """Returns the content of --output: `task, head, seeds, counts, layers`.

    layers holds, by layer name, `width`, `epochs` by seed, and for each split (dev, and test if it has
    labels) the `mean`, `std` (sample standard deviation; None for one seed) and `values` of each
    metric. max_sentences limits each split to its first sentences; 0 means all. Raises UserError for
    a task of another kind than tagging, for one without a dev file, and for a layer that the model
    does not have.
    """
    if isinstance(config, ml_collections.ConfigDict):
        config = config_lib.load(FinetuneConfig, config)
    if seeds < 1 or max_sentences < 0:
        raise UserError(
            f"--seeds is {seeds} and --max_sentences is {max_sentences}; use at least 1 seed, and 0 (all) or more"
        )
    if dtype not in DTYPES:
        raise UserError(f"unknown --feature_dtype {dtype!r}; choose from {', '.join(DTYPES)}")
    options = options or HeadOptions()
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    task, splits, counts = _splits(loaded, config, max_sentences)
    names = _layer_names(layers, loaded.model.layers)
    size = bytes_needed(loaded, splits, names, dtype)
    _print(
        f"storing {size / 1e6:,.0f} MB of vectors ({dtype}) in {scratch or tempfile.gettempdir()} until the end", quiet
    )
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
        found = _train_heads(task, splits, vectors, options, seeds, quiet)
    return {
        "task": task.name,
        "head": dataclasses.asdict(options),
        "seeds": list(range(seeds)),
        "counts": counts,
        "layers": found,
    }


def result_table(result: dict[str, Any], metric: str) -> Table:
    """Returns a table with one row per layer; for CoNLL-2003 it includes published figures of another model."""
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
    parser.add_argument(
        "--checkpoint", required=True, help="a workdir, a step in it, an export, or a Hugging Face folder"
    )
    parser.add_argument("--config", required=True, help="a tagging recipe, such as configs/tagging.py:task=conll2003")
    parser.add_argument("--layers", default="all", metavar="NAME,...", help="see above (default: all)")
    parser.add_argument("--head", default=defaults.head, help="bilstm or linear (default: bilstm)")
    for name, meaning in (
        ("hidden", "units of the BiLSTM in each direction"),
        ("batch_size", "sentences per batch"),
        ("epochs", "maximum number of epochs"),
        ("patience", "epochs without a better dev metric before training stops"),
    ):
        value = getattr(defaults, name)
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{meaning} (default: {value})")
    parser.add_argument("--learning_rate", type=float, default=defaults.learning_rate, help="of Adam (default: 1e-3)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="heads trained per layer (default: 3)")
    parser.add_argument(
        "--max_sentences", type=int, default=0, metavar="N", help="use the first N of each file (default: 0, all)"
    )
    parser.add_argument(
        "--feature_dtype", default="float16", help="of the stored vectors: float16 (default) or float32"
    )
    parser.add_argument("--compute_dtype", default="float32", help="of the model: float32 (default) or bfloat16")
    parser.add_argument("--scratch", default="", metavar="DIR", help="folder for the vectors (default: the system's)")
    parser.add_argument("--output", default="", metavar="FILE.json", help="write the results here; must not exist yet")
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
        raise UserError(
            f"config.task.kind is {task.kind!r}; use a tagging task (kind tagging), such as those of configs/tagging.py"
        )
    if "dev" not in files:
        raise UserError(
            "the task has no dev file, which decides when training stops; set one with --config.task.dev=FILE"
        )
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
    """Returns the layer names in --layers without repetitions; `all` is all that a model of `count` layers has."""
    if layers == "all":
        return [name for name in LAYERS if count >= 4 or not name.endswith("_last_4")]
    names = [name.strip() for name in layers.split(",") if name.strip()]
    if not names:
        raise UserError(f"--layers is {layers!r}; use all, or a comma-separated list of {', '.join(LAYERS)}")
    return list(dict.fromkeys(names))


def _train_heads(
    task: Task,
    splits: dict[str, TagRows],
    vectors: dict[str, dict[str, Any]],
    options: HeadOptions,
    seeds: int,
    quiet: bool,
) -> dict[str, Any]:
    """Trains a head for each layer and seed, and returns width, epochs and metrics by layer name."""
    found: dict[str, Any] = {}
    with Reporter("heads", len(vectors) * seeds, ["heads"], quiet) as progress:
        for name, of_layer in vectors.items():
            runs = []
            for seed in range(seeds):
                runs.append(_run(task, splits, of_layer, options, seed))
                progress.update(len(found) * seeds + seed + 1, len(found) * seeds + seed + 1)
            width = int(of_layer["train"].vectors.shape[1])
            found[name] = {"width": width, "epochs": [epoch for epoch, _ in runs]} | _summary([one for _, one in runs])
    return found


def _run(
    task: Task, splits: dict[str, TagRows], vectors: dict[str, Any], options: HeadOptions, seed: int
) -> tuple[int, dict[str, dict[str, float]]]:
    """Returns the epoch of the best head, and the metrics of its predictions by split."""

    def measured(split: str, predictions: np.ndarray) -> dict[str, float]:
        labels = splits[split].labels[splits[split].word_starts]
        return compute_metrics(
            TAGGING_METRICS, task.metrics, *(_by_sentence(task, splits[split], ids) for ids in (labels, predictions))
        )

    def score(predictions: np.ndarray) -> float:
        return measured("dev", predictions)[task.metrics[0]]

    trained = train_head(vectors, len(task.labels), options, seed, score)
    return trained.epoch, {split: measured(split, guesses) for split, guesses in trained.predictions.items()}


def _by_sentence(task: Task, rows: TagRows, ids: np.ndarray) -> list[list[str]]:
    tags = [task.labels[number] for number in ids]
    bounds = zip(rows.sentence_offsets[:-1], rows.sentence_offsets[1:], strict=True)
    return [tags[start:stop] for start, stop in bounds]


def _summary(runs: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns mean, standard deviation and values over seeds, by split and metric."""
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


def _print(line: str, quiet: bool) -> None:
    Console(stderr=True, quiet=quiet).print(line, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    command.run(main)
