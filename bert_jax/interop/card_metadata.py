"""The metadata of a model card, in YAML: what the Hugging Face Hub shows, and by which it finds a model.

`front_matter` renders them, and `read` reads those of a folder's README.md. Language and license cannot be computed:
they are options of an export, or inherited from the model that a run began with.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.storage import location
from bert_jax.storage.files import read_json
from bert_jax.train.evaluation import is_threshold

CARD_FILE = "README.md"
# Keys of a card that a model keeps when it is exported again, and that models trained from it inherit.
KEPT = ("language", "license", "license_name", "license_link", "base_model", "datasets")
# Keys of result.json that are no scores.
NO_SCORES = ("step", "tokens", "seconds", "steps", "counts", "start", "best", "baseline")
# The Hub's names of metrics, if they differ.
_METRICS = {
    "mcc": "matthews_correlation",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
    "macro_f1": "f1",
    "weighted_f1": "f1",
    "span_f1": "f1",
    "auroc": "roc_auc",
}
# A data set of the Hub: hf:ORG/NAME, or a file hf://datasets/ORG/NAME/FILE.
_DATASET = re.compile(r"hf:(?://datasets/)?([^/:@\s]+/[^/:@\s]+)")
_MOST_RUNS = 20  # that began with one another


def front_matter(loaded: LoadedModel, library: str, pipeline: str, tags: Sequence[str], name: str) -> str:
    """Renders the metadata, between lines of dashes.

    Args:
        loaded: The model.
        library: Its library, by the Hub's name.
        pipeline: Its task, by the Hub's name.
        tags: Further tags.
        name: The model's name in the table of its scores.
    """
    from huggingface_hub.repocard_data import EvalResult, ModelCardData

    known = {**_inherited(str(loaded.training.get("init_from") or "")), **loaded.card}
    if loaded.origin.startswith(location.PREFIX):
        known["base_model"] = loaded.origin.removeprefix(location.PREFIX)
    datasets = list(dict.fromkeys(_datasets((loaded.training.get("data"), loaded.training.get("task"), loaded.data))))
    # A run's data are its own; a model that was only read has those of its card.
    datasets = datasets or ([] if loaded.training else known.get("datasets") or [])
    measured = _measured_on(loaded)
    results = [
        EvalResult(
            task_type=pipeline,
            dataset_type=datasets[0] if datasets else measured,
            dataset_name=measured,
            dataset_split="validation",
            metric_type=_METRICS.get(metric, metric),
            metric_name=metric,
            metric_value=round(value, 6),
        )
        for metric, (value, _, _) in scores(loaded.metrics).items()
        if math.isfinite(value)
    ]
    kept: dict[str, Any] = {key: known.get(key) for key in KEPT if key != "datasets"}
    data = ModelCardData(
        **kept,
        library_name=library,
        pipeline_tag=pipeline,
        tags=list(tags),
        datasets=datasets or None,
        metrics=sorted({result.metric_type for result in results}) or None,
        model_name=name if results else None,
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def read(folder: Path) -> dict[str, Any]:
    """Reads the metadata that a model keeps from a folder's card; empty without one, or if it is damaged."""
    file = folder / CARD_FILE
    if not file.is_file():
        return {}
    from huggingface_hub import metadata_load

    try:
        values = metadata_load(file) or {}
    except Exception:  # a card describes a model, which opens without it, and the errors of a YAML parser are many
        return {}
    return {key: values[key] for key in KEPT if values.get(key)} if isinstance(values, dict) else {}


def scores(metrics: Mapping[str, Any]) -> dict[str, tuple[float, float | None, int]]:
    """The scores in result.json by name: value or mean, standard deviation if there are several seeds, and seeds."""
    by_name: dict[str, tuple[float, float | None, int]] = {}
    for name, value in metrics.items():
        if name in NO_SCORES:
            continue
        if not isinstance(value, Mapping):
            if isinstance(value, int | float) and not isinstance(value, bool):
                by_name[name] = value, None, 1
        # A group of metrics, such as `metrics` of a fine-tuning run.
        elif "mean" not in value:
            by_name |= scores(value)
        elif value["mean"] is not None and not is_threshold(name):  # a metric of a task
            by_name[name] = value["mean"], value.get("std"), len(value.get("values", ()))
    return by_name


def _measured_on(loaded: LoadedModel) -> str:
    """Names the data on which the scores were measured."""
    if loaded.data:
        return ", ".join(dict.fromkeys(source["name"] for source in loaded.data))
    task = loaded.task or {}
    given = loaded.training.get("task") or {}
    file = next((str(given[part]) for part in ("dev", "train") if given.get(part)), "")
    named = task.get("name", "own")
    return named if named != "own" else PurePath(file).name or "own"


def _datasets(value: Any) -> Iterator[str]:
    """Yields the Hub's data sets named in a configuration value."""
    if isinstance(value, str):
        yield from _DATASET.findall(value)
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _datasets(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _datasets(entry)


def _inherited(start: str) -> dict[str, Any]:
    """Returns the metadata inherited from the model in `start`, through earlier runs; uses no network."""
    for _ in range(_MOST_RUNS):
        if not start:
            return {}
        if str(location.model_address(start)).startswith(location.PREFIX):
            return _of_base(start.removeprefix(location.PREFIX))
        folder = Path(start)
        # init_from may name a step in a run's checkpoints; the configuration is the run's.
        if folder.parent.name == "checkpoints":
            folder = folder.parent.parent
        try:
            values = read_json(folder / "config.json")
        except (OSError, UserError):  # it was removed, or is in a store
            return {}
        if "model_type" in values:
            # The data sets on the card trained the earlier model, not this one.
            known = read(folder)
            return {key: value for key, value in known.items() if key != "datasets"}
        start = str((values.get("training") or {}).get("init_from") or "")
    return {}


def _of_base(name: str) -> dict[str, Any]:
    """Returns the metadata inherited from a Hub model, whose card may be in the cache."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, CARD_FILE)
    known = read(Path(cached).parent) if isinstance(cached, str) else {}
    licensed = {key: value for key, value in known.items() if key.startswith("license")}
    # A model of many languages is mostly trained further on one of them.
    language = known.get("language")
    if isinstance(language, str) or (isinstance(language, list) and len(language) == 1):
        licensed["language"] = language
    return licensed | {"base_model": name}
