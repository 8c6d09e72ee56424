"""Evaluates a checkpoint on held-out shards, or a fine-tuned checkpoint on labelled files."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from bert_jax.config.loading import literal
from bert_jax.config.options import Checked, at_least, between, from_keywords, option
from bert_jax.data.example import Batch
from bert_jax.data.loader import DatasetLoader, SingleMasks, WordCounts, check_tokenizer, count_words
from bert_jax.data.shards import Dataset, open_dataset
from bert_jax.errors import UserError, flag
from bert_jax.interop.loaded_model import LoadedModel, part_of
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params
from bert_jax.model.runtime import COMPUTE_DTYPES
from bert_jax.progress import Reporter
from bert_jax.tasks import measurement, retrieval
from bert_jax.tasks.embedder import EncodeOptions, settings_of
from bert_jax.tasks.reading.tables import Columns
from bert_jax.train import distributed, sharding
from bert_jax.train.evaluation import Rows, evaluate_batches
from bert_jax.train.objectives import OBJECTIVES, Likelihood, MaskedLMObjective, Objective, pretraining_objective
from bert_jax.train.objectives.pretraining import ShardTraits, resolved
from bert_jax.train.run import runtime_of
from bert_jax.train.step import Plan

# Measures a pretrained model on held-out shards: the metrics of its objective, perplexities, pseudo-perplexity.


MOST_NATS = 700.0  # per token or word; the exponential of more may exceed the largest float


def objective_metrics(loaded: LoadedModel, dataset: Dataset, config: TrainConfig, max_rows: int = 0) -> dict[str, Any]:
    """The metrics of the objective that the model was trained with, on the first max_rows rows (0: all).

    The perplexities of its likelihoods (Objective.likelihoods) come last. Raises UserError if the model has no
    language-model head or a tokenizer other than that of the rows.
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
    """The pseudo-perplexity of a masked language model on the first max_rows rows (0: all).

    Each token is masked in turn and predicted from all others of its sequence, both texts of a pair included (Salazar
    et al. 2020, section 2.3). `pseudo_loss` is the mean of -log P in nats, the pseudo-log-likelihood per token with the
    sign changed; `pseudo_perplexity` is its exponential, and `pseudo_word_perplexity` divides by the number of words.
    The first ordinary token counts like any other. Special tokens are given, never masked, and not counted. Of a model
    trained with config.objective=replaced_tokens, the generator is measured.

    Prints the progress. Raises UserError for a causal model, for one without a masked language model head or a mask
    token, and for a tokenizer other than that of the rows.
    """
    model = _masked_model(loaded)
    check_tokenizer(dataset, model.vocabulary)
    masks = SingleMasks(dataset, model.vocabulary, max_rows)
    quiet = not distributed.is_primary()
    with Reporter("pseudo-perplexity", masks.count, ("rows",), quiet=quiet) as progress:

        def batches(size: int, rows: Rows) -> Iterator[Batch]:
            for batch in masks.batches(size, rows):
                yield batch
                progress.advance(size, size)  # the evaluator requests a batch while the last one is computed

        metrics = _measure(model, MaskedLMObjective(next_sentence=False), config, batches)
    if "mlm_loss" not in metrics:
        return {}
    loss = metrics["mlm_loss"]
    counts = count_words(dataset, model.vocabulary, max_rows)
    return {"pseudo_loss": loss, **perplexities(loss, counts, Likelihood("pseudo_", with_special=False))}


def perplexities(loss: float, counts: WordCounts, likelihood: Likelihood) -> dict[str, float | None]:
    """PREFIXperplexity, of a loss in nats per token, and PREFIXword_perplexity, of the same loss in nats per word.

    Where special tokens are predicted, each of them counts as one word, as the end of a sentence does in published
    figures of the Penn Treebank and WikiText. A perplexity that no float can hold, or of no words, is None.
    """
    tokens, words = counts.ordinary, counts.words
    if likelihood.with_special:
        tokens, words = tokens + counts.special, words + counts.special
    per_word = loss * tokens / words if words else math.inf
    names = (f"{likelihood.prefix}perplexity", f"{likelihood.prefix}word_perplexity")
    return {
        name: math.exp(nats) if nats < MOST_NATS else None for name, nats in zip(names, (loss, per_word), strict=True)
    }


def _measure(
    loaded: LoadedModel, objective: Objective, config: TrainConfig, batches: Callable[[int, Rows], Iterator[Batch]]
) -> dict[str, float]:
    """The objective's metrics over batches(rows of a global batch, those that this process loads)."""
    mesh = sharding.make_mesh(config.mesh)
    size = sharding.whole_rows(config.batch_size, mesh)
    plan = Plan(loaded.model, runtime_of(config), objective)
    with jax.set_mesh(mesh):
        wanted = layers.flatten(abstract_params(loaded.model, objective.heads))
        params = sharding.put(layers.unflatten({path: loaded.params[path] for path in wanted}), mesh)
        rows = sharding.local_rows(size, mesh)
        return evaluate_batches(plan, mesh, params, {"": batches(size, rows)}, size)


def _objective(loaded: LoadedModel, dataset: Dataset) -> Objective:
    """Returns the objective for which the checkpoint has heads and the shards have labels."""
    heads, traits = loaded.heads, ShardTraits.of(dataset, loaded.vocabulary)
    if not (heads.lm or heads.mlm or heads.generator or heads.named):
        raise UserError(f"{loaded.origin} has no language-model head to evaluate; use a pretrained checkpoint")
    trained = loaded.training.get("objective", {})  # empty after fine-tuning and in imports
    known = trained if trained.get("kind") in OBJECTIVES else {}  # not that of an extension which is not imported
    options = resolved(load(ObjectiveConfig, known, "config.objective"), loaded.model)
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


def _masked_model(loaded: LoadedModel) -> LoadedModel:
    if loaded.heads.generator:
        loaded = part_of(loaded, "generator")
    if loaded.model.causal:
        raise UserError(
            f"{loaded.origin} is a causal model, whose perplexity is printed without --pseudo_perplexity; leave it out"
        )
    if not loaded.heads.mlm:
        raise UserError(
            f"{loaded.origin} has no masked language model head, which --pseudo_perplexity needs; use a checkpoint of "
            "a masked language model"
        )
    if not loaded.vocabulary.has_mask:
        raise UserError(f"the vocabulary of {loaded.origin} has no mask token, which --pseudo_perplexity needs")
    return loaded


MESH_FLAG = "--mesh"


TASK_FILES = "columns and labels of task files"


def _label_map(text: str) -> dict[str, str]:
    try:
        return {str(label): str(name) for label, name in literal(text).items()}
    except (ValueError, AttributeError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a map of labels, such as {{0: NEGATIVE, 1: POSITIVE}}"
        ) from None


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(Checked):
    """What is measured: of Model.evaluate and `bert-jax evaluate`, which describes them."""

    batch_size: int = option(64, "rows per batch", metavar="N", valid=at_least(1))
    compute_dtype: str = option("auto", "of the model", choices=(*COMPUTE_DTYPES, "auto"))
    max_rows: int = option(0, "shards: measure the first N rows; 0: all", metavar="N", valid=at_least(0))
    pseudo_perplexity: bool = option(False, "shards: also mask each token in turn, for masked language models")
    max_length: int = option(0, "truncate texts to N tokens; default: as fine-tuned; not for shards", metavar="N")
    truncate_dim: int = option(0, "vectors: use the first N dimensions; default: as the checkpoint says", metavar="N")
    skip_self: bool = option(False, "retrieval: a query does not find the document of its own _id")
    metrics: tuple[str, ...] = option(
        (), "those to print, such as accuracy,macro_f1; default: as fine-tuned", metavar="NAME,...", section=TASK_FILES
    )
    positive: str = option(
        "",
        "the class of f1, precision and recall; default: as fine-tuned",
        metavar="LABEL",
        section=TASK_FILES,
    )
    null_threshold: float | None = option(
        None,
        "give no answer if its probability exceeds P; default: as fine-tuned, else 0.5",
        metavar="P",
        valid=between(0, 1),
        section=TASK_FILES,
    )
    label_map: dict[str, str] | None = option(
        None,
        "meaning of the labels, such as '{0: NEGATIVE, 1: POSITIVE}'; default: their own, in any case; I means LABEL_I",
        metavar="MAP",
        section=TASK_FILES,
        parser=_label_map,
    )
    text: str = option("", "column of the text, name or number; default: as fine-tuned", section=TASK_FILES)
    text_pair: str = option("", "the same for the second text", metavar="TEXT", section=TASK_FILES)
    label: str = option("", "the same for the label", section=TASK_FILES)

    @property
    def columns(self) -> Columns:
        return Columns(self.text, self.text_pair, self.label)


def evaluate(
    checkpoint: str | Path | LoadedModel,
    data: str | Path,
    *,
    average: str = "",
    mesh: MeshConfig | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Returns metrics by name: `loss`, `mlm_loss`, `mlm_accuracy`, ..., or those of the checkpoint's task.

    On shards, the perplexities of a model that predicts next tokens or was trained by masked diffusion come after them,
    and with pseudo_perplexity those of a masked language model.

    options are those of EvaluateOptions; which ones apply depends on the data. An undefined metric, such as a
    correlation with a constant, is None. average applies to a checkpoint given by its path, as in open_checkpoint.
    Without mesh, rows are sharded over all devices.

    Raises UserError if the checkpoint lacks the head that the data or pseudo_perplexity requires, if its tokenizer is
    not that of the data, for an option that the data does not use, and if the mesh does not fit the model or the
    devices.
    """
    given = from_keywords(EvaluateOptions, options)
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    if retrieval.is_beir(Path(data)):
        mesh_option = {} if mesh in (None, MeshConfig()) else {"mesh": mesh}
        _refuse(given, (*_OF_SHARDS, *_OF_TASKS), f"{data} is a data set of retrieval", **mesh_option)
        encoding = EncodeOptions(max_length=given.max_length, truncate_dim=given.truncate_dim)
        settings = settings_of(loaded, encoding)
        return retrieval.evaluate(loaded, Path(data), settings, given.batch_size, given.compute_dtype, given.skip_self)
    _refuse(given, ("skip_self",), f"{data} is no folder in BEIR's layout, by which retrieval is measured")
    config = TrainConfig(batch_size=given.batch_size, compute_dtype=given.compute_dtype, mesh=mesh or MeshConfig())
    sharding.check_model(loaded.model, sharding.make_mesh(config.mesh, flag=MESH_FLAG), MESH_FLAG)
    if loaded.task:
        _refuse(given, _OF_SHARDS, "the checkpoint was fine-tuned, and is measured on whole files of its task")
        found = measurement.evaluate(
            loaded,
            data,
            config,
            given.columns,
            given.label_map,
            given.max_length,
            given.metrics,
            given.positive,
            given.null_threshold,
            given.truncate_dim,
        )
        return _task_metrics(found)
    _refuse(given, (*_OF_TASKS, "max_length", "truncate_dim"), "the checkpoint has no task")
    dataset = open_dataset(data, "eval")  # of DIR/train, its own part
    pseudo = measure_pseudo_perplexity(loaded, dataset, config, given.max_rows) if given.pseudo_perplexity else {}
    return objective_metrics(loaded, dataset, config, given.max_rows) | pseudo


# The options that only one kind of data uses.
_OF_SHARDS = ("max_rows", "pseudo_perplexity")
_OF_TASKS = ("text", "text_pair", "label", "metrics", "label_map", "positive", "null_threshold")


def _refuse(given: EvaluateOptions, names: Sequence[str], reason: str, **others: Any) -> None:
    """Raises UserError if one of these options, or another one, is given, which would change nothing."""
    default = EvaluateOptions()
    used = {name: value for name in names if (value := getattr(given, name)) != getattr(default, name)}
    for name, value in (used | others).items():
        raise UserError(f"{flag(name)} is {value!r}, but {reason}; omit it")


def _task_metrics(found: measurement.Evaluation) -> dict[str, Any]:
    """The metrics of a task, None where undefined, and its counts; prints the remarks."""
    for line in found.remarks:
        distributed.note(line)
    defined = {name: None if math.isnan(value) else value for name, value in found.metrics.items()}
    return {**defined, "counts": found.counts}
