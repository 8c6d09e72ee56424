"""Compares the layers of a checkpoint by small tagging heads that are trained on their frozen vectors.

`features` is the job, `result_table` its table; the vectors and heads are in tasks/features.py.
"""

import argparse
import dataclasses
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import ml_collections
import numpy as np
from rich.console import Console
from rich.table import Table

from bert_jax import command_line
from bert_jax import config as config_lib
from bert_jax.config import FinetuneConfig, loading
from bert_jax.config.training import SEEDS
from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import add_average_flag, open_checkpoint
from bert_jax.model.outputs import LAYERS, MIX
from bert_jax.progress import Reporter, print_note
from bert_jax.storage.files import refuse_existing, write_json
from bert_jax.tasks import measurement, registry, trials
from bert_jax.tasks.features import HeadOptions, Trained, WordVectors, option, train_head, word_vectors
from bert_jax.tasks.inference import LayerVectors
from bert_jax.tasks.kinds.tagging import TagRows
from bert_jax.tasks.metrics import TAGGING_METRICS, compute_metrics
from bert_jax.tasks.task import Task
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train.compilation import enable_compilation_cache

DTYPES = ("float16", "float32")
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

  bert-jax features --checkpoint CHECKPOINT --config tagging:task=conll2003 --output layers.json
  bert-jax features --checkpoint CHECKPOINT --config tagging:task=ewt --layers last,4 --head linear

A word is represented by the vector of its first piece. --layers is all, or a comma-separated list of
{", ".join(LAYERS)}, mix, or numbers (0: the embeddings); see
bert-jax embed --help. With mix, each head learns a weight for the embeddings and for each layer
(Peters et al. 2018, section 3.2); the weights are printed.

The head is a two-layer BiLSTM (Devlin et al. 2019, section 5.3, use --hidden 768) or a linear layer. Its training stops
when the task's first metric on dev no longer improves. One head is trained for each layer and seed. The vectors are
computed once and stored in a temporary folder (--scratch) until the command ends; their size is printed at the start.

Only the task.* keys of the configuration are used; the flags below set how the heads are trained."""


@dataclass(frozen=True)
class FeatureOptions(HeadOptions):
    """What is compared, and how the heads are trained. Raises UserError for a value out of range."""

    layers: str = option("all", "see above (default: all)", "NAME,...")
    seeds: int | tuple[int, ...] = option(
        3, "heads trained per layer, or several different seeds, such as 0,7,9 (default: 3)", "N|SEED,..."
    )
    max_sentences: int = option(0, "use the first N of each file (default: 0, all)", alias="max_rows")
    feature_dtype: str = option("float16", "of the stored vectors: float16 (default) or float32", None, "dtype")
    compute_dtype: str = option("float32", "of the model: float32 (default), bfloat16 or auto", None)
    scratch: str = option("", "folder for the vectors (default: the system's)", "DIR")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.seeds if isinstance(self.seeds, tuple) else (self.seeds - 1,)  # the last one of a count
        if not given or len(set(given)) < len(given) or not all(0 <= seed < SEEDS for seed in given):
            raise UserError(
                f"--seeds is {self.seeds}; use a number of seeds of at least 1, or several different seeds from 0 to "
                f"{SEEDS - 1}, such as 0,7,9"
            )
        if self.max_sentences < 0:
            raise UserError(f"--max_sentences is {self.max_sentences}; use 0 (all) or more")
        if self.feature_dtype not in DTYPES:
            raise UserError(f"unknown --feature_dtype {self.feature_dtype!r}; choose from {', '.join(DTYPES)}")

    @property
    def seed_numbers(self) -> tuple[int, ...]:
        """The seeds that --seeds names or counts."""
        return self.seeds if isinstance(self.seeds, tuple) else tuple(range(self.seeds))


def features(
    checkpoint: str | Path | LoadedModel,
    config: FinetuneConfig | ml_collections.ConfigDict,
    options: FeatureOptions | None = None,
    *,
    average: str = "",
    quiet: bool = True,
) -> dict[str, Any]:
    """Returns the content of --output: `task, head, seeds, counts, layers`.

    layers holds, by layer name, `width`, `epochs` by seed, and for each split (dev, and test if it has
    labels) the `mean`, `std` (sample standard deviation; None for one seed) and `values` of each
    metric. `mix` also has `weights`, of the embeddings and of each layer, and `gamma`, the factor of
    their sum, by seed. Raises UserError for a task of another kind than tagging, for one without a dev file, and
    for a layer that the model does not have.
    """
    if isinstance(config, ml_collections.ConfigDict):
        config = config_lib.load(FinetuneConfig, config)
    options = options or FeatureOptions()
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    task, splits = _encode(loaded, config, options.max_sentences)
    names = _layer_names(options.layers, loaded.model.layers)
    model = LayerVectors(loaded, names, dtype=options.feature_dtype, compute_dtype=options.compute_dtype)
    words = sum(len(rows.word_rows) for rows in splits.values())
    size = words * sum(model.widths.values()) * np.dtype(model.dtype).itemsize
    # All vectors are stored on disk, so that the encoder runs once: every seed and epoch reads them again.
    with tempfile.TemporaryDirectory(dir=options.scratch or None, prefix="bert_jax-features-") as folder:
        print_note(f"storing {size / 1e6:,.0f} MB of vectors ({model.dtype}) in {folder} until the end", quiet)
        vectors = word_vectors(model, splits, Path(folder), task.max_length, quiet)
        found: dict[str, Any] = {}
        with Reporter("heads", len(vectors) * len(options.seed_numbers), ["heads"], quiet) as progress:
            for name, of_layer in vectors.items():
                runs, mixed = [], loaded.model.layers + 1 if name == MIX else 0
                for seed in options.seed_numbers:
                    runs.append(_train(task, splits, of_layer, options, seed, mixed))
                    progress.advance(1, 1)
                width = model.widths[name] // (mixed or 1)
                found[name] = {"width": width, "epochs": [head.epoch for head, _ in runs]}
                if mixed:
                    mixes = [head.mix for head, _ in runs if head.mix]
                    found[name] |= {"weights": [mix.weights for mix in mixes], "gamma": [mix.gamma for mix in mixes]}
                for split in runs[0][1]:
                    found[name][split] = trials.summary([metrics[split] for _, metrics in runs])
    return {
        "task": task.name,
        "head": {item.name: getattr(options, item.name) for item in fields(HeadOptions)},
        "seeds": list(options.seed_numbers),
        "counts": {name: measurement.counts(rows, task, loaded.vocabulary) for name, rows in splits.items()},
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
    captions = []
    if MIX in result["layers"]:
        mix = result["layers"][MIX]
        weights = " ".join(f"{weight:.3f}" for weight in np.mean(mix["weights"], axis=0))
        captions.append(f"mix: weights {weights} (from the embeddings up), gamma {np.mean(mix['gamma']):.3f}, means")
    if published:
        captions.append(
            "published: another model's, BERT-Base cased with document context, a BiLSTM of 768 units, on dev "
            "(Devlin et al. 2019, table 7)"
        )
    shown.caption = "\n".join(captions) or None
    return shown


def main(arguments: Sequence[str]) -> None:
    parser = command_line.Parser("bert-jax features", DESCRIPTION)
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="a workdir, a step in it, an export, a Hugging Face folder, or hf:NAME",
    )
    parser.add_argument("--config", required=True, help="a tagging recipe, such as tagging:task=conll2003")
    for item in fields(FeatureOptions):
        names = [f"--{name}" for name in (item.name, item.metadata["alias"]) if name]
        kind = _seeds if item.name == "seeds" else type(item.default)
        texts = {name: item.metadata[name] for name in ("help", "metavar")}
        parser.add_argument(*names, dest=item.name, type=kind, default=item.default, **texts)
    parser.add_argument("--output", default="", metavar="FILE.json", help="write the results here; must not exist yet")
    add_average_flag(parser)
    known, overrides = parser.parse_known_args(list(arguments))
    enable_compilation_cache()
    for override in overrides:
        _refuse_without_effect(override)
    if known.output:
        refuse_existing(Path(known.output))
    result = features(
        known.checkpoint,
        config_lib.from_flags(FinetuneConfig, known.config, overrides),
        FeatureOptions(**{item.name: getattr(known, item.name) for item in fields(FeatureOptions)}),
        average=known.average,
        quiet=False,
    )
    if known.output:
        write_json(Path(known.output), result)
    metric = next(iter(next(iter(result["layers"].values()))["dev"]))
    Console(stderr=True).print(result_table(result, metric))
    print(json.dumps(result))


def _flags() -> set[str]:
    """The names of all flags that set how heads are trained."""
    return {name for item in fields(FeatureOptions) for name in (item.name, item.metadata["alias"]) if name}


def _seeds(text: str) -> int | tuple[int, ...]:
    """Parses --seeds: one number, which is a count, or several seeds."""
    try:
        numbers = tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of seeds nor several seeds, such as 0,7,9"
        ) from None
    return numbers if len(numbers) > 1 else numbers[0]


def _refuse_without_effect(override: str) -> None:
    """Raises UserError for a key of the configuration other than the task's, which would change nothing."""
    match = re.match(r"--?(?:config\.)?([\w.]+)", override)
    key = loading.KEYS.get(match[1], match[1]) if match else "task."
    if not key.startswith("task."):
        section, _, name = key.rpartition(".")
        same = section in ("", "optimizer") and name in _flags()
        advice = f"use --{name}" if same else "the flags of --help set how heads are trained"
        raise UserError(f"--config.{key} has no effect on features, which trains heads only; {advice}")


def _encode(loaded: LoadedModel, config: FinetuneConfig, max_sentences: int) -> tuple[Task, dict[str, TagRows]]:
    """Returns the task, with its labels, and the first sentences of each labelled split."""
    task, files = registry.resolve(config.task)
    if task.kind != "tagging":
        raise UserError(
            f"config.task.kind is {task.kind!r}; use a tagging task (kind tagging), such as those of the recipe tagging"
        )
    if "dev" not in files:
        raise UserError(
            "the task has no dev file, which decides when training stops; set one with --config.task.dev=FILE"
        )
    task.check_model(loaded.model)
    splits = {name: registry.read(task, path, label_required=name != "test") for name, path in files.items()}
    task = task.complete(splits["train"])
    tokenizer = Tokenizer(loaded.vocabulary.spec)
    rows = {}
    for name, split in splits.items():
        if split.labelled:
            part = dataclasses.replace(split, items=split.items[: max_sentences or None])
            rows[name] = cast(TagRows, task.encode(part, tokenizer))
    return task, rows


def _layer_names(layers: str, count: int) -> list[str]:
    """Returns the layer names in --layers without repetitions; `all` is all that a model of `count` layers has."""
    if layers == "all":
        return [name for name in LAYERS if count >= 4 or not name.endswith("_last_4")]
    names = [name.strip() for name in layers.split(",") if name.strip()]
    if not names:
        raise UserError(f"--layers is {layers!r}; use all, or a comma-separated list of {', '.join(LAYERS)}, {MIX}")
    return list(dict.fromkeys(names))


def _train(
    task: Task,
    splits: Mapping[str, TagRows],
    vectors: dict[str, WordVectors],
    options: HeadOptions,
    seed: int,
    mixed: int = 0,
) -> tuple[Trained, dict[str, dict[str, float]]]:
    """Returns the best head, which mixes so many layers, and the metrics of its predictions by split."""

    def by_sentence(ids: np.ndarray, rows: TagRows) -> list[list[str]]:
        tags = [task.labels[number] for number in ids]
        return [tags[start:stop] for start, stop in pairwise(rows.sentence_offsets)]

    def measured(split: str, predictions: np.ndarray) -> dict[str, float]:
        labels, predicted = (by_sentence(ids, splits[split]) for ids in (vectors[split].labels, predictions))
        return compute_metrics(TAGGING_METRICS, task.metrics, labels, predicted)

    def score(predictions: np.ndarray) -> float:
        return measured("dev", predictions)[task.metrics[0]]

    trained = train_head(vectors, len(task.labels), options, seed, score, mixed)
    return trained, {split: measured(split, predictions) for split, predictions in trained.predictions.items()}


def _cell(metric: dict[str, Any] | None) -> str:
    if metric is None:
        return "-"
    deviation = "" if metric["std"] is None else f" ± {100 * metric['std']:.1f}"
    return f"{100 * metric['mean']:.1f}{deviation}"
