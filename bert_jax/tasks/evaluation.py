"""Evaluates a checkpoint on held-out shards, or a fine-tuned checkpoint on labelled files."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import jax

from bert_jax.config import (
    MaskedLM,
    MeshConfig,
    ObjectiveConfig,
    Phases,
    PretrainConfig,
    ReplacedTokens,
    TrainConfig,
    load,
)
from bert_jax.data.example import Batch
from bert_jax.data.loader import DatasetLoader, SingleMasks, WordCounts, check_tokenizer, count_words
from bert_jax.data.shards import Dataset, open_dataset
from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params
from bert_jax.progress import Reporter
from bert_jax.tasks import measurement, retrieval
from bert_jax.tasks.embedder import settings_of
from bert_jax.tasks.fill_mask import masked_model
from bert_jax.tasks.reading.tables import Columns
from bert_jax.train import distributed, sharding
from bert_jax.train.evaluation import Rows, evaluate_batches
from bert_jax.train.objectives import OBJECTIVES, Likelihood, MaskedLMObjective, Objective, pretraining_objective
from bert_jax.train.objectives.pretraining import ShardTraits, resolved
from bert_jax.train.run import runtime_of
from bert_jax.train.step import Plan

MOST_NATS = 700.0  # per token or word; the exponential of more may exceed the largest float
MESH_FLAG = "--mesh"

# The options that only one kind of data uses; batch_size, compute_dtype and, except for retrieval, mesh are for all.
USED = {
    "retrieval": ("max_length", "truncate_dim", "skip_self"),
    "task": (
        *("text", "text_pair", "label", "label_map", "metrics", "positive"),
        *("null_threshold", "max_length", "truncate_dim", "mesh"),
    ),
    "shards": ("max_rows", "pseudo_perplexity", "mesh"),
}


def objective_metrics(loaded: LoadedModel, dataset: Dataset, config: TrainConfig, max_rows: int = 0) -> dict[str, Any]:
    """Measures the objective that the model was trained with, then the perplexities of its likelihoods.

    Args:
        max_rows: The number of rows that are measured, from the first; 0: all.

    Raises:
        UserError: The model has no language-model head, or another tokenizer than the rows.
    """
    loader = DatasetLoader(dataset, loaded.vocabulary, seed=0)
    objective = _objective(loaded, dataset)
    metrics: dict[str, Any] = _measure(
        loaded, objective, config, lambda size, rows: loader.evaluation_batches(size, max_rows, rows)
    )
    if objective.likelihoods:
        counts = count_words(dataset, loaded.vocabulary, max_rows)
        for term, likelihood in objective.likelihoods.items():
            if f"{term}_loss" in metrics:
                metrics |= perplexities(metrics[f"{term}_loss"], counts, likelihood)
    return metrics


def measure_pseudo_perplexity(
    loaded: LoadedModel, dataset: Dataset, config: TrainConfig, max_rows: int = 0
) -> dict[str, float | None]:
    """Measures a masked language model by masking one token at a time (Salazar et al. 2020, section 2.3).

    A token is predicted from all others in its sequence, including both texts of a pair. Special tokens are never
    masked, and not counted. If the model was trained with config.objective=replaced_tokens, its generator is measured.
    Prints the progress.

    Args:
        max_rows: The number of rows that are measured, from the first; 0: all.

    Returns:
        `pseudo_loss`, the mean of -log P in nats per token; `pseudo_perplexity`, its exponential; and
        `pseudo_word_perplexity`, which divides by the number of words.

    Raises:
        UserError: The model predicts no masked tokens, or has another tokenizer than the rows.
    """
    model = masked_model(loaded, "--pseudo_perplexity")
    check_tokenizer(dataset, model.vocabulary)
    masks = SingleMasks(dataset, model.vocabulary, max_rows)
    quiet = not distributed.is_primary()
    with Reporter("pseudo-perplexity", masks.count, ("rows",), quiet=quiet) as progress:

        def batches(size: int, rows: Rows) -> Iterator[Batch]:
            for batch in masks.batches(size, rows):
                yield batch
                # The evaluator requests a batch while the last one is computed.
                progress.advance(size, size)

        metrics = _measure(model, MaskedLMObjective(next_sentence=False), config, batches)
    # The rows have no ordinary token.
    if "mlm_loss" not in metrics:
        return {}
    loss = metrics["mlm_loss"]
    counts = count_words(dataset, model.vocabulary, max_rows)
    return {"pseudo_loss": loss, **perplexities(loss, counts, Likelihood("pseudo_", with_special=False))}


def perplexities(loss: float, counts: WordCounts, likelihood: Likelihood) -> dict[str, float | None]:
    """Turns a loss in nats per token into PREFIXperplexity and, per word, PREFIXword_perplexity.

    A perplexity is None if it exceeds all floats or there are no words.
    """
    tokens, words = counts.ordinary, counts.words
    if likelihood.with_special:
        # A predicted special token counts as a word, as the end of a sentence does in published figures of the Penn
        # Treebank and WikiText.
        tokens, words = tokens + counts.special, words + counts.special
    nats = {"perplexity": loss, "word_perplexity": loss * tokens / words if words else math.inf}
    return {
        f"{likelihood.prefix}{name}": math.exp(value) if value < MOST_NATS else None for name, value in nats.items()
    }


def _measure(
    loaded: LoadedModel, objective: Objective, config: TrainConfig, batches: Callable[[int, Rows], Iterator[Batch]]
) -> dict[str, float]:
    """Measures an objective on the batches of batches(rows in a global batch, rows that this process loads)."""
    mesh = sharding.make_mesh(config.mesh)
    size = sharding.whole_rows(config.batch_size, mesh)
    plan = Plan(loaded.model, runtime_of(config), objective)
    with jax.set_mesh(mesh):
        # Heads that the objective does not read stay on the host.
        paths = layers.flatten(abstract_params(loaded.model, objective.heads))
        params = sharding.put(layers.unflatten({path: loaded.params[path] for path in paths}), mesh)
        rows = sharding.local_rows(size, mesh)
        return evaluate_batches(plan, mesh, params, {"": batches(size, rows)}, size)


def _objective(loaded: LoadedModel, dataset: Dataset) -> Objective:
    """Makes the objective for which the checkpoint has heads and the shards have labels."""
    heads, traits = loaded.heads, ShardTraits.of(dataset, loaded.vocabulary)
    if not (heads.lm or heads.mlm or heads.generator or heads.named):
        raise UserError(f"{loaded.origin} has no language-model head to evaluate; use a pretrained checkpoint")
    # Fine-tuned and imported checkpoints record no objective; the extension that defined one may not be imported.
    trained = loaded.training.get("objective", {})
    known = trained if trained.get("kind") in OBJECTIVES else {}
    options = resolved(load(ObjectiveConfig, known, "config.objective"), loaded.model)
    # The heads decide about the rest, because conversion and export may have changed them.
    if heads.generator:
        weight = trained.get("replaced_weight", ReplacedTokens.replaced_weight)
        options = ReplacedTokens(heads.generator / loaded.model.width, weight)
    elif isinstance(options, Phases):
        options = MaskedLM(z_loss=options.z_loss)  # the last phase's
    if isinstance(options, MaskedLM):
        options = dataclasses.replace(
            options,
            next_sentence=heads.next_sentence,
            span_boundary=traits.mask_unit == "span" and heads.span_boundary,
        )
    return pretraining_objective(PretrainConfig(objective=options), loaded.model, [traits])


class EvaluateOptions(TypedDict, total=False):
    """The options of `evaluate` that an opened model takes."""

    batch_size: int
    compute_dtype: str
    max_rows: int
    label_map: Mapping[str, str]
    max_length: int
    truncate_dim: int
    skip_self: bool
    metrics: Sequence[str]
    positive: str
    null_threshold: float | None
    mesh: MeshConfig | None
    pseudo_perplexity: bool


def evaluate(
    checkpoint: str | Path | LoadedModel,
    data: str | Path,
    *,
    batch_size: int = 64,
    compute_dtype: str = "auto",
    max_rows: int = 0,
    columns: Columns | None = None,
    label_map: Mapping[str, str] | None = None,
    max_length: int = 0,
    truncate_dim: int = 0,
    skip_self: bool = False,
    metrics: Sequence[str] = (),
    positive: str = "",
    null_threshold: float | None = None,
    average: str = "",
    mesh: MeshConfig | None = None,
    pseudo_perplexity: bool = False,
) -> dict[str, Any]:
    """Measures a checkpoint: a pretrained one on shards, a fine-tuned one on files, or one that embeds in retrieval.

    Args:
        data: Shards, a labelled file or folder of the checkpoint's task, or a folder in BEIR's layout.
        max_rows, pseudo_perplexity: For shards, the number of rows (0: all), and whether tokens are masked in turn.
        skip_self: For retrieval, as in retrieval.measure_beir.
        average: The average in a checkpoint that is given by its path, as in open_checkpoint.
        mesh: By default, rows are sharded over all devices. The other options are those of measurement.evaluate.

    Returns:
        Metrics by name: `loss`, `mlm_loss`, `mlm_accuracy`, ... and perplexities, or the task's, with its
        `counts`. An undefined metric, such as a correlation with a constant, is None.

    Raises:
        UserError: The checkpoint or the mesh does not fit the data, or the data does not use an option.
    """
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    names = columns or Columns()
    options: dict[str, object] = {"text": names.text, "text_pair": names.text_pair, "label": names.label}
    options |= {"metrics": metrics, "label_map": label_map, "positive": positive, "max_rows": max_rows}
    options |= {"max_length": max_length, "truncate_dim": truncate_dim, "skip_self": skip_self}
    options |= {"pseudo_perplexity": pseudo_perplexity, "null_threshold": null_threshold is not None}
    kind = _checked_kind(loaded, data, options | {"mesh": mesh not in (None, MeshConfig())})
    if kind == "retrieval":
        settings = settings_of(loaded, max_length=max_length, truncate_dim=truncate_dim)
        return retrieval.evaluate(loaded, Path(data), settings, batch_size, compute_dtype, skip_self)
    # Before files are read, because a mesh that does not fit is a mistake in the command.
    config = TrainConfig(batch_size=batch_size, compute_dtype=compute_dtype, mesh=mesh or MeshConfig())
    sharding.check_model(loaded.model, sharding.make_mesh(config.mesh, flag=MESH_FLAG), MESH_FLAG)
    if kind == "task":
        measured = measurement.evaluate(
            loaded, data, config, columns, label_map, max_length, metrics, positive, null_threshold, truncate_dim
        )
        for line in measured.remarks:
            distributed.note(line)
        # JSON has no NaN.
        defined = {name: None if math.isnan(value) else value for name, value in measured.metrics.items()}
        return {**defined, "counts": measured.counts}
    dataset = open_dataset(data, "eval")  # of DIR/train, its own part
    pseudo = measure_pseudo_perplexity(loaded, dataset, config, max_rows) if pseudo_perplexity else {}
    return objective_metrics(loaded, dataset, config, max_rows) | pseudo


def _checked_kind(loaded: LoadedModel, data: str | Path, options: Mapping[str, object]) -> str:
    """Returns the kind of data to evaluate on. Raises UserError for options that it does not use."""
    kind, reason = "shards", "the checkpoint has no task, and the evaluation on shards"
    if retrieval.is_beir(Path(data)):
        kind, reason = "retrieval", f"{data} is a retrieval data set, and its evaluation"
    elif loaded.task:
        kind, reason = "task", f"the checkpoint was fine-tuned for {loaded.task['name']}, and the evaluation of tasks"
    if unused := ", ".join(f"--{name}" for name, value in options.items() if value and name not in USED[kind]):
        raise UserError(f"{reason} does not use {unused}; omit it")
    return kind
