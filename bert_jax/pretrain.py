"""Pretrains a model on shards from data_prep.build_examples: masked tokens and what goes with them, or next tokens."""

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
from bert_jax.data.batch_schedule import BatchSchedule
from bert_jax.data.example import Batch
from bert_jax.data.loader import PretrainingLoader
from bert_jax.data.manifest import PARTS, Part
from bert_jax.data.masking import RateSchedule
from bert_jax.data.phases import Phase, PhasedLoader, parse_phases
from bert_jax.data.shard_cache import local_copy
from bert_jax.data.shards import Dataset, open_dataset
from bert_jax.interop.initial_params import initial_params
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import sizes
from bert_jax.storage.local import write_json
from bert_jax.train import distributed, partitioning, trainer
from bert_jax.train.compilation_cache import enable_compilation_cache
from bert_jax.train.evaluate import Evaluator, Rows, make_evaluator
from bert_jax.train.host_memory import keep_freed_memory
from bert_jax.train.objectives import pretraining_objective
from bert_jax.train.objectives.pretraining import ShardTraits
from bert_jax.train.objectives.source import ObjectiveSource
from bert_jax.train.steps import Plan

DESCRIPTION = """Pretrains an encoder: masked tokens, and next sentences where the shards have labels. A causal model,
as of configs/gpt.py, learns next tokens instead.

  python -m bert_jax.pretrain --config configs/bert_tiny.py --workdir runs/tiny --config.data.train=shards

Any key of the recipe can be set: --config.steps=1000, --config.budget_minutes=30, --config.batch_size=64,
--config.optimizer.learning_rate=1e-3, --config.compute_dtype=float32, --config.init_from=CHECKPOINT (go on from any
checkpoint, ours or a Hugging Face folder, on another domain; --config.model.preset=checkpoint then takes its
architecture). --config.data.mask_rate=0.2 sets the rate of dynamic masks, --config.data.mask_schedule=0:0.30,50000:0.15
changes it at steps; so does --config.batch_schedule=0:256,10000:512 with the rows of a batch, and
--config.data.phases=900000:DIR with the shards (of another length: 128, then 512). --config.span_boundary=true
predicts masked spans from their boundaries too (SpanBERT). --config.optimizer.name=adamw|lamb|muon|stable_adamw,
--config.optimizer.schedule=linear|cosine|wsd|constant|inverse_sqrt, --config.optimizer.ema_decay=0.999 (a moving
average of the parameters): docs/recipes.md, section 6. Any part of the architecture is a key, as
--config.model.norm=pre. Run the same command again after any stop: it goes on from the newest checkpoint of the
workdir. See the result with: python -m bert_jax.report WORKDIR
"""


# What a longer context may change of rotary positions (Warner et al. 2024, section 3.2): no parameter depends on it.
CONTEXT_FIELDS = ("rotary_base", "rotary_base_local", "max_positions")


def pretrain(config: PretrainConfig | ml_collections.ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Trains by a recipe into a workdir and returns what result.json holds.

    Keys: step, seconds, tokens, eval_loss, eval_mlm_loss, eval_mlm_accuracy, eval_nsp_accuracy (None where there is no
    such term or no held-out part), and those of further terms, as eval_sbo_loss, eval_lm_loss, and of the parameters'
    average, as eval_ema_loss. Raises UserError for a mistake in the configuration, the shards or the checkpoints, and
    Stopped after SIGTERM.
    """
    if isinstance(config, ml_collections.ConfigDict):
        config = config_lib.load(PretrainConfig, config)
    workdir = Path(workdir)
    phases = _phases(config.data)
    dataset = phases[0].dataset
    held_out = [_held_out(config, phase) for phase in phases]
    for phase, part in zip(phases, held_out, strict=True):
        if config.checkpoint.best and part is None:
            raise UserError(
                f"checkpoint.best={config.checkpoint.best}, but {phase.key} ({phase.dataset.directory}) has no "
                "held-out part to measure. Name one by --config.data.eval, or leave out checkpoint.best"
            )
    tokenizer = dataset.tokenizer()
    loaded = open_checkpoint(config.init_from, config.init_average) if config.init_from else None
    model = _architecture(config, tokenizer.vocab_size, loaded)
    if loaded is not None and config.model.preset == sizes.FROM_CHECKPOINT and model.positions == "rotary":
        context = {name: getattr(model, name) for name in CONTEXT_FIELDS}
        loaded = dataclasses.replace(loaded, model=dataclasses.replace(loaded.model, **context))
    for part in (*(phase.dataset for phase in phases), *held_out):
        if part is not None and part.seq_len > model.max_positions:
            raise UserError(
                f"the rows of {part.directory} have {part.seq_len} slots, the model has {model.max_positions} "
                f"positions; use --config.model.max_positions={part.seq_len}"
            )
    objective = pretraining_objective(config, model, [ShardTraits.of(phase.dataset) for phase in phases])
    if objective.heads.mlm and not tokenizer.has_mask:
        raise UserError(
            f"the vocabulary of {dataset.directory} has no token for masks; build the examples with another "
            "--tokenizer, or train a causal model: --config.model.causal=true"
        )
    batches = _batch_schedule(config)
    train = PhasedLoader(phases, tokenizer, batches=batches, seed=config.seed, rates=_mask_rates(config.data))
    rows = config.eval.batch_size or min(batches.rows)  # of a batch that is measured
    measured = [
        None if part is None else PretrainingLoader(part, tokenizer, batch_size=rows, seed=config.seed)
        for part in held_out
    ]
    initial = {} if loaded is None else initial_params(loaded, model, objective.heads, tokenizer).params
    result = trainer.fit(
        trainer.Run(
            config=config,
            model=model,
            objective=objective,
            source=ObjectiveSource(train, objective),
            workdir=workdir,
            tokenizer=tokenizer,
            kind="pretraining",
            description=f"pretraining {config.model.preset}",
            evaluators=[_evaluator(config, train, measured, rows)] if any(held_out) else [],
            measured=objective.metric_names,
            held_out={
                phase.held_out_key: loader.fingerprint
                for phase, loader in zip(phases, measured, strict=True)
                if loader is not None
            },
            initial_params=initial,
        )
    )
    return _write_result(workdir, result)


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("bert_jax.pretrain", DESCRIPTION)
    parser.add_argument(
        "--config", required=True, help="a recipe, as configs/bert_base.py; --config.KEY=VALUE sets a key"
    )
    parser.add_argument("--workdir", required=True, help="where checkpoints, metrics and the result go")
    distributed.add_flags(parser)
    known, overrides = parser.parse_known_args(list(arguments))
    keep_freed_memory()
    enable_compilation_cache()
    config = config_lib.read_flags(known.config, overrides)
    with distributed.processes(known):
        result = pretrain(config, known.workdir)
        if distributed.is_primary():
            print(json.dumps(result))


def _architecture(config: PretrainConfig, vocab_size: int, loaded: LoadedModel | None) -> ModelConfig:
    if config.model.preset != sizes.FROM_CHECKPOINT:
        return sizes.model_config(config.model, vocab_size)
    if loaded is None:
        raise UserError("model.preset is checkpoint, but nothing is named by --config.init_from=CHECKPOINT")
    return sizes.with_options(loaded.model, config.model)


def _mask_rates(config: PretrainDataConfig) -> RateSchedule | None:
    """The rates that data.mask_rate or data.mask_schedule ask for; None: those of the shards."""
    if config.mask_rate is not None and config.mask_schedule:
        raise UserError("data.mask_rate and data.mask_schedule are both set; give one of them")
    if config.mask_rate is not None:
        return RateSchedule.constant(config.mask_rate)
    return RateSchedule.parse(config.mask_schedule) if config.mask_schedule else None


def _batch_schedule(config: PretrainConfig) -> BatchSchedule:
    if config.batch_schedule:
        return BatchSchedule.parse(config.batch_schedule)
    return BatchSchedule.constant(config.batch_size)


def _phases(config: PretrainDataConfig) -> list[Phase]:
    """The opened shards of all phases."""
    if not config.train:
        raise UserError("data.train is not set; --config.data.train=DIR names the output of data_prep.build_examples")
    named = parse_phases(config.train, config.phases)
    parts: tuple[Part, ...] = ("train",) if config.eval else PARTS
    return [Phase(first, open_dataset(_local(folder, config, parts), "train")) for first, folder in named]


def _held_out(config: PretrainConfig, phase: Phase) -> Dataset | None:
    """A phase's held-out rows: data.eval, or those beside its own; None where build_examples set none aside."""
    dataset = phase.dataset
    if not config.data.eval and not dataset.manifest["parts"]["eval"]["rows"]:
        return None
    held_out = open_dataset(_local(config.data.eval, config.data, ("eval",)) or dataset.directory, "eval")
    if held_out.tokenizer_hash != dataset.tokenizer_hash:
        raise UserError(
            f"data.eval={config.data.eval} was built with another tokenizer than data.train={config.data.train}; "
            "build both with the same --tokenizer"
        )
    return held_out


def _local(folder: str, config: PretrainDataConfig, parts: Sequence[Part]) -> str:
    """The folder itself, or its copy in data.cache_dir."""
    if not folder or not config.cache_dir:
        return folder
    return local_copy(folder, config.cache_dir, parts, Console(stderr=True, soft_wrap=True, highlight=False).print)


def _evaluator(
    config: PretrainConfig, train: PhasedLoader, loaders: Sequence[PretrainingLoader | None], wanted: int
) -> Callable[[Plan, Mesh], Evaluator]:
    """Measures the held-out rows of the phase that the last step was of, in batches of about so many rows."""

    def make(plan: Plan, mesh: Mesh) -> Evaluator:
        size = partitioning.whole_rows(wanted, mesh)

        def read(steps_done: int, rows: Rows) -> Iterator[Batch]:
            loader = loaders[train.phase(max(steps_done - 1, 0))]
            return iter(()) if loader is None else loader.evaluation_batches(size, config.eval.max_rows, rows)

        return make_evaluator(plan, mesh, read, size)

    return make


def _write_result(workdir: Path, result: trainer.Result) -> dict[str, Any]:
    # BERT's own metrics are always there, null where they are undefined; the loss of nsp has never been one of them.
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
