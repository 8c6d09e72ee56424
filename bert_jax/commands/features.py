"""Compares a checkpoint's layers by small tagging heads, which are trained on their frozen vectors."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bert_jax import config as config_lib
from bert_jax.config import FinetuneConfig, loading
from bert_jax.config.options import option, parse_known
from bert_jax.errors import UserError
from bert_jax.interop.open_checkpoint import CheckpointOptions
from bert_jax.model.outputs import LAYERS, MIX
from bert_jax.storage.files import refuse_existing, write_json
from bert_jax.tasks.features import FeatureOptions, features
from bert_jax.train.compilation import enable_compilation_cache

# Dev F1 on CoNLL-2003 with features of BERT-Base cased (Devlin et al. 2019, table 7).
PUBLISHED = {
    "embeddings": 91.0,
    "second_to_last": 95.6,
    "last": 94.9,
    "sum_last_4": 95.9,
    "concat_last_4": 96.1,
    "sum_all": 95.5,
}

DESCRIPTION = f"""Compares a model's layers: trains a small tagging head on the frozen vectors of each.

  bert-jax features --checkpoint CHECKPOINT --config tagging:task=conll2003 --output layers.json
  bert-jax features --checkpoint CHECKPOINT --config tagging:task=ewt --layers last,4 --head linear

A word has the vector of its first piece. --layers is all, or a comma-separated list of
{", ".join(LAYERS)}, mix, or numbers (0: the embeddings), as
in bert-jax embed --help. With mix, a head learns a weight for the embeddings and every layer (Peters et al. 2018,
section 3.2); the weights are printed.

The head is a two-layer BiLSTM (Devlin et al. 2019, section 5.3, use --hidden 768) or a linear layer. One is trained for
each layer and seed, until the task's first metric on dev no longer improves. The vectors are computed once and stored
in a temporary folder (--scratch) until the command ends; their size is printed at the start.

Only the task.* keys of the configuration are used; the flags below set how the heads are trained."""


def result_table(result: dict[str, Any], metric: str) -> Table:
    """Returns a table with a row for each layer; for CoNLL-2003, it includes published figures of another model."""
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


@dataclass(frozen=True, kw_only=True)
class Options(FeatureOptions, CheckpointOptions):
    config: str = option(help="a tagging recipe, such as tagging:task=conll2003", metavar="RECIPE")
    output: str = option("", "write the results here, too; must not exist yet", metavar="FILE.json")


def main(arguments: Sequence[str]) -> None:
    options, overrides = parse_known("bert-jax features", DESCRIPTION, Options, arguments)
    enable_compilation_cache()
    # Mistakes are reported before the model is opened and its vectors are computed, which takes minutes.
    for override in overrides:
        _refuse_without_effect(override)
    if options.output:
        refuse_existing(Path(options.output))
    config = config_lib.from_flags(FinetuneConfig, options.config, overrides)
    result = features(options.checkpoint, config, options, average=options.average, quiet=False)
    if options.output:
        write_json(Path(options.output), result)
    # The first metric of the task is the one by which training stops; the table shows it for every layer.
    metric = next(iter(next(iter(result["layers"].values()))["dev"]))
    Console(stderr=True).print(result_table(result, metric))
    print(json.dumps(result))


def _refuse_without_effect(override: str) -> None:
    """Raises UserError for a configuration key outside task.*, which would change nothing."""
    # An argument may be a key (--config.task.text), or a short flag of the other commands (--text) that sets one.
    # An argument without dashes is the value of the flag before it.
    match = re.match(r"--?(?:config\.)?([\w.]+)", override)
    key = loading.KEYS.get(match[1], match[1]) if match else "task."
    if not key.startswith("task."):
        section, _, name = key.rpartition(".")
        flags = {name for item in fields(FeatureOptions) for name in (item.name, *item.metadata["aliases"])}
        same = section in ("", "optimizer") and name in flags
        advice = f"use --{name}" if same else "the flags of --help set how heads are trained"
        raise UserError(f"--config.{key} has no effect on features, which trains heads only; {advice}")


def _cell(metric: dict[str, Any] | None) -> str:
    if metric is None:
        return "-"
    deviation = "" if metric["std"] is None else f" ± {100 * metric['std']:.1f}"
    return f"{100 * metric['mean']:.1f}{deviation}"
