"""Fine-tunes a checkpoint on a task, once for each seed and learning rate, and measures the results."""

from bert_jax.train.host_memory import keep_freed_memory

if __name__ == "__main__":
    keep_freed_memory()  # before the imports below start threads

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import jax
import ml_collections
import numpy as np
from rich.console import Console

from bert_jax import command
from bert_jax import config as config_lib
from bert_jax.callable_module import make_callable
from bert_jax.command import UserError
from bert_jax.config import FinetuneConfig, ModelConfig, short_flags
from bert_jax.data.batch_schedule import check_batch_size
from bert_jax.interop.initial_checkpoint import open_initial
from bert_jax.interop.initial_params import initial_params
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import sizes
from bert_jax.model.heads import Heads
from bert_jax.progress import print_note
from bert_jax.storage.location import Location, location, write_json
from bert_jax.tasks import (
    distillation,
    kept_head,
    key_sweep,
    measurement,
    padded_lengths,
    registry,
    reinitialized,
    results,
    submission,
    sweep,
    task_json,
    training,
)
from bert_jax.tasks.example import Split, TaskRows
from bert_jax.tasks.inference import FineTuned
from bert_jax.tasks.sweep import Trial
from bert_jax.tasks.task import Task
from bert_jax.tasks.task_source import TaskSource, fingerprint
from bert_jax.tokenizer import Tokenizer
from bert_jax.train import distributed, trainer
from bert_jax.train.compilation_cache import enable_compilation_cache, write_on_every_host
from bert_jax.train.held_workdir import held_workdir
from bert_jax.train.parameter_summary import VERBOSE

DESCRIPTION = f"""Fine-tunes a checkpoint on a named task or on your own files, and prints the metrics as JSON.

  python -m bert_jax.finetune --config glue:task=sst2 --workdir runs/sst2 --config.init_from=CHECKPOINT
  python -m bert_jax.finetune --config tagging:task=ewt --workdir runs/ewt --config.init_from=CHECKPOINT
  python -m bert_jax.finetune --config own --workdir runs/stars --config.init_from=CHECKPOINT \\
      --config.task.train=train.tsv --config.task.dev=dev.tsv --config.task.text=review --config.task.label=stars

CHECKPOINT is a workdir of pretraining or fine-tuning, a step in it, an export, a Hugging Face folder, or hf:NAME
(hf:bert-base-uncased, hf:ORG/NAME), a model of the Hugging Face Hub.
Named tasks: {", ".join(registry.TASKS)}.
Their files are read from --config.task.data_dir, by default $BERT_JAX_DATA. For ewt, bert_jax includes a part of the
data, which is used unless data_dir is set.

Common configuration keys (see also docs/finetuning.md):
  --config.epochs=3  --config.batch_size=32  --config.optimizer.learning_rate=3e-5  --config.task.max_length=128
  --config.seeds=5            train with seeds 0 to 4, each in WORKDIR/seed-K; the best by the dev metric is also
                              written to WORKDIR itself. Several numbers (0,7,9) are the seeds themselves.
  --config.learning_rates="2e-5,3e-5,5e-5"     train with each learning rate and each seed
  --config.task.metrics=f1,accuracy            the metrics; the first one selects the seed and the rate, and with
                              early_stop the step of a run, which otherwise is the last one
                              (or --config.checkpoint.best=eval_NAME, if given)
  --config.task.labels=no,yes --config.task.label_map=0:no,1:yes --config.task.positive=yes
                              the order of the labels, what those of the files mean, and the one that f1 is of
  --config.sweep='optimizer.learning_rate=1e-5,3e-5;batch_size=16,32'
                              a sweep over any keys, each setting with each seed in WORKDIR/sweep-SETTING
  --config.run_together=auto|yes|no            train all seeds and rates in one program; auto: on an accelerator
  --config.early_stop=2       stop after this many evaluations without improvement, and keep the best step
  --config.train_layers=all|head|last:K|no_embeddings|gradual|gradual:EPOCHS
  --config.lora.rank=8        train low-rank adapters and the head alone (docs/adapting.md)
  --config.distill.teacher=CHECKPOINT --config.init_layers=1,3,5
                              learn from a larger model, too, beginning with some of its layers (docs/distillation.md)
  --config.reinit_layers=2    begin with random parameters in the last 2 layers and the pooler
  --config.task.pooling=cls|mean|max|last|attention_dot|attention_additive
                              the pooling of token vectors for a class or score (default: as in CHECKPOINT)
  --config.task.layer_mix=True                 classes and tags read a learned mix of all layers
  --config.task.submission=DIR                 also write the files that the GLUE and SuperGLUE leaderboards accept

{short_flags.help_text(FinetuneConfig)}

If the run is interrupted, run the same command again to resume. One run at a time may train in a workdir.
"""

# Published embedding tables are padded to a multiple of up to this many rows beyond the vocabulary.
PADDED_TABLE = 128

UNTRAINED_CLS = (
    "the checkpoint was pretrained without next sentences, so [CLS] does not represent a text yet; "
    "--config.task.pooling=mean often scores much higher (docs/finetuning.md)"
)


@dataclass(frozen=True)
class Start:
    """The model, tokenizer and checkpoint from which fine-tuning starts."""

    model: ModelConfig
    tokenizer: Tokenizer
    loaded: LoadedModel | None  # None: from scratch

    @property
    def cls_is_untrained(self) -> bool:
        """Whether bert_jax pretrained the checkpoint on masked tokens alone, which does not train [CLS]."""
        if self.loaded is None or not self.loaded.training:
            return False
        return self.loaded.heads.mlm and not self.loaded.heads.next_sentence

    def initial_params(self, heads: Heads, task: Task) -> dict[str, np.ndarray]:
        """Returns the parameters of the checkpoint by path; each seed initializes the others at random."""
        if self.loaded is None:
            return {}
        loaded = kept_head.with_labels_of(self.loaded, task)
        return initial_params(loaded, self.model, heads, self.tokenizer, task_json.to_json(task))

    def summary(self) -> dict[str, Any] | None:
        """Returns `start` in result.json: the path, and the task of a fine-tuned checkpoint; None: from scratch."""
        if self.loaded is None:
            return None
        return {"path": self.loaded.origin, "task": self.loaded.task["name"] if self.loaded.task else None}


@dataclass(frozen=True)
class Data:
    """A task and its splits; rows and counts hold the encoded splits that have labels."""

    task: Task
    splits: dict[str, Split]
    rows: dict[str, TaskRows]
    counts: dict[str, dict[str, int]]


def finetune(
    config: FinetuneConfig | ml_collections.ConfigDict,
    workdir: str | PurePath,
    tokenizer: Tokenizer | None = None,
    *,
    verbose: bool = False,
) -> dict[str, Any]:
    """Trains once for each seed and each of config.learning_rates, and returns the content of result.json.

    Its keys:
        task: the name of the task.
        start: {path, task} of the initial checkpoint; task is the one it was fine-tuned for, if any.
            None if training starts from scratch.
        seeds: the seeds.
        metrics: {name: {mean, std, values}}. Metrics of dev have no prefix, those of another
            labelled split have its name, such as `test_`. std is the sample standard deviation,
            None for one seed.
        steps: for each seed, the step of the parameters that are kept.
        counts: by split.
        best: the best run, if there are several.
        learning_rates: the same figures for each rate, if there are several.

    With one seed, WORKDIR is the run. With several seeds, each run is in WORKDIR/seed-K (with
    learning_rates, even a single one, in WORKDIR/rate-R/seed-K), and WORKDIR also holds the best run
    by the dev metric that sweep.chosen_by names. With config.sweep, each setting has such a workdir in
    WORKDIR/sweep-SETTING; WORKDIR holds the best one, and the result has the figures of all under `sweep`
    (key_sweep.run). A `verbose` run prints its parameters. An empty init_from trains config.model
    from scratch and requires a tokenizer. Raises UserError for a mistake in the configuration, the
    files or the checkpoint, and Stopped after SIGTERM.
    """
    if isinstance(config, ml_collections.ConfigDict):
        config = config_lib.load(FinetuneConfig, config)
    workdir = location(workdir)
    if not config.sweep:
        return _finetune(config, workdir, tokenizer, verbose)[0]
    settings = key_sweep.settings_of(config)
    sweep.check(config, workdir)
    for setting in settings:  # before anything is trained
        _check(setting.config, workdir / setting.folder)
    with held_workdir(workdir):
        return key_sweep.run(settings, workdir, lambda one, folder: _finetune(one, folder, tokenizer, verbose))


def _finetune(
    config: FinetuneConfig, workdir: Location, tokenizer: Tokenizer | None, verbose: bool
) -> tuple[dict[str, Any], str]:
    """Returns the content of result.json, and the metric that selects."""
    start, data, runs = prepare(config, workdir, tokenizer)
    runs = {trial: dataclasses.replace(run, verbose=verbose) for trial, run in runs.items()}
    with held_workdir(workdir) as check_held:
        by_trial, steps = training.train(config, data.task, data.rows, runs)
        chosen_by, origin = sweep.chosen_by(config, data.task), {"start": start.summary()}
        result = results.result(data.task.name, chosen_by, by_trial, steps, data.counts) | origin
        best = results.best(by_trial, chosen_by)
        check_held()
        if best.folder:
            results.keep_best(workdir, best, averaged=config.optimizer.ema_decay > 0)
        if distributed.is_primary():
            for trial, metrics in by_trial.items():
                own = results.result(data.task.name, chosen_by, {trial: metrics}, steps, data.counts)
                write_json(workdir / trial.folder / trainer.RESULT_FILE, own | origin)
            write_json(workdir / trainer.RESULT_FILE, result)
        if config.task.submission:
            model = FineTuned(open_checkpoint(workdir), batch_size=config.batch_size)
            for path in submission.submit(model, data.splits, config.task.submission):
                _print(f"wrote the leaderboard submission {path}")
    return result, chosen_by


def prepare(
    config: FinetuneConfig, workdir: Location, tokenizer: Tokenizer | None = None
) -> tuple[Start, Data, dict[Trial, trainer.Run]]:
    """Returns the start, the encoded data, and the run of each seed and rate. Writes nothing."""
    _check(config, workdir)
    task, files = registry.resolve(config.task)
    for path in files.values():
        for line in measurement.file_remarks(path):
            _print(line)
    if config.task.submission:
        submission.check(task.name, files)
    train = registry.read(task, files["train"])
    task = task.complete(train)  # with the labels of train, by which those of the other files are matched
    others = {name: path for name, path in files.items() if name != "train"}
    splits = {"train": train} | {
        name: registry.read(task, path, label_required=name.startswith(("train", "dev")))
        for name, path in others.items()
    }
    start = open_start(config, tokenizer)
    if start.loaded and not config.task.pooling:
        task = task.with_pooling(start.loaded.heads.pooling)
    if start.loaded and start.loaded.task and start.loaded.task["kind"] == task.kind:
        stored = dict(start.loaded.task)
        if config.task.pooling and "pooling" in stored:  # it may be one that bert_jax does not have
            stored["pooling"] = config.task.pooling
        task = task.continuing(task_json.from_json(stored), config.task.pooling)
    task.check_model(start.model)
    if getattr(task, "layer_mix", False) and not task.objective().heads.layer_mix:  # a kind of the user's own
        raise UserError(f"task.layer_mix is set, but the objective of kind {task.kind} does not read it. Leave it out")
    if getattr(task, "pooling", "") == "cls" and not start.tokenizer.adds_special_tokens:
        raise UserError("task.pooling is cls, but the vocabulary adds no [CLS]. Use --config.task.pooling=mean")
    if getattr(task, "pooling", "") == "cls" and not config.task.pooling and start.cls_is_untrained:
        _print(UNTRAINED_CLS)
    data = _encode(task, splits, start)
    return start, data, _runs(config, workdir, start, data)


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("bert_jax.finetune", DESCRIPTION)
    parser.add_argument(
        "--config",
        required=True,
        help="a recipe by its name, e.g. glue:task=sst2, or a file; --config.KEY=VALUE sets a key",
    )
    parser.add_argument(
        "--workdir",
        required=True,
        help="the folder for checkpoints, metrics and the result; on disk, gs://BUCKET/NAME or s3://BUCKET/NAME",
    )
    parser.add_argument("--verbose", action="store_true", help=VERBOSE)
    distributed.add_flags(parser)
    known, overrides = parser.parse_known_args(list(arguments))
    enable_compilation_cache()
    config = config_lib.read_flags(known.config, overrides)
    with distributed.processes(known):
        write_on_every_host()
        result = finetune(config, known.workdir, verbose=known.verbose)
        if distributed.is_primary():
            for table_of in [*([key_sweep.table(result)] if "sweep" in result else []), *results.tables(result)]:
                Console(stderr=True).print(table_of)
            print(json.dumps(result))


def _check(config: FinetuneConfig, workdir: Location) -> None:
    if config.epochs <= 0 and config.steps <= 0 and config.budget_minutes <= 0:
        raise UserError(f"config.epochs is {config.epochs}; use more than 0, or set steps or budget_minutes")
    check_batch_size(config.batch_size)
    if config.length_pool < 1:
        raise UserError(
            f"config.length_pool is {config.length_pool}; use a number of steps, or 1 not to group rows by length"
        )
    if config.padded_lengths < 0:
        raise UserError(
            f"config.padded_lengths is {config.padded_lengths}; use a number of lengths, or 0 to have it chosen"
        )
    if config.eval.max_rows:
        raise UserError("config.eval.max_rows is for pretraining; task metrics are computed over whole files. Omit it")
    sweep.check(config, workdir)


def _print(line: str) -> None:
    print_note(line, quiet=not distributed.is_primary())


def open_start(config: FinetuneConfig, tokenizer: Tokenizer | None) -> Start:
    loaded = open_initial(config)
    if loaded is not None:
        given = sizes.given_fields(config.model)
        for name, value in given.items():
            if name not in ("dropout", "attention_dropout") and value != getattr(loaded.model, name):
                raise UserError(
                    f"model.{name} is {value}, but {config.init_from} has {getattr(loaded.model, name)}; omit it"
                )
        if loaded.model.vocab_size - loaded.vocabulary.vocab_size > PADDED_TABLE:
            _print(
                f"warning: the embedding table of {config.init_from} has {loaded.model.vocab_size} rows, but its "
                f"tokenizer has {loaded.vocabulary.vocab_size} tokens. Check that it belongs to this model"
            )
        model = sizes.with_options(loaded.model, config.model)
        if config.lora.rank:
            model = dataclasses.replace(model, lora=config.lora)
        return Start(model, Tokenizer(loaded.vocabulary.spec), loaded)
    if tokenizer is None:
        raise UserError(
            "init_from is not set; name the checkpoint to fine-tune with --config.init_from=CHECKPOINT (see --help)"
        )
    return Start(sizes.model_config(config.model, tokenizer.vocab_size), tokenizer, None)


def _encode(task: Task, splits: Mapping[str, Split], start: Start) -> Data:
    rows, counts = {}, {}
    for name, split in splits.items():
        if not split.labelled:
            _print(f"{split.path} has no labels; it is not evaluated")
            continue
        rows[name] = task.encode(split, start.tokenizer)
        counts[name] = measurement.counts(rows[name], task, start.tokenizer)
        for line in measurement.remarks(rows[name], registry.metrics_of(task, name)):
            _print(line)
    return Data(task, dict(splits), rows, counts)


def _runs(config: FinetuneConfig, workdir: Location, start: Start, data: Data) -> dict[Trial, trainer.Run]:
    """Returns the run of each trial; runs differ only in seed, learning rate and workdir."""
    rows = data.rows["train"]
    distilled = distillation.distilled_task(config, start.model, data.task, start.tokenizer)
    objective = data.task.objective() if distilled is None else distilled.objective
    reinitialized.check(config, start.model)
    initial = start.initial_params(objective.heads, data.task)
    evaluators = []
    measured: tuple[str, ...] = ()
    if "dev" in data.rows:
        size = config.eval.batch_size or config.batch_size
        measured = data.task.metric_names(data.splits["dev"])
        evaluators.append(measurement.make_evaluator(data.task, data.rows["dev"], size))

    every = {
        trial: sweep.settings(config, trial, data.task, rows.count, measured=bool(evaluators))
        for trial in sweep.trials_of(config)
    }
    seeds = sweep.seeds_of(config)
    steps = next(iter(every.values())).steps
    lengths = _padded_lengths(config, steps * len(every), start.model, rows, data.task.max_length)
    # Runs of one program have batches of one length at each step; others are padded for their own seed alone.
    together = training.in_one_program(config, len(every), start.model, objective.heads)
    # One source for each seed, not for each trial: all learning rates see the same batches, and share one copy of them.
    sources = {
        seed: TaskSource(
            rows,
            batch_size=config.batch_size,
            seed=seed,
            lengths=lengths,
            pool=config.length_pool,
            steps=steps,
            seeds=seeds if together else (),
        )
        for seed in seeds
    }
    params = {seed: reinitialized.with_random_top(initial, config, start.model, objective, seed) for seed in seeds}
    return {
        trial: trainer.Run(
            config=settings,
            model=start.model,
            objective=objective,
            source=sources[trial.seed],
            shapes_at=sources[trial.seed].first_of_each_length(),
            workdir=workdir / trial.folder,
            summary_workdir=workdir,
            tokenizer=start.tokenizer,
            kind="finetuning",
            description=f"{data.task.name} {trial.folder or f'seed {trial.seed}'}",
            evaluators=evaluators,
            measured=measured,
            held_out={"task.dev": fingerprint(data.rows["dev"])} if evaluators else {},
            notes=() if distilled is None else (distilled.note,),
            initial_params=params[trial.seed],
            constants={} if distilled is None else distilled.constants,
            train_layers="head" if config.lora.rank else config.train_layers,
            unfreeze_every=sweep.unfreeze_every(config, rows.count),
            early_stop=config.early_stop,
            task=task_json.to_json(data.task),
        )
        for trial, settings in every.items()
    }


def _padded_lengths(
    config: FinetuneConfig, steps: int, model: ModelConfig, rows: TaskRows, max_length: int
) -> tuple[int, ...]:
    """The lengths of training batches; steps are those of all trials together, 0 if the run ends by minutes."""
    most = config.padded_lengths or padded_lengths.SHAPES
    if config.padded_lengths or not steps:
        return padded_lengths.best_lengths(rows.lengths, max_length, most)
    price = padded_lengths.price(model, trainer.runtime_of(config), jax.default_backend())
    passes = steps * config.batch_size / rows.count
    return padded_lengths.best_lengths(rows.lengths, max_length, most, passes=passes, price=price)


make_callable(__name__)

if __name__ == "__main__":
    command.run(main)
