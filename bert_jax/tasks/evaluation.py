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
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params
from bert_jax.model.runtime import COMPUTE_DTYPES
from bert_jax.progress import Reporter
from bert_jax.tasks import measurement, retrieval
from bert_jax.tasks.embedder import EncodeOptions, vector_settings
from bert_jax.tasks.fill_mask import masked_model
from bert_jax.tasks.reading.tables import Columns
from bert_jax.train import distributed, sharding
from bert_jax.train.evaluation import Rows, evaluate_batches
from bert_jax.train.objectives import OBJECTIVES, Likelihood, MaskedLMObjective, Objective, pretraining_objective
from bert_jax.train.objectives.pretraining import ShardTraits, resolved
from bert_jax.train.run import make_runtime
from bert_jax.train.step import Plan

MOST_NATS = 700.0  # per token or word; the exponential of more may exceed the largest float
MESH_FLAG = "--mesh"


def objective_metrics(loaded: LoadedModel, dataset: Dataset, config: TrainConfig, max_rows: int = 0) -> dict[str, Any]:
    """Measures the model's training objective, then the perplexities of its likelihoods.

    Args:
        max_rows: How many rows to measure, from the first; 0: all.

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
            # Without a labelled token, a term has no loss.
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
    # The same sum over all tokens, divided by the words: unlike the first, it compares models with different
    # tokenizers.
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
    plan = Plan(loaded.model, make_runtime(config), objective)
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
    max_rows: int = option(0, "shards: only the first N rows; 0: all", metavar="N", valid=at_least(0))
    pseudo_perplexity: bool = option(False, "shards: also mask each token in turn, for masked language models")
    max_length: int = option(0, "truncate texts to N tokens; default: as fine-tuned; not for shards", metavar="N")
    truncate_dim: int = option(0, "vectors: use the first N dimensions; default: as the checkpoint says", metavar="N")
    any_part: bool = option(False, "shards: measure DIR/train, too, if you name it")
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
    """Measures a checkpoint: a pretrained one on shards, a fine-tuned one on files, or one that embeds in retrieval.

    Args:
        data: Shards, a labelled file or folder of the checkpoint's task, or a folder in BEIR's layout.
        average: The average in a checkpoint that is given by its path, as in open_checkpoint.
        mesh: By default, rows are sharded over all devices.
        options: Those of EvaluateOptions; which ones apply depends on the data.

    Returns:
        Metrics by name: `loss`, `mlm_loss`, `mlm_accuracy`, ... and perplexities, or the task's, with its
        `counts`. An undefined metric, such as a correlation with a constant, is None.

    Raises:
        UserError: The checkpoint or the mesh does not fit the data, or the data does not use an option.
    """
    given = from_keywords(EvaluateOptions, options)
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    # The folder decides, because any encoder can be measured by retrieval, whatever it was trained for.
    if retrieval.is_beir(Path(data)):
        mesh_option = {} if mesh in (None, MeshConfig()) else {"mesh": mesh}
        _refuse(given, (*_OF_SHARDS, *_OF_TASKS), f"{data} is a data set of retrieval", **mesh_option)
        encoding = EncodeOptions(max_length=given.max_length, truncate_dim=given.truncate_dim)
        settings = vector_settings(loaded, encoding)
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
    if dataset.part != "eval" and not given.any_part:
        raise UserError(
            f"{data} has rows for training. Give the folder above it, whose held-out rows are measured, or add "
            f"{flag('any_part')} if you mean this one"
        )
    pseudo = measure_pseudo_perplexity(loaded, dataset, config, given.max_rows) if given.pseudo_perplexity else {}
    return objective_metrics(loaded, dataset, config, given.max_rows) | pseudo


# The options that only one kind of data uses.
_OF_SHARDS = ("max_rows", "pseudo_perplexity", "any_part")
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
    # JSON has no NaN.
    defined = {name: None if math.isnan(value) else value for name, value in found.metrics.items()}
    return {**defined, "counts": found.counts}
