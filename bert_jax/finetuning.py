"""Fine-tunes a checkpoint on a task, once for each seed and learning rate, and measures the results."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import ml_collections
from rich.console import Console

from bert_jax import command
from bert_jax import config as config_lib
from bert_jax.config import FinetuneConfig, short_flags
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.storage.location import Location, location, write_json
from bert_jax.tasks import (
    key_sweep,
    prepared_runs,
    registry,
    results,
    submission,
    sweep,
    training,
)
from bert_jax.tasks.example import Split
from bert_jax.tasks.inference import FineTuned
from bert_jax.tokenizer import Tokenizer
from bert_jax.train import distributed
from bert_jax.train.checkpoint import held_workdir
from bert_jax.train.compilation_cache import enable_compilation_cache, write_on_every_host
from bert_jax.train.parameter_summary import VERBOSE
from bert_jax.train.run import RESULT_FILE

WIDTH = 160  # columns of the tables where no terminal limits them

DESCRIPTION = f"""Fine-tunes a checkpoint on a named task or on your own files, and prints the metrics as JSON.

  bert-jax finetune --config glue:task=sst2 --workdir runs/sst2 --config.init_from=CHECKPOINT
  bert-jax finetune --config tagging:task=ewt --workdir runs/ewt --config.init_from=CHECKPOINT
  bert-jax finetune --config own --workdir runs/stars --config.init_from=CHECKPOINT \\
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
                              a sweep over any keys, each setting with each seed in WORKDIR/sweep-SETTING; values with
                              commas are in quotes or parentheses, such as 'init_layers=(0,2,4),(1,3,5)'
  --config.early_stop=2       stop after this many evaluations without improvement, and keep the best step
  --config.train_layers=all|head|last:K|no_embeddings|gradual|gradual:EPOCHS
  --config.lora.rank=8        train low-rank adapters and the head alone (docs/adapting.md)
  --config.distill.teacher=CHECKPOINT --config.init_layers=1,3,5
                              learn from a larger model, too, beginning with some of its layers (docs/adapting.md)
  --config.reinit_layers=2    begin with random parameters in the last 2 layers and the pooler
  --config.task.pooling=cls|mean|max|last|attention_dot|attention_additive
                              the pooling of token vectors for a class or score (default: as in CHECKPOINT)
  --config.task.layer_mix=True                 classes and tags read a learned mix of all layers
  --config.task.submission=DIR                 also write the files that the GLUE and SuperGLUE leaderboards accept

{short_flags.help_text(FinetuneConfig)}

If the run is interrupted, run the same command again to resume. One run at a time may train in a workdir.
"""


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
    by the dev metric that sweep.chosen_by names (the first run without a dev file). With config.sweep,
    each setting has such a workdir in WORKDIR/sweep-SETTING; WORKDIR holds the best one, and the result
    has the figures of all under `sweep` (key_sweep.run). All settings are checked before the first one
    trains. A `verbose` run prints its parameters. An empty init_from trains config.model from scratch
    and requires a tokenizer. Raises UserError for a mistake in the configuration, the files or the
    checkpoint, and Stopped after SIGTERM.
    """
    if isinstance(config, ml_collections.ConfigDict):
        config = config_lib.load(FinetuneConfig, config)
    workdir = location(workdir)
    if not config.sweep:
        tuned = _finetune(config, workdir, tokenizer, verbose)
        _submit(config, workdir, tuned.splits)
        return tuned.result
    settings = key_sweep.settings_of(config)
    kept = prepared_runs.Kept()
    key_sweep.check(config, settings, workdir, tokenizer, kept)  # before anything is trained
    by_folder: dict[Location, dict[str, Split]] = {}

    def run(setting: FinetuneConfig, folder: Location) -> tuple[dict[str, Any], str, bool]:
        tuned = _finetune(setting, folder, tokenizer, verbose, kept)
        if config.task.submission:
            by_folder[folder] = tuned.splits
        return tuned.result, tuned.chosen_by, tuned.stop

    with held_workdir(workdir):
        result = key_sweep.run(settings, workdir, run)
        _submit(config, workdir, by_folder.get(workdir / result["best"]["run"], {}))
        return result


class _Tuned(NamedTuple):
    """A finished fine-tuning: the content of result.json, the metric that selects, whether SIGTERM arrived at the end,
    and the splits of its task."""

    result: dict[str, Any]
    chosen_by: str
    stop: bool
    splits: dict[str, Split]


def _finetune(
    config: FinetuneConfig,
    workdir: Location,
    tokenizer: Tokenizer | None,
    verbose: bool,
    kept: prepared_runs.Kept | None = None,
) -> _Tuned:
    start, data, runs = prepared_runs.prepare(config, workdir, tokenizer, kept=kept)
    runs = {trial: dataclasses.replace(run, verbose=verbose) for trial, run in runs.items()}
    with held_workdir(workdir) as check_held:
        by_trial, steps, stop = training.train(data.task, data.rows, runs)
        chosen_by, origin = sweep.chosen_by(config, data.task), {"start": start.summary()}
        result = results.result(data.task.name, chosen_by, by_trial, steps, data.counts) | origin
        best = results.best(by_trial, chosen_by)
        check_held()
        if best.folder:
            results.keep_best(workdir, best, averaged=config.optimizer.ema_decay > 0)
        if distributed.is_primary():
            for trial, metrics in by_trial.items():
                own = results.result(data.task.name, chosen_by, {trial: metrics}, steps, data.counts)
                write_json(workdir / trial.folder / RESULT_FILE, own | origin)
            write_json(workdir / RESULT_FILE, result)
    return _Tuned(result, chosen_by, stop, data.splits)


def _submit(config: FinetuneConfig, workdir: Location, splits: Mapping[str, Split]) -> None:
    """Writes the files of task.submission, if it is set, from the best run."""
    if config.task.submission:
        model = FineTuned(open_checkpoint(workdir), batch_size=config.batch_size)
        for path in submission.submit(model, splits, config.task.submission):
            distributed.note(f"wrote the leaderboard submission {path}")


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("bert-jax finetune", DESCRIPTION)
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
            console = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
            for table_of in [*([key_sweep.table(result)] if "sweep" in result else []), *results.tables(result)]:
                console.print(table_of)
            print(json.dumps(result))
