"""Pretrains a model on shards from bert-jax build-examples, by masked or causal language modeling."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import ml_collections
from jax.sharding import Mesh

from bert_jax import command
from bert_jax import config as config_lib
from bert_jax.command import UserError
from bert_jax.config import ModelConfig, PretrainConfig, short_flags
from bert_jax.data.batch_schedule import batch_schedule
from bert_jax.data.example import Batch
from bert_jax.data.loader import PretrainingLoader
from bert_jax.data.masking import mask_rates
from bert_jax.data.mixture import Source
from bert_jax.data.opening import open_held_out, open_phases
from bert_jax.data.phases import PhasedLoader, source_key
from bert_jax.data.shards import Dataset
from bert_jax.data.summary import summarize
from bert_jax.interop.initial_checkpoint import architecture, open_initial
from bert_jax.interop.initial_params import initial_params
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.teacher import distilled_pretraining
from bert_jax.model import sizes
from bert_jax.storage.location import Location, location, write_json
from bert_jax.train import distributed, loop, partitioning
from bert_jax.train.checkpoint import held_workdir
from bert_jax.train.compilation_cache import enable_compilation_cache, write_on_every_host
from bert_jax.train.evaluate import Evaluator, Rows, make_source_evaluator
from bert_jax.train.hooks import Hook
from bert_jax.train.objectives import Objective, pretraining_objective
from bert_jax.train.objectives.pretraining import ShardTraits
from bert_jax.train.objectives.source import ObjectiveSource
from bert_jax.train.parameter_summary import VERBOSE
from bert_jax.train.run import RESULT_FILE, Result, Run
from bert_jax.train.step import Plan
from bert_jax.train.token_length import TokenLength
from bert_jax.vocabulary import Vocabulary

DESCRIPTION = f"""Pretrains a bidirectional encoder by masked language modeling, together with next-sentence or
sentence-order prediction where the shards have such labels. A causal model (see the recipe gpt) is
trained to predict the next token.

  bert-jax pretrain --config bert_tiny --workdir runs/tiny --config.data.train=shards

--config.KEY=VALUE sets a key of the recipe. Frequently used keys:

  steps=1000, budget_minutes=30   the length of the run
  tokens=5e8 steps=0              a length in tokens; then also optimizer.warmup_tokens, decay_tokens
  batch_size=64                   rows per batch
  batch_schedule=0:256,10000:512  a batch size that changes at the given steps
  compute_dtype=float32           the precision of the computation
  init_from=CHECKPOINT            initial parameters: a bert_jax checkpoint, a Hugging Face folder, or
                                  hf:NAME, a model of the Hugging Face Hub
  init_layers=0,2,4,7,9,11        ... of these of its layers only
  distill.teacher=CHECKPOINT      also learn from this model (docs/adapting.md, the recipe distilbert)
  branch_from=RUN/checkpoints/STEP
                                  a run that begins there, with its optimizer state: a decay phase
  model.preset=checkpoint         the architecture of that checkpoint
  model.norm=pre                  one part of the architecture; every part has such a key
  data.mask_rate=0.2              the rate of dynamic masking; none: that of the shards, not the recipe's
  data.mask_schedule=0:0.30,50000:0.15
                                  a mask rate that changes at the given steps
  data.mask_shape=linear          ... and linearly between them
  data.mixture=wiki=DIR:0.7,books=DIR:0.3
                                  several shards instead of data.train, with their shares of the rows
  data.mixture=de=DIR,th=DIR:alpha=0.3
                                  ... with shares by their numbers of tokens to the power alpha
  data.cache_bytes=8e9            read rows in shuffled windows of so much memory, straight from where the shards
                                  are, if they do not fit a local disk (docs/scaling.md)
  data.phases=900000:DIR          other shards, or a mixture, from the given step on, e.g. of length
                                  512 after 128
  objective=0:causal,5000:mlm     next tokens first, masked tokens from the given step on (the recipe phases)
  span_boundary=true              also predict masked spans from their boundaries (SpanBERT)
  optimizer.learning_rate=1e-3    the peak learning rate
  optimizer.name=NAME             adamw, lamb, muon or stable_adamw
  optimizer.schedule=NAME         linear, cosine, wsd, constant or inverse_sqrt
  optimizer.ema_decay=0.999       a moving average of the parameters

{short_flags.help_text(PretrainConfig)}

docs/pretraining.md describes objectives, optimizers and phases. After an interruption, run the same
command again: training resumes from the newest checkpoint of the workdir. One run at a time may train in a
workdir; a second one is refused. To view the result, run: bert-jax report WORKDIR
"""


# Fields that a run on longer sequences may change when it takes its architecture from a checkpoint with rotary
# positions (Warner et al. 2024, section 3.2). The shape of no parameter depends on them.
CONTEXT_FIELDS = ("rotary_base", "rotary_base_local", "max_positions")


def pretrain(
    config: PretrainConfig | ml_collections.ConfigDict,
    workdir: str | PurePath,
    *,
    verbose: bool = False,
    hooks: Sequence[Hook] = (),
) -> dict[str, Any]:
    """Trains a model into a workdir and returns the contents of result.json.

    The keys are step, seconds, tokens, eval_loss, eval_mlm_loss, eval_mlm_accuracy and
    eval_nsp_accuracy (None for a term that the objective lacks, or without held-out data), plus
    those of further terms, such as eval_sbo_loss and eval_lm_loss, of the parameter average, such as
    eval_ema_loss, and of each source of a mixture, such as eval_wiki/loss. A `verbose` run prints its parameters.
    `hooks` are called between its steps (train/hooks.py). Raises UserError for errors in the
    configuration, the shards or the checkpoints, and Stopped after SIGTERM.
    """
    if isinstance(config, ml_collections.ConfigDict):
        config = config_lib.load(PretrainConfig, config)
    run, train = make_run(config, location(workdir))
    with held_workdir(run.workdir), contextlib.closing(train):
        return _write_result(run.workdir, loop.fit(dataclasses.replace(run, verbose=verbose), hooks))


def make_run(config: PretrainConfig, workdir: Location) -> tuple[Run, PhasedLoader]:
    """Returns the run of a configuration, and its loader, to be closed: the one place where the one becomes the other.

    Opens the shards and the initial checkpoint; writes nothing.
    """
    phases = open_phases(config.data)
    held_out = open_held_out(config, phases)
    datasets = [phase.mixture.dataset for phase in phases]  # of each phase the first, whose layout its sources share
    vocabulary = datasets[0].vocabulary()
    model, loaded = _model_and_checkpoint(config, vocabulary.vocab_size)
    measured = [source.dataset for sources in held_out for source in sources]
    _check_lengths(model, datasets, measured)
    objective = _objective(config, model, vocabulary, datasets, measured)
    distilled = distilled_pretraining(config, model, objective, vocabulary, datasets)
    objective = objective if distilled is None else distilled.objective
    batches = batch_schedule(config.batch_schedule, config.batch_size)
    rates = mask_rates(config.data.mask_rate, config.data.mask_schedule, config.data.mask_shape)
    train = PhasedLoader(phases, vocabulary, batches=batches, seed=config.seed, rates=rates)
    length = TokenLength(config.tokens, train.tokens_before) if config.tokens else None
    rows = config.evaluation_rows(min(batches.values))
    loaders = [
        {
            source.name: PretrainingLoader(source.dataset, vocabulary, batch_size=rows, seed=config.seed)
            for source in sources
        }
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
        description=_description(config.model.preset),
        evaluators=[_evaluator(config, train, loaders, rows)] if any(held_out) else [],
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
    """Returns what the run trains for, checked against all shards that it reads and measures."""
    traits = [ShardTraits.of(dataset, vocabulary) for dataset in datasets]
    traits += [ShardTraits.of(dataset, vocabulary, held_out=True) for dataset in measured]
    objective = pretraining_objective(config, model, traits)
    if (objective.heads.mlm or objective.heads.generator) and not vocabulary.has_mask:
        raise UserError(
            f"the vocabulary of {datasets[0].directory} has no mask token; rebuild the examples with another "
            "--tokenizer, or train a causal model: --config.model.causal=true"
        )
    return objective


def main(arguments: Sequence[str]) -> None:
    """Runs the command and prints the result as JSON on the primary process."""
    parser = command.Parser("bert-jax pretrain", DESCRIPTION)
    parser.add_argument(
        "--config", required=True, help="a recipe by its name, e.g. bert_base, or a file; --config.KEY=VALUE sets a key"
    )
    parser.add_argument(
        "--workdir",
        required=True,
        help="the directory for checkpoints, metrics and the result; on disk, gs://BUCKET/NAME or s3://BUCKET/NAME",
    )
    parser.add_argument("--verbose", action="store_true", help=VERBOSE)
    distributed.add_flags(parser)
    known, overrides = parser.parse_known_args(list(arguments))
    enable_compilation_cache()
    config = config_lib.read_flags(known.config, overrides)
    with distributed.processes(known):
        write_on_every_host()
        result = pretrain(config, known.workdir, verbose=known.verbose)
        if distributed.is_primary():
            print(json.dumps(result))


def _description(preset: str) -> str:
    return "pretraining" if preset == sizes.FROM_CHECKPOINT else f"pretraining {preset}"


def _model_and_checkpoint(config: PretrainConfig, vocab_size: int) -> tuple[ModelConfig, LoadedModel | None]:
    """Returns the architecture, and the checkpoint of init_from with the architecture it is checked against."""
    loaded = open_initial(config)
    model = architecture(config, vocab_size, loaded)
    if loaded is not None and config.model.preset == sizes.FROM_CHECKPOINT and model.positions == "rotary":
        context = {name: getattr(model, name) for name in CONTEXT_FIELDS}
        loaded = dataclasses.replace(loaded, model=dataclasses.replace(loaded.model, **context))
    return model, loaded


def _check_lengths(model: ModelConfig, training: Sequence[Dataset], held_out: Sequence[Dataset]) -> None:
    for part in (*training, *held_out):
        sizes.check_positions(model, part.seq_len, str(part.directory))
    shortest = min(training, key=lambda one: one.seq_len)
    sizes.check_truncation(model, shortest.seq_len, str(shortest.directory))


def _measured(metrics: Sequence[str], held_out: Sequence[Sequence[Source]]) -> tuple[str, ...]:
    """The metrics that every evaluation measures: of all held-out rows, and of the sources that all phases have."""
    if not all(source.dataset.labelled for sources in held_out for source in sources):
        metrics = [metric for metric in metrics if not metric.startswith("nsp_")]
    of_phases = [{source.name for source in sources} for sources in held_out]
    names = [source.name for source in held_out[0] if source.name and all(source.name in one for one in of_phases)]
    return (*metrics, *(f"{name}/{metric}" for name in names for metric in metrics))


def _evaluator(
    config: PretrainConfig,
    train: PhasedLoader,
    loaders: Sequence[Mapping[str, PretrainingLoader]],
    wanted_rows: int,
) -> Callable[[Plan, Mesh], Evaluator]:
    """Builds the evaluator on the held-out rows and by the objective of the latest step's phase.

    Its batches have about wanted_rows rows.
    """

    def make(plan: Plan, mesh: Mesh) -> Evaluator:
        size = partitioning.whole_rows(wanted_rows, mesh)

        def read(steps_done: int, rows: Rows) -> dict[str, Iterator[Batch]]:
            step = max(steps_done - 1, 0)
            return {
                name: (
                    plan.objective.batch_at(step, batch)
                    for batch in loader.evaluation_batches(size, config.eval.max_rows, rows)
                )
                for name, loader in loaders[train.phase(step)].items()
            }

        return make_source_evaluator(plan, mesh, read, size)

    return make


def _write_result(workdir: Location, result: Result) -> dict[str, Any]:
    # The metrics of the original BERT are always present, and null where they are undefined. The next-sentence loss is
    # left out because result.json has never contained it.
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
