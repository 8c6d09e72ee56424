"""Pretrains a model on shards from bert-jax build-examples, by masked or causal language modeling."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import ml_collections
from jax.sharding import Mesh

from bert_jax import config as config_lib
from bert_jax.config import ModelConfig, PretrainConfig
from bert_jax.data.loader import DatasetLoader
from bert_jax.data.mixture import Source
from bert_jax.data.phases import PhasedLoader, open_held_out, open_phases, source_key, summarize
from bert_jax.data.schedules import batch_schedule, mask_rates
from bert_jax.data.shards import Dataset
from bert_jax.errors import UserError
from bert_jax.interop.initial import architecture, distilled_pretraining, initial_params, open_initial
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import sizes
from bert_jax.storage.location import Location, location, write_json
from bert_jax.tokenization.vocabulary import Vocabulary
from bert_jax.train import distributed, loop, sharding
from bert_jax.train.checkpoint import held_workdir
from bert_jax.train.clock import TokenLength
from bert_jax.train.evaluation import evaluate_batches
from bert_jax.train.hooks import Hook
from bert_jax.train.objectives import Objective, pretraining_objective
from bert_jax.train.objectives.objective import ObjectiveSource
from bert_jax.train.objectives.pretraining import ShardTraits
from bert_jax.train.run import RESULT_FILE, Result, Run
from bert_jax.train.step import Plan

# A run on longer sequences may change these fields if its architecture is that of a checkpoint with rotary positions
# (Warner et al. 2024, section 3.2). No parameter's shape depends on them.
CONTEXT_FIELDS = ("rotary_base", "rotary_base_local", "max_positions")


def pretrain(
    config: PretrainConfig | ml_collections.ConfigDict,
    workdir: str | PurePath,
    *,
    verbose: bool = False,
    hooks: Sequence[Hook] = (),
    recipe: str = "",
) -> dict[str, Any]:
    """Trains a model into a workdir and returns the content of result.json.

    Args:
        verbose: Whether to print the parameters.
        hooks: Called between steps (train/hooks.py).
        recipe: The recipe that the configuration changes, for run.json.

    Returns:
        step, seconds, tokens, eval_loss, eval_mlm_loss, eval_mlm_accuracy and eval_nsp_accuracy, which are None for a
        term that the objective lacks or without held-out data. Further terms, the parameter average and the sources of
        a mixture have their own keys, such as eval_sbo_loss, eval_ema_loss and eval_wiki/loss.

    Raises:
        UserError: There is a mistake in the configuration, the shards or the checkpoints.
        Stopped: After SIGTERM, when the run is saved.
    """
    if isinstance(config, ml_collections.ConfigDict):
        config = config_lib.load(PretrainConfig, config)
    run, train = make_run(config, location(workdir))
    with held_workdir(run.workdir), contextlib.closing(train):
        return _write_result(run.workdir, loop.fit(dataclasses.replace(run, verbose=verbose, recipe=recipe), hooks))


def make_run(config: PretrainConfig, workdir: Location) -> tuple[Run, PhasedLoader]:
    """Turns a configuration into a run, and returns it with its loader, which the caller closes.

    It opens the shards and the initial checkpoint, and writes nothing.
    """
    phases = open_phases(config.data)
    held_out = open_held_out(config, phases)
    # The sources of a phase share their layout, so its first dataset stands for all.
    datasets = [phase.mixture.dataset for phase in phases]
    vocabulary = datasets[0].vocabulary()
    model, loaded = _model_and_checkpoint(config, vocabulary.vocab_size)
    measured = [source.dataset for sources in held_out for source in sources]
    for part in (*datasets, *measured):
        sizes.check_positions(model, part.seq_len, str(part.directory))
    shortest = min(datasets, key=lambda dataset: dataset.seq_len)
    model.encoder.check_rows(shortest.seq_len, str(shortest.directory))
    objective = _objective(config, model, vocabulary, datasets, measured)
    distilled = distilled_pretraining(config, model, objective, vocabulary, datasets)
    objective = objective if distilled is None else distilled.objective
    batches = batch_schedule(config.batch_schedule, config.batch_size)
    rates = mask_rates(config.data.mask_rate, config.data.mask_schedule, config.data.mask_shape)
    masking = config.data.masking
    train = PhasedLoader(phases, vocabulary, batches=batches, seed=config.seed, rates=rates, masking=masking)
    length = TokenLength(config.tokens, train.tokens_before) if config.tokens else None
    rows, preset = config.evaluation_rows(min(batches.values)), config.model.preset
    loaders = [
        {source.name: DatasetLoader(source.dataset, vocabulary, seed=config.seed) for source in sources}
        for sources in held_out
    ]
    run = Run(
        config=config,
        model=model,
        objective=objective,
        source=ObjectiveSource(train, objective),
        workdir=workdir,
        tokenizer=vocabulary,
        kind="pretraining",
        description="pretraining" if preset == sizes.FROM_CHECKPOINT else f"pretraining {preset}",
        evaluators=[functools.partial(evaluate_held_out, train, loaders, rows, config.eval.max_rows)]
        if any(held_out)
        else [],
        measured=_measured(objective.evaluated.metric_names, held_out),
        branch_from=config.branch_from,
        tokens_before=train.tokens_before,
        length=length,
        held_out={
            source_key(phase.held_out_key, name): loader.fingerprint
            for phase, sources in zip(phases, loaders, strict=True)
            for name, loader in sources.items()
        },
        shares=train.shares,
        data=summarize(phases),
        epochs_before=train.epochs_before,
        describe_data=train.describe_mixtures,
        notes=() if distilled is None else (distilled.note,),
        constants={} if distilled is None else distilled.constants,
        initial_params={} if loaded is None else initial_params(loaded, model, objective.heads, vocabulary),
    )
    return run, train


def _objective(
    config: PretrainConfig,
    model: ModelConfig,
    vocabulary: Vocabulary,
    datasets: Sequence[Dataset],
    measured: Sequence[Dataset],
) -> Objective:
    """Returns the objective, after checking it against all shards that the run reads and measures."""
    traits = [ShardTraits.of(dataset, vocabulary) for dataset in datasets]
    traits += [ShardTraits.of(dataset, vocabulary, held_out=True) for dataset in measured]
    objective = pretraining_objective(config, model, traits)
    if (objective.heads.mlm or objective.heads.generator) and not vocabulary.has_mask:
        raise UserError(
            f"the vocabulary of {datasets[0].directory} has no mask token; rebuild the examples with another "
            "--tokenizer, or train a causal model: --config.model.causal=true"
        )
    return objective


def _model_and_checkpoint(config: PretrainConfig, vocab_size: int) -> tuple[ModelConfig, LoadedModel | None]:
    """Returns the architecture, and the checkpoint of init_from, in which context fields follow this architecture."""
    loaded = open_initial(config)
    model = architecture(config, vocab_size, loaded)
    if loaded is not None and config.model.preset == sizes.FROM_CHECKPOINT and model.positions == "rotary":
        context = {name: getattr(model, name) for name in CONTEXT_FIELDS}
        loaded = dataclasses.replace(loaded, model=dataclasses.replace(loaded.model, **context))
    return model, loaded


def _measured(metrics: Sequence[str], held_out: Sequence[Sequence[Source]]) -> tuple[str, ...]:
    """Lists the metrics of every evaluation: those of all held-out rows, and of sources that all phases have."""
    if not all(source.dataset.labelled for sources in held_out for source in sources):
        metrics = [metric for metric in metrics if not metric.startswith("nsp_")]
    phases = [{source.name for source in sources} for sources in held_out]
    names = [source.name for source in held_out[0] if source.name and all(source.name in phase for phase in phases)]
    return (*metrics, *(f"{name}/{metric}" for name in names for metric in metrics))


def evaluate_held_out(
    train: PhasedLoader,
    loaders: Sequence[Mapping[str, DatasetLoader]],
    wanted_rows: int,
    max_rows: int,
    plan: Plan,
    mesh: Mesh,
    params: dict[str, Any],
    steps_done: int,
) -> dict[str, float]:
    """Evaluates on the held-out rows of the latest step's phase, and by its objective.

    With its first four arguments bound, it is the run's evaluator. Batches have about wanted_rows rows.
    """
    # A process loads its own rows of each batch only, as in training.
    size, step = sharding.whole_rows(wanted_rows, mesh), max(steps_done - 1, 0)
    rows = sharding.local_rows(size, mesh)
    sources = {
        name: (plan.objective.batch_at(step, batch) for batch in loader.evaluation_batches(size, max_rows, rows))
        for name, loader in loaders[train.phase(step)].items()
    }
    return evaluate_batches(plan, mesh, params, sources, size)


def _write_result(workdir: Location, result: Result) -> dict[str, Any]:
    # The metrics of the original BERT are always present, null if undefined. The next-sentence loss has no key.
    always = ("loss", "mlm_loss", "mlm_accuracy", "nsp_accuracy")
    names = (*always, *sorted(set(result.evaluation) - {*always, "nsp_loss"}))
    values = {
        "step": result.step,
        "seconds": round(result.seconds, 3),
        "tokens": result.tokens,
        **{f"eval_{name}": result.evaluation.get(name) for name in names},
    }
    if distributed.is_primary():
        write_json(workdir / RESULT_FILE, values)
    return values
