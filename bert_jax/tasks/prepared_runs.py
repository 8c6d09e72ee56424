"""What a fine-tuning starts from, its encoded data, and the run of each seed and learning rate."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from bert_jax.command import UserError
from bert_jax.config import FinetuneConfig, ModelConfig, TaskConfig
from bert_jax.data.batch_schedule import check_batch_size
from bert_jax.interop.initial_checkpoint import open_initial
from bert_jax.interop.initial_params import initial_params
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import bert, sizes
from bert_jax.model.heads import Heads
from bert_jax.storage.location import Location
from bert_jax.tasks import (
    distillation,
    kept_head,
    measurement,
    padded_lengths,
    registry,
    reinitialized,
    submission,
    sweep,
    task_json,
)
from bert_jax.tasks.example import Split, TaskRows
from bert_jax.tasks.sweep import Trial
from bert_jax.tasks.task import Task
from bert_jax.tasks.task_source import TaskSource, fingerprint
from bert_jax.tokenizer import Tokenizer
from bert_jax.train import distributed, rules
from bert_jax.train.run import Run, runtime_of

# Published embedding tables are padded to a multiple of up to this many rows beyond the vocabulary.
PADDED_TABLE = 128

UNTRAINED_CLS = (
    "the checkpoint was pretrained without next sentences, so [CLS] does not represent a text yet; "
    "--config.task.pooling=mean often scores much higher (docs/finetuning.md)"
)


Report = Callable[[str], None]
Value = TypeVar("Value")


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

    def initial_params(self, heads: Heads, task: Task, report: Report) -> dict[str, np.ndarray]:
        """Returns the parameters of the checkpoint by path; each seed initializes the others at random."""
        if self.loaded is None:
            return {}
        loaded = kept_head.with_labels_of(self.loaded, task)
        return initial_params(loaded, self.model, heads, self.tokenizer, task_json.to_json(task), report)

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


class Latest(Generic[Value]):
    """A value, the key that decides it, and the lines that were reported when it was made."""

    def __init__(self) -> None:
        self._key: object = None
        self._made: tuple[Value, list[str]] | None = None

    def keep_if(self, key: object) -> None:
        """Drops the value unless it was made for this key."""
        if key != self._key:
            self._key, self._made = key, None

    def get(self, make: Callable[[Report], Value], report: Report) -> Value:
        """Returns the value, which is made if there is none, and reports its lines in either case."""
        if self._made is None:
            lines: list[str] = []
            self._made = make(lines.append), lines
        value, lines = self._made
        for line in lines:
            report(line)
        return value


class Kept:
    """What the settings of a sweep may share: the files of a task, an opened checkpoint, and the encoded data.

    Only those of the last setting are kept, so that they do not add up in memory.
    """

    def __init__(self) -> None:
        self.files: Latest[tuple[Task, dict[str, Split]]] = Latest()
        self.loaded: Latest[LoadedModel | None] = Latest()
        self.data: Latest[Data] = Latest()

    def keep_for(self, config: FinetuneConfig) -> None:
        """Drops what this configuration does not share."""
        start = config.init_from, config.init_layers, config.init_average
        self.files.keep_if(config.task)
        self.loaded.keep_if(start)
        self.data.keep_if((config.task, start))


def prepare(
    config: FinetuneConfig,
    workdir: Location,
    tokenizer: Tokenizer | None = None,
    report: Report = distributed.note,
    kept: Kept | None = None,
) -> tuple[Start, Data, dict[Trial, Run]]:
    """Returns the start, the encoded data, and the run of each seed and rate. Writes nothing; warnings are reported.

    What `kept` has of the configuration before, and this one shares, is neither read nor encoded again.
    """
    _check(config, workdir)
    kept = kept or Kept()
    kept.keep_for(config)
    task, splits = kept.files.get(lambda report: _read(config.task, report), report)
    start = open_start(config, tokenizer, report, kept.loaded)
    if start.loaded and not config.task.pooling:
        task = task.with_pooling(start.loaded.heads.pooling)
    if start.loaded and start.loaded.task and start.loaded.task["kind"] == task.kind:
        task = _continuing(task, start.loaded.task, config, report)
    task.check_model(start.model)
    if getattr(task, "layer_mix", False) and not task.objective().heads.layer_mix:  # a kind of the user's own
        raise UserError(f"task.layer_mix is set, but the objective of kind {task.kind} does not read it. Leave it out")
    if getattr(task, "pooling", "") == "cls" and not start.tokenizer.adds_special_tokens:
        raise UserError("task.pooling is cls, but the vocabulary adds no [CLS]. Use --config.task.pooling=mean")
    if getattr(task, "pooling", "") == "cls" and not config.task.pooling and start.cls_is_untrained:
        report(UNTRAINED_CLS)
    data = kept.data.get(lambda report: _encode(task, splits, start, report), report)
    return start, data, _runs(config, workdir, start, data, report)


def _continuing(task: Task, stored: Mapping[str, Any], config: FinetuneConfig, report: Report) -> Task:
    """The task with what the stored one of the checkpoint decides, which is reported."""
    if config.task.pooling and "pooling" in stored:  # it may be one that bert_jax does not have
        stored = {**stored, "pooling": config.task.pooling}
    found = task.continuing(task_json.from_json(stored), config.task)
    keys = [item.name for item in dataclasses.fields(TaskConfig) if hasattr(task, item.name)]
    changed = [f"task.{key}={value!r}" for key in keys if (value := getattr(found, key)) != getattr(task, key)]
    if changed:
        report(f"as in {config.init_from}: {', '.join(changed)}")
    return found


def _read(config: TaskConfig, report: Report) -> tuple[Task, dict[str, Split]]:
    """Reads all files of a task, which its training file completes."""
    task, files = registry.resolve(config)
    for path in files.values():
        for line in measurement.file_remarks(path):
            report(line)
    if config.submission:
        submission.check(task.name, files)
    train = registry.read(task, files["train"])
    task = task.complete(train)  # with the labels of train, by which those of the other files are matched
    others = {name: path for name, path in files.items() if name != "train"}
    return task, {"train": train} | {
        name: registry.read(task, path, label_required=name.startswith(("train", "dev")))
        for name, path in others.items()
    }


def _check(config: FinetuneConfig, workdir: Location) -> None:
    """Raises UserError for settings that no fine-tuning can have."""
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


def open_start(
    config: FinetuneConfig,
    tokenizer: Tokenizer | None,
    report: Report = distributed.note,
    opened: Latest[LoadedModel | None] | None = None,
) -> Start:
    """Opens config.init_from, unless `opened` has it; without init_from, the start is config.model with random
    parameters and needs a tokenizer."""
    loaded = (opened or Latest()).get(lambda _: open_initial(config), report)
    if loaded is not None:
        given = sizes.given_fields(config.model)
        for name, value in given.items():
            if name not in ("dropout", "attention_dropout") and value != getattr(loaded.model, name):
                raise UserError(
                    f"model.{name} is {value}, but {config.init_from} has {getattr(loaded.model, name)}; omit it"
                )
        if loaded.model.vocab_size - loaded.vocabulary.vocab_size > PADDED_TABLE:
            report(
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


def _encode(task: Task, splits: Mapping[str, Split], start: Start, report: Report) -> Data:
    rows, counts = {}, {}
    for name, split in splits.items():
        if not split.labelled:
            report(f"{split.path} has no labels; it is not evaluated")
            continue
        rows[name] = task.encode(split, start.tokenizer)
        counts[name] = measurement.counts(rows[name], task, start.tokenizer)
        further = task.training_remarks(rows[name]) if name == "train" else []
        for line in (*measurement.remarks(rows[name], registry.metrics_of(task, name)), *further):
            report(line)
    return Data(task, dict(splits), rows, counts)


def _runs(config: FinetuneConfig, workdir: Location, start: Start, data: Data, report: Report) -> dict[Trial, Run]:
    """Returns the run of each trial; runs differ only in seed, learning rate and workdir."""
    rows = data.rows["train"]
    distilled = distillation.distilled_task(config, start.model, data.task, start.tokenizer)
    objective = data.task.objective() if distilled is None else distilled.objective
    reinitialized.check(config, start.model)
    initial = start.initial_params(objective.heads, data.task, report)
    evaluators = []
    measured: tuple[str, ...] = ()
    if "dev" in data.rows:
        size = config.evaluation_rows(config.batch_size)
        measured = data.task.metric_names(data.splits["dev"])
        evaluators.append(measurement.make_evaluator(data.task, data.rows["dev"], size))

    every = {
        trial: sweep.settings(config, trial, data.task, rows.count, measured=bool(evaluators))
        for trial in sweep.trials_of(config)
    }
    seeds = sweep.seeds_of(config)
    steps = next(iter(every.values())).steps
    if rules.gradual_epochs(config.train_layers) is not None:
        layers = max(rules.stacks(bert.abstract_params(start.model, objective.heads)).values(), default=0)
        if line := sweep.never_unfrozen(config, rows.count, steps, layers):
            report(line)
    lengths = _padded_lengths(config, steps * len(every), start.model, rows, data.task.max_length)
    # One source for each seed, not for each trial: all learning rates see the same batches, and share one copy of them.
    sources = {
        seed: TaskSource(
            rows,
            batch_size=config.batch_size,
            seed=seed,
            lengths=lengths,
            pool=config.length_pool,
            steps=steps,
        )
        for seed in seeds
    }
    params = {seed: reinitialized.with_random_top(initial, config, start.model, objective, seed) for seed in seeds}
    return {
        trial: Run(
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
    price = padded_lengths.price(model, runtime_of(config), jax.default_backend())
    passes = steps * config.batch_size / rows.count
    return padded_lengths.best_lengths(rows.lengths, max_length, most, passes=passes, price=price)
