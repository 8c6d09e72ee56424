"""Measures a pretrained model on held-out shards: the metrics of its objective, perplexities, pseudo-perplexity."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from bert_jax.command import UserError
from bert_jax.config import PretrainConfig, TrainConfig
from bert_jax.data.example import Batch
from bert_jax.data.loader import PretrainingLoader, RowTable, check_tokenizer
from bert_jax.data.shards import Dataset
from bert_jax.data.single_masks import SingleMasks
from bert_jax.data.word_counts import WordCounts, count_words
from bert_jax.interop.discriminator import part_of
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import paths
from bert_jax.model.bert import abstract_params
from bert_jax.progress import Reporter
from bert_jax.train import distributed, partitioning
from bert_jax.train.evaluate import Rows, make_evaluator
from bert_jax.train.objectives import OBJECTIVES, Likelihood, MaskedLMObjective, Objective, pretraining_objective
from bert_jax.train.objectives.pretraining import ShardTraits
from bert_jax.train.run import runtime_of
from bert_jax.train.step import Plan

MOST_NATS = 700.0  # per token or word; the exponential of more may exceed the largest float


def objective_metrics(loaded: LoadedModel, dataset: Dataset, config: TrainConfig, max_rows: int = 0) -> dict[str, Any]:
    """The metrics of the objective that the model was trained with, on the first max_rows rows (0: all).

    The perplexities of its likelihoods (Objective.likelihoods) come last. Raises UserError if the model has no
    language-model head or a tokenizer other than that of the rows.
    """
    size = partitioning.whole_rows(config.batch_size, partitioning.make_mesh(config.mesh))
    loader = PretrainingLoader(dataset, loaded.vocabulary, batch_size=size, seed=0)
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


def pseudo_perplexity(
    loaded: LoadedModel, dataset: RowTable, config: TrainConfig, max_rows: int = 0
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
    mesh = partitioning.make_mesh(config.mesh)
    size = partitioning.whole_rows(config.batch_size, mesh)
    plan = Plan(loaded.model, runtime_of(config), objective)
    with jax.set_mesh(mesh):
        evaluator = make_evaluator(plan, mesh, lambda _, rows: batches(size, rows), size)
        wanted = paths.flatten(abstract_params(loaded.model, objective.heads))
        params = paths.unflatten({path: loaded.params[path] for path in wanted})
        return evaluator(partitioning.put(params, mesh), 0)


def _objective(loaded: LoadedModel, dataset: Dataset) -> Objective:
    """Returns the objective for which the checkpoint has heads and the shards have labels."""
    heads, traits = loaded.heads, ShardTraits.of(dataset, loaded.vocabulary)
    name = "replaced_tokens" if heads.generator else loaded.training.get("objective", "auto")
    if not (heads.lm or heads.mlm or heads.generator or heads.named):
        raise UserError(f"{loaded.origin} has no language-model head to evaluate; use a pretrained checkpoint")
    config = PretrainConfig(
        objective=name if name in OBJECTIVES else "auto",
        span_boundary=traits.mask_unit == "span" and heads.span_boundary,
        generator_size=heads.generator / loaded.model.width or PretrainConfig.generator_size,
        replaced_weight=(loaded.training if heads.generator else {}).get(
            "replaced_weight", PretrainConfig.replaced_weight
        ),
        z_loss=loaded.training.get("z_loss", 0.0),
    )
    traits = dataclasses.replace(traits, labelled=traits.labelled and heads.next_sentence)
    return pretraining_objective(config, loaded.model, [traits])


def _masked_model(loaded: LoadedModel) -> LoadedModel:
    """The masked language model of a checkpoint. Raises UserError where it has none."""
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
