"""Fine-tunes a checkpoint on a task, once for each seed, and says how well it does."""

import dataclasses
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
from rich.console import Console
from rich.table import Table

from bert_jax import command
from bert_jax import config as config_lib
from bert_jax.command import Stopped, UserError
from bert_jax.config import FinetuneConfig, ModelConfig
from bert_jax.files import write_json
from bert_jax.interop import source as interop
from bert_jax.interop.loaded import Loaded
from bert_jax.model import sizes
from bert_jax.model.heads import Heads
from bert_jax.tasks import evaluation, submission, table
from bert_jax.tasks.example import Split, TaskRows
from bert_jax.tasks.finetuned import FineTuned
from bert_jax.tasks.kinds import kind_of
from bert_jax.tasks.source import TaskSource, fingerprint
from bert_jax.tasks.task import Task
from bert_jax.tokenizer import Tokenizer
from bert_jax.train import distributed, trainer
from bert_jax.train.host_memory import keep_freed_memory
from bert_jax.train.metrics import METRICS_FILE
from bert_jax.train.parameters import read_params, write_params
from bert_jax.train.programs import keep_programs
from bert_jax.train.restore import AVERAGE
from bert_jax.train.workdir import CHECKPOINTS, CONFIG_FILE, latest_step, read_config, write_config

DESCRIPTION = f"""Fine-tunes a checkpoint on a task: a named one, or files of your own.

  python -m bert_jax.finetune --config configs/glue.py:task=sst2 --workdir runs/sst2 --config.init_from=CHECKPOINT
  python -m bert_jax.finetune --config configs/tagging.py:task=ewt --workdir runs/ewt --config.init_from=CHECKPOINT
  python -m bert_jax.finetune --config configs/own.py --workdir runs/stars --config.init_from=CHECKPOINT \\
      --config.task.train=train.tsv --config.task.dev=dev.tsv --config.task.text=review --config.task.label=stars

CHECKPOINT is a workdir of pretraining or fine-tuning, a step in it, an export, or a Hugging Face folder.
Named tasks: {", ".join(table.TASKS)}. Their files are found in --config.task.data_dir,
or else in $BERT_JAX_DATA; a part of ewt comes with the code and is used unless data_dir is given.
--config.task.submission=DIR writes what the leaderboards of GLUE and SuperGLUE take of a named task.
Other keys: --config.seeds=0,1,2 (one run a seed, in WORKDIR/seed-K; WORKDIR then holds the best by dev),
--config.epochs=3, --config.train_layers=all|head|last:K|no_embeddings, --config.task.max_length=128,
--config.task.pooling=cls|mean|max|attention_dot|attention_additive (what a class reads; default: as CHECKPOINT has it),
--config.batch_size=32, --config.optimizer.learning_rate=3e-5. Run the same command again after a stop: it goes on.
"""

# Devlin et al. 2019 ramp up over 10,000 steps of pretraining; google-research/bert's run_classifier.py, whose
# --warmup_proportion is 0.1 by default, over a tenth of fine-tuning.
WARMUP_SHARE = 0.1
BEST_FILE = "best_seed.json"
PADDED_TABLE = 128  # rows that a published table of tokens may have beyond its vocabulary


@dataclass(frozen=True)
class Start:
    """Where fine-tuning starts from."""

    model: ModelConfig
    tokenizer: Tokenizer
    loaded: Loaded | None  # None: from scratch

    def initial_params(self, heads: Heads, task: Task) -> dict[str, np.ndarray]:
        """Parameters by path; what is not among them is drawn afresh, by each seed otherwise."""
        if self.loaded is None:
            return {}
        return interop.initial_params(self.loaded, self.model, heads, self.tokenizer, dataclasses.asdict(task)).params

    def told(self) -> dict[str, Any] | None:
        """What result.json says of it: its path, and the task that it was fine-tuned for; None: from scratch."""
        if self.loaded is None:
            return None
        return {"path": self.loaded.origin, "task": self.loaded.task["name"] if self.loaded.task else None}


@dataclass(frozen=True)
class Data:
    """A task and its encoded splits; those but train and dev only where they have labels."""

    task: Task
    rows: dict[str, TaskRows]
    counts: dict[str, dict[str, int]]


def finetune(
    config: FinetuneConfig | ml_collections.ConfigDict, workdir: str | Path, tokenizer: Tokenizer | None = None
) -> dict[str, Any]:
    """Trains once for each of config.seeds and returns what result.json holds.

    Keys: task, start {path, task} (what it began from, and what that was fine-tuned for; None: from scratch), seeds,
    metrics {name: {mean, std, values}} (the dev metrics under their names, those of another labelled split after its
    own, as `test_`; std is the sample deviation, None for one seed), counts by split. With one seed WORKDIR is the run;
    with several each has WORKDIR/seed-K, and WORKDIR opens as the best by the task's first dev metric.
    An empty init_from trains config.model from scratch, which takes a tokenizer. Raises UserError for a mistake in
    the configuration, the files or the checkpoint, and Stopped after SIGTERM.
    """
    if isinstance(config, ml_collections.ConfigDict):
        config = config_lib.load(FinetuneConfig, config)
    workdir = Path(workdir)
    _check(config, workdir)
    task, files = table.resolve(config.task)
    splits = {
        name: table.read(task, path, label_required=name.startswith(("train", "dev"))) for name, path in files.items()
    }
    if config.task.submission:
        submission.check(task.name, files)
    task = kind_of(task).complete(task, splits["train"])
    start = _open_start(config, tokenizer)
    if start.loaded and task.pooled and not config.task.pooling:
        task = dataclasses.replace(task, pooling=start.loaded.heads.pooling)
    if start.model.causal and task.pooled and task.pooling == "cls":
        raise UserError(
            "the model reads from left to right, so a text's first token knows nothing of the others; use "
            "--config.task.pooling=mean (or max, attention_dot, attention_additive)"
        )
    data = _encode(task, splits, start)
    initial = start.initial_params(kind_of(data.task).objective(data.task).heads, data.task)
    by_seed = {
        seed: _run_seed(config, seed, _seed_folder(config, workdir, seed), start, data, initial)
        for seed in config.seeds
    }
    told = {"start": start.told()}
    result = _result(data, by_seed) | told
    if len(config.seeds) > 1:
        _keep_best(config, workdir, data.task, by_seed)
    if distributed.leads():
        for seed, metrics in by_seed.items():
            write_json(_seed_folder(config, workdir, seed) / trainer.RESULT_FILE, _result(data, {seed: metrics}) | told)
        write_json(workdir / trainer.RESULT_FILE, result)
    if config.task.submission:
        model = FineTuned(interop.open_checkpoint(workdir), batch_size=config.batch_size)
        submission.submit(model, splits, config.task.submission)
    return result


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("bert_jax.finetune", DESCRIPTION)
    parser.add_argument(
        "--config", required=True, help="a recipe, as configs/glue.py:task=sst2; --config.KEY=VALUE sets a key"
    )
    parser.add_argument("--workdir", required=True, help="where checkpoints, metrics and the result go")
    distributed.add_flags(parser)
    known, overrides = parser.parse_known_args(list(arguments))
    keep_freed_memory()
    keep_programs()
    config = config_lib.read_flags(known.config, overrides)
    with distributed.processes(known):
        result = finetune(config, known.workdir)
        if distributed.leads():
            Console(stderr=True).print(_result_table(result))
            print(json.dumps(result))


def _check(config: FinetuneConfig, workdir: Path) -> None:
    if not config.seeds or len(set(config.seeds)) < len(config.seeds):
        raise UserError(f"seeds is {config.seeds}; give one or more different numbers, as --config.seeds=0,1,2")
    if config.epochs <= 0 and config.steps <= 0 and config.budget_minutes <= 0:
        raise UserError(f"epochs is {config.epochs}; use more than 0, or set steps or budget_minutes")
    if config.length_pool < 1:
        raise UserError(f"length_pool is {config.length_pool}; use a number of steps, 1 for rows as they come")
    if config.eval.max_rows:
        raise UserError("eval.max_rows is for pretraining; a task's metrics are over whole files. Leave it out")
    several = any(workdir.glob("seed-*/config.json"))
    if len(config.seeds) == 1 and several:
        raise UserError(f"{workdir} holds runs of several seeds. Name another --workdir, or give all of their seeds")
    if len(config.seeds) > 1 and (workdir / CONFIG_FILE).exists() and not several:
        raise UserError(f"{workdir} holds a run of one seed. Name another --workdir for several")


def _say(line: str) -> None:
    Console(stderr=True, soft_wrap=True, quiet=not distributed.leads()).print(line, markup=False, highlight=False)


def _open_start(config: FinetuneConfig, tokenizer: Tokenizer | None) -> Start:
    if config.init_from:
        loaded = interop.open_checkpoint(config.init_from, config.init_average)
        given = sizes.given_fields(config.model)
        for name, value in given.items():
            if name not in ("dropout", "attention_dropout") and value != getattr(loaded.model, name):
                raise UserError(
                    f"model.{name} is {value}, but {config.init_from} has {getattr(loaded.model, name)}; leave it out"
                )
        if loaded.model.vocab_size - loaded.tokenizer.vocab_size > PADDED_TABLE:
            _say(
                f"{config.init_from} has {loaded.model.vocab_size} rows of tokens, but its tokenizer knows "
                f"{loaded.tokenizer.vocab_size}: is it that of another model?"
            )
        model = sizes.with_options(loaded.model, config.model)
        return Start(model, loaded.tokenizer, loaded)
    if tokenizer is None:
        raise UserError("init_from is not set; --config.init_from=CHECKPOINT names what to fine-tune (see --help)")
    return Start(sizes.model_config(config.model, tokenizer.vocab_size), tokenizer, None)


def _encode(task: Task, splits: Mapping[str, Split], start: Start) -> Data:
    if task.max_length > start.model.max_positions:
        raise UserError(
            f"task.max_length is {task.max_length}, but the model has {start.model.max_positions} positions; "
            f"use --config.task.max_length={start.model.max_positions}"
        )
    rows, counts = {}, {}
    for name, split in splits.items():
        if not split.labelled:
            _say(f"{split.path} has no labels: not measured")
            continue
        rows[name] = kind_of(task).encode(task, split, start.tokenizer)
        counts[name] = evaluation.counts(rows[name], task, start.tokenizer)
        for line in evaluation.remarks(rows[name], table.metrics_of(task, name)):
            _say(line)
    return Data(task, rows, counts)


def _run_seed(
    config: FinetuneConfig, seed: int, folder: Path, start: Start, data: Data, initial: dict[str, np.ndarray]
) -> dict[str, float]:
    """Trains one seed (or goes on, or only measures what is trained already) and returns its final metrics."""
    settings = _settings(config, seed, data.rows["train"].count)
    batch_size = settings.eval.batch_size or settings.batch_size
    source = TaskSource(
        data.rows["train"],
        batch_size=settings.batch_size,
        seed=seed,
        max_length=data.task.max_length,
        pool=config.length_pool,
        steps=settings.steps,
    )
    evaluators = [evaluation.make_evaluator(data.task, data.rows["dev"], batch_size)] if "dev" in data.rows else []
    result = trainer.fit(
        trainer.Run(
            config=settings,
            model=start.model,
            objective=kind_of(data.task).objective(data.task),
            source=source,
            workdir=folder,
            tokenizer=start.tokenizer,
            kind="finetuning",
            description=f"{data.task.name} seed {seed}",
            evaluators=evaluators,
            held_out={"task.dev": fingerprint(data.rows["dev"])} if evaluators else {},
            initial_params=initial,
            train_layers=config.train_layers,
            task=dataclasses.asdict(data.task),
        )
    )
    if result.stop_asked and seed != config.seeds[-1]:
        raise Stopped(f"SIGTERM: {folder} is done, seeds after it are not; run the same command to go on")
    metrics = dict(result.evaluation)
    calibrated = _calibrated(data, folder, metrics)
    for split in [name for name in data.rows if name not in ("train", "dev")]:
        task = table.metrics_of(calibrated, split)
        measured = evaluation.measure(task, start.model, settings, result.params, data.rows[split])
        metrics |= {f"{evaluation.metric_prefix(split)}{name}": value for name, value in measured.items()}
    return metrics


def _calibrated(data: Data, folder: Path, metrics: Mapping[str, float]) -> Task:
    """The task with the thresholds that the metrics of dev tell, which its run's config.json then has too."""
    task = kind_of(data.task).calibrated(data.task, metrics if "dev" in data.rows else {})
    if task != data.task and distributed.leads():
        write_config(folder, dataclasses.replace(read_config(folder), task=dataclasses.asdict(task)))
    return task


def _settings(config: FinetuneConfig, seed: int, rows: int) -> FinetuneConfig:
    """The configuration of one seed's run, with steps, warmup and evaluation in steps."""
    epoch = math.ceil(rows / config.batch_size)
    length = config.steps or math.ceil(rows * config.epochs / config.batch_size)
    warmup = config.optimizer.warmup_steps
    if warmup < 0:
        warmup = 0 if config.optimizer.warmup_share > 0 else math.ceil(WARMUP_SHARE * length)
    return dataclasses.replace(
        config,
        seed=seed,
        seeds=(seed,),
        steps=config.steps if config.budget_minutes > 0 else length,
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=warmup),
        eval=dataclasses.replace(config.eval, every_steps=config.eval.every_steps or epoch),
    )


def _seed_folder(config: FinetuneConfig, workdir: Path, seed: int) -> Path:
    return workdir if len(config.seeds) == 1 else workdir / f"seed-{seed}"


def _keep_best(config: FinetuneConfig, workdir: Path, task: Task, by_seed: Mapping[int, Mapping[str, float]]) -> None:
    """Makes WORKDIR open as the seed with the best first dev metric (the first seed where there is no dev file)."""

    def score(seed: int) -> float:
        value = by_seed[seed].get(task.metrics[0], math.nan)
        return -math.inf if math.isnan(value) else value

    best = _seed_folder(config, workdir, max(config.seeds, key=score))
    note = workdir / BEST_FILE
    step = latest_step(best) or 0
    said = {"run": best.name, "step": step}
    if distributed.from_first(note.exists() and json.loads(note.read_text(encoding="utf-8")) == said):
        return
    if distributed.leads():
        (workdir / CONFIG_FILE).unlink(missing_ok=True)  # comes last: without it nobody opens the folder
        for old in (CHECKPOINTS, "tokenizer"):
            shutil.rmtree(workdir / old, ignore_errors=True)
    distributed.from_first("removed")
    kept = config.optimizer.ema_decay > 0
    average = read_params(best, item=AVERAGE) if kept else None
    write_params(workdir, step, read_params(best), average)  # by all processes together
    if distributed.leads():
        shutil.copytree(best / "tokenizer", workdir / "tokenizer")
        shutil.copy(best / METRICS_FILE, workdir / METRICS_FILE)
        write_config(workdir, read_config(best))
        write_json(note, said)


def _result(data: Data, by_seed: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    return {
        "task": data.task.name,
        "seeds": list(by_seed),
        "metrics": _summary(list(by_seed.values())),
        "counts": data.counts,
    }


def _summary(by_seed: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Mean, sample deviation and values of each metric; None for what is undefined."""
    found = {}
    for name in by_seed[0]:
        values = [metrics[name] for metrics in by_seed]
        known = not any(math.isnan(value) for value in values)
        found[name] = {
            "mean": float(np.mean(values)) if known else None,
            "std": float(np.std(values, ddof=1)) if known and len(values) > 1 else None,
            "values": [None if math.isnan(value) else value for value in values],
        }
    return found


def _result_table(result: Mapping[str, Any]) -> Table:
    shown = Table(title=f"{result['task']}: {len(result['seeds'])} seed(s)", title_justify="left")
    for column in ("metric", "mean", "deviation", *(f"seed {seed}" for seed in result["seeds"])):
        shown.add_column(column, justify="left" if column == "metric" else "right")
    for name, metric in result["metrics"].items():
        cells = (metric["mean"], metric["std"], *metric["values"])
        shown.add_row(name, *("-" if value is None else f"{value:.4f}" for value in cells))
    return shown


if __name__ == "__main__":
    command.run(main)
