"""Pretrains a model on shards from data_prep.build_examples, by masked or causal language modeling."""

from bert_jax.train.host_memory import keep_freed_memory

if __name__ == "__main__":
    keep_freed_memory()  # before the imports below start threads

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_collections
from jax.sharding import Mesh
from rich.console import Console

from bert_jax import command
from bert_jax import config as config_lib
from bert_jax.command import UserError
from bert_jax.config import ModelConfig, PretrainConfig, PretrainDataConfig
from bert_jax.data.batch_schedule import batch_schedule
from bert_jax.data.example import Batch
from bert_jax.data.loader import PretrainingLoader
from bert_jax.data.manifest import PARTS, Part
from bert_jax.data.masking import mask_rates
from bert_jax.data.phases import Phase, PhasedLoader, parse_phases
from bert_jax.data.shard_cache import local_copy
from bert_jax.data.shards import Dataset, open_dataset
from bert_jax.interop.initial_params import initial_params
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import sizes
from bert_jax.storage.local import write_json
from bert_jax.train import distributed, partitioning, trainer
from bert_jax.train.branch import checkpoint_folder
from bert_jax.train.compilation_cache import enable_compilation_cache
from bert_jax.train.evaluate import Evaluator, Rows, make_evaluator
from bert_jax.train.objectives import pretraining_objective
from bert_jax.train.objectives.pretraining import ShardTraits
from bert_jax.train.objectives.source import ObjectiveSource
from bert_jax.train.steps import Plan
from bert_jax.train.token_length import TokenLength
from bert_jax.train.workdir import read_config

DESCRIPTION = """Pretrains a bidirectional encoder by masked language modeling, together with next-sentence or
sentence-order prediction where the shards have such labels. A causal model (see configs/gpt.py) is
trained to predict the next token.

  python -m bert_jax.pretrain --config configs/bert_tiny.py --workdir runs/tiny --config.data.train=shards

--config.KEY=VALUE sets a key of the recipe. Frequently used keys:

  steps=1000, budget_minutes=30   the length of the run
  tokens=5e8 steps=0              a length in tokens; then also optimizer.warmup_tokens, decay_tokens
  batch_size=64                   rows per batch
  batch_schedule=0:256,10000:512  a batch size that changes at the given steps
  compute_dtype=float32           the precision of the computation
  init_from=CHECKPOINT            initial parameters: a bert_jax checkpoint or a Hugging Face folder
  branch_from=RUN/checkpoints/STEP
                                  a run that begins there, with its optimizer state: a decay phase
  model.preset=checkpoint         the architecture of that checkpoint
  model.norm=pre                  one part of the architecture; every part has such a key
  data.mask_rate=0.2              the rate of dynamic masking
  data.mask_schedule=0:0.30,50000:0.15
                                  a mask rate that changes at the given steps
  data.mask_shape=linear          ... and linearly between them
  data.phases=900000:DIR          other shards from the given step on, e.g. of length 512 after 128
  objective=0:causal,5000:mlm     next tokens first, masked tokens from the given step on (configs/phases.py)
  span_boundary=true              also predict masked spans from their boundaries (SpanBERT)
  optimizer.learning_rate=1e-3    the peak learning rate
  optimizer.name=NAME             adamw, lamb, muon or stable_adamw
  optimizer.schedule=NAME         linear, cosine, wsd, constant or inverse_sqrt
  optimizer.ema_decay=0.999       a moving average of the parameters

Section 6 of docs/recipes.md describes the optimizers. After an interruption, run the same command
again: training resumes from the newest checkpoint of the workdir. To view the result, run:
python -m bert_jax.report WORKDIR
"""


# Fields that a run on longer sequences may change when it takes its architecture from a checkpoint with rotary
# positions (Warner et al. 2024, section 3.2). The shape of no parameter depends on them.
CONTEXT_FIELDS = ("rotary_base", "rotary_base_local", "max_positions")


def pretrain(config: PretrainConfig | ml_collections.ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Trains a model into a workdir and returns the contents of result.json.

    The keys are step, seconds, tokens, eval_loss, eval_mlm_loss, eval_mlm_accuracy and
    eval_nsp_accuracy (None for a term that the objective lacks, or without held-out data), plus
    those of further terms, such as eval_sbo_loss and eval_lm_loss, and of the parameter average,
    such as eval_ema_loss. Raises UserError for errors in the configuration, the shards or the
    checkpoints, and Stopped after SIGTERM.
    """
    if isinstance(config, ml_collections.ConfigDict):
        config = config_lib.load(PretrainConfig, config)
    phases = _open_phases(config.data)
    held_out = _open_held_out(config, phases)
    vocabulary = phases[0].dataset.vocabulary()
    model, loaded = _model_and_checkpoint(config, vocabulary.vocab_size)
    _check_lengths(model, phases, held_out)
    objective = pretraining_objective(config, model, [ShardTraits.of(phase.dataset, vocabulary) for phase in phases])
    if objective.heads.mlm and not vocabulary.has_mask:
        raise UserError(
            f"the vocabulary of {phases[0].dataset.directory} has no mask token; rebuild the examples with another "
            "--tokenizer, or train a causal model: --config.model.causal=true"
        )
    batches = batch_schedule(config.batch_schedule, config.batch_size)
    rates = mask_rates(config.data.mask_rate, config.data.mask_schedule, config.data.mask_shape)
    train = PhasedLoader(phases, vocabulary, batches=batches, seed=config.seed, rates=rates)
    rows = config.eval.batch_size or min(batches.values)  # of one evaluation batch
    loaders = [
        None if part is None else PretrainingLoader(part, vocabulary, batch_size=rows, seed=config.seed)
        for part in held_out
    ]
    run = trainer.Run(
        config=config,
        model=model,
        objective=objective,
        source=ObjectiveSource(train, objective),
        workdir=Path(workdir),
        tokenizer=vocabulary,
        kind="pretraining",
        description=f"pretraining {config.model.preset}",
        evaluators=[_evaluator(config, train, loaders, rows)] if any(held_out) else [],
        measured=objective.metric_names,
        branch_from=config.branch_from,
        length=TokenLength(config.tokens, train.tokens_before) if config.tokens else None,
        held_out={
            phase.held_out_key: loader.fingerprint
            for phase, loader in zip(phases, loaders, strict=True)
            if loader is not None
        },
        initial_params={} if loaded is None else initial_params(loaded, model, objective.heads, vocabulary),
    )
    return _write_result(run.workdir, trainer.fit(run))


def main(arguments: Sequence[str]) -> None:
    """Runs the command and prints the result as JSON on the primary process."""
    parser = command.Parser("bert_jax.pretrain", DESCRIPTION)
    parser.add_argument(
        "--config", required=True, help="the recipe file, e.g. configs/bert_base.py; --config.KEY=VALUE sets a key"
    )
    parser.add_argument("--workdir", required=True, help="the directory for checkpoints, metrics and the result")
    distributed.add_flags(parser)
    known, overrides = parser.parse_known_args(list(arguments))
    enable_compilation_cache()
    config = config_lib.read_flags(known.config, overrides)
    with distributed.processes(known):
        result = pretrain(config, known.workdir)
        if distributed.is_primary():
            print(json.dumps(result))


def _model_and_checkpoint(config: PretrainConfig, vocab_size: int) -> tuple[ModelConfig, LoadedModel | None]:
    """Returns the architecture, and the checkpoint of init_from with the architecture it is checked against."""
    loaded = open_checkpoint(config.init_from, config.init_average) if config.init_from else None
    model = _architecture(config, vocab_size, loaded)
    if loaded is not None and config.model.preset == sizes.FROM_CHECKPOINT and model.positions == "rotary":
        context = {name: getattr(model, name) for name in CONTEXT_FIELDS}
        loaded = dataclasses.replace(loaded, model=dataclasses.replace(loaded.model, **context))
    return model, loaded


def _architecture(config: PretrainConfig, vocab_size: int, loaded: LoadedModel | None) -> ModelConfig:
    if config.model.preset != sizes.FROM_CHECKPOINT:
        return sizes.model_config(config.model, vocab_size)
    if config.branch_from:
        workdir = checkpoint_folder(config.branch_from).parent.parent
        return sizes.with_options(read_config(workdir).model, config.model)
    if loaded is None:
        raise UserError("model.preset is checkpoint, but init_from is not set; set --config.init_from=CHECKPOINT")
    return sizes.with_options(loaded.model, config.model)


def _check_lengths(model: ModelConfig, phases: Sequence[Phase], held_out: Sequence[Dataset | None]) -> None:
    for part in (*(phase.dataset for phase in phases), *held_out):
        if part is not None and part.seq_len > model.max_positions:
            raise UserError(
                f"the rows of {part.directory} have {part.seq_len} positions, but the model supports only "
                f"{model.max_positions}; use --config.model.max_positions={part.seq_len}"
            )
    shortest = min((phase.dataset for phase in phases), key=lambda one: one.seq_len)
    if model.bptt > shortest.seq_len:
        raise UserError(
            f"model.bptt is {model.bptt}, longer than the rows of {shortest.directory}, {shortest.seq_len}; use at "
            f"most --config.model.bptt={shortest.seq_len}, or 0 for gradients through whole sequences"
        )


def _open_phases(config: PretrainDataConfig) -> list[Phase]:
    """Opens the training shards of all phases."""
    if not config.train:
        raise UserError(
            "data.train is not set; set --config.data.train=DIR to the output folder of data_prep.build_examples"
        )
    named = parse_phases(config.train, config.phases)
    parts: tuple[Part, ...] = ("train",) if config.eval else PARTS
    return [Phase(first, open_dataset(_local(folder, config, parts), "train")) for first, folder in named]


def _open_held_out(config: PretrainConfig, phases: Sequence[Phase]) -> list[Dataset | None]:
    """Opens the held-out rows of each phase. Raises UserError if checkpoint.best needs rows that a phase lacks."""
    held_out = [_held_out(config, phase) for phase in phases]
    for phase, part in zip(phases, held_out, strict=True):
        if config.checkpoint.best and part is None:
            raise UserError(
                f"checkpoint.best={config.checkpoint.best}, but {phase.key} ({phase.dataset.directory}) has no "
                "held-out part to evaluate; set one by --config.data.eval, or do not set checkpoint.best"
            )
    return held_out


def _held_out(config: PretrainConfig, phase: Phase) -> Dataset | None:
    """Returns data.eval or, if it is not set, the phase's own held-out rows; None if build_examples kept none."""
    dataset = phase.dataset
    if not config.data.eval and not dataset.manifest["parts"]["eval"]["rows"]:
        return None
    held_out = open_dataset(_local(config.data.eval, config.data, ("eval",)) or dataset.directory, "eval")
    if held_out.tokenizer_hash != dataset.tokenizer_hash:
        raise UserError(
            f"data.eval={config.data.eval} was built with a different tokenizer than data.train={config.data.train}; "
            "build both with the same --tokenizer"
        )
    return held_out


def _local(folder: str, config: PretrainDataConfig, parts: Sequence[Part]) -> str:
    """Returns the folder, or its local copy if data.cache_dir is set."""
    if not folder or not config.cache_dir:
        return folder
    return local_copy(folder, config.cache_dir, parts, Console(stderr=True, soft_wrap=True, highlight=False).print)


def _evaluator(
    config: PretrainConfig, train: PhasedLoader, loaders: Sequence[PretrainingLoader | None], wanted_rows: int
) -> Callable[[Plan, Mesh], Evaluator]:
    """Builds the evaluator on the held-out rows and by the objective of the latest step's phase.

    Its batches have about wanted_rows rows.
    """

    def make(plan: Plan, mesh: Mesh) -> Evaluator:
        size = partitioning.whole_rows(wanted_rows, mesh)

        def read(steps_done: int, rows: Rows) -> Iterator[Batch]:
            step = max(steps_done - 1, 0)
            if (loader := loaders[train.phase(step)]) is not None:
                for batch in loader.evaluation_batches(size, config.eval.max_rows, rows):
                    yield plan.objective.batch_at(step, batch)

        return make_evaluator(plan, mesh, read, size)

    return make


def _write_result(workdir: Path, result: trainer.Result) -> dict[str, Any]:
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
        write_json(workdir / trainer.RESULT_FILE, values)
    return values


if __name__ == "__main__":
    command.run(main)
