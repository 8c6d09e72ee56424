"""Prepares the runs of a fine-tuning: what they start from, their encoded data, and the `Run` of each trial.

Read `prepare` first: it reads the files, opens the checkpoint (`Start`), encodes the splits (`Data`) and builds a `Run`
for each trial. Above it are the changes to a checkpoint's parameters, and the teacher of a distillation.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PRNGKeyArray

from bert_jax.config import FinetuneConfig, ModelConfig, TaskConfig
from bert_jax.data.schedules import check_batch_size
from bert_jax.errors import UserError
from bert_jax.interop.initial import Distilled, distilled, initial_params, open_initial, open_teacher
from bert_jax.interop.loaded_model import LoadedModel, with_target_scale
from bert_jax.model import bert, layers, sizes
from bert_jax.model.heads.config import Heads
from bert_jax.storage.location import Location
from bert_jax.tasks import batches, leaderboards, measurement, registry, trials
from bert_jax.tasks.batches import TaskSource, fingerprint
from bert_jax.tasks.labels import permutation
from bert_jax.tasks.rows import Split, TaskBatch, TaskRows
from bert_jax.tasks.task import ScaledTask, Task, TaskObjective, with_pooling
from bert_jax.tasks.trials import Trial
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.vocabulary import Vocabulary
from bert_jax.train import distributed, rules
from bert_jax.train.losses import Scalar
from bert_jax.train.objectives import DistilledObjective, Objective, Terms
from bert_jax.train.objectives.distilled import SOFT, Pair
from bert_jax.train.run import Run, root_key, runtime_of

# Random parameters in the top layers of a pretrained encoder (Zhang et al. 2021, section 4: re-initialization).


STACK = "encoder/layers/"
POOLER = "pooler/"


def _check_reinitialized(config: FinetuneConfig, model: ModelConfig) -> None:
    """Raises UserError where config.reinit_layers does not fit the model or the other keys."""
    layers = config.reinit_layers
    if not layers:
        return
    if not config.init_from:
        raise UserError(f"reinit_layers is {layers}, but init_from is not set, so all layers are random. Omit it")
    if model.encoder.kind != "transformer" or model.shared_layers != "none":
        what = (
            "whose layers share parameters" if model.encoder.kind == "transformer" else f"of kind {model.encoder.kind}"
        )
        raise UserError(f"reinit_layers is {layers}, but init_from is a model {what}. Omit it")
    if not 0 < layers < model.layers:
        raise UserError(f"reinit_layers is {layers}; use 1 to {model.layers - 1} of the model's {model.layers} layers")
    if config.lora.rank:
        raise UserError(
            f"reinit_layers is {layers}, but lora.rank={config.lora.rank} trains adapters and no layers. "
            "Omit one of the two"
        )
    kind, _, last = config.train_layers.partition(":")
    if kind in ("head", "gradual") or (kind == "last" and last.isdecimal() and int(last) < layers):
        raise UserError(
            f"reinit_layers is {layers}, but train_layers={config.train_layers} does not train all of these layers "
            "from the beginning. Use train_layers=all, no_embeddings, or last:K with a larger K"
        )


def with_random_top(
    params: Mapping[str, np.ndarray], config: FinetuneConfig, model: ModelConfig, objective: Objective, seed: int
) -> dict[str, np.ndarray]:
    """The parameters of a checkpoint, with those of the last config.reinit_layers layers as in a run from scratch with
    this seed, and without the pooler, which is then initialized like any parameter that a checkpoint lacks."""
    found = dict(params)
    if not config.reinit_layers:
        return found

    def top_layers(key: Key[Array, ""]) -> dict[str, Array]:
        every = layers.flatten(objective.init(model, key))
        return {path: every[path][-config.reinit_layers :] for path in params if rules.stack_path(path) == STACK}

    random = jax.device_get(jax.jit(top_layers)(root_key(seed)))
    for path, top in random.items():
        found[path] = np.concatenate([params[path][: -config.reinit_layers], np.asarray(top, params[path].dtype)])
    return {path: value for path, value in found.items() if not path.startswith(POOLER)}


# Fits the head of a fine-tuned checkpoint to a task with the same labels in another order, or another scale.


# The heads of each kind that have one output for each label, in their order.
HEADS = {"classification": ("classifier",), "multilabel": ("classifier",), "tagging": ("tagger", "crf")}


def with_labels_of(loaded: LoadedModel, task: Task) -> LoadedModel:
    """The checkpoint with the task's labels and the outputs of its head in their order, where the labels are the same.

    They are the same if the kinds are and labels.permutation pairs them. A regression gets the task's scale of
    targets. Other checkpoints are returned as they are.
    """
    if isinstance(task, ScaledTask):
        return with_target_scale(loaded, task.target_mean, task.target_std)
    if not loaded.task or loaded.task["kind"] != task.kind or task.kind not in HEADS or not task.labels:
        return loaded
    order = permutation(task.labels, tuple(loaded.task.get("labels") or ()))
    if order is None:
        return loaded
    params = _reordered(loaded.params, HEADS[task.kind], order)
    return dataclasses.replace(loaded, params=params, task={**loaded.task, "labels": list(task.labels)})


def _reordered(params: Mapping[str, np.ndarray], heads: Sequence[str], order: Sequence[int]) -> dict[str, np.ndarray]:
    found = dict(params)
    for path in params:
        if path.split(layers.SEPARATOR)[0] in heads:
            found[path] = found[path].take(order, axis=-1)
            if path == "crf/transitions":  # [from, to]
                found[path] = found[path].take(order, axis=0)
    return found


# Fine-tuning a student with a teacher (bert_jax/train/objectives/distilled.py): any checkpoint of the same task.


# The heads whose outputs are soft targets: these fields of both models must be equal.
OUTPUTS = ("classes", "choices", "tags", "question")


@dataclass(frozen=True)
class DistilledTask(DistilledObjective):
    """A task with a teacher: the soft term is TaskObjective.soft_sum, a mean over whatever has a label."""

    base: TaskObjective

    def soft_count(self, batch: TaskBatch) -> Float[Array, ""]:
        return batch.label_weights.sum()

    def compare(self, models: Pair, batch: TaskBatch, dropout_key: PRNGKeyArray | None) -> tuple[Terms, Scalar]:
        outputs = self.base.outputs(models.student, batch, dropout_key)
        terms = self.base.terms_of(models.student, outputs, batch)
        if SOFT not in self.term_metrics:
            return terms, jnp.zeros(())
        targets = self.base.outputs(models.teacher, batch, None)
        return terms, self.base.soft_sum(outputs, targets, batch, self.config.temperature)


def distilled_task(
    config: FinetuneConfig, student: ModelConfig, task: Task, vocabulary: Vocabulary
) -> Distilled | None:
    """The objective of a task with the teacher of config.distill; None without one.

    Raises UserError for a teacher of another task, with other labels or another tokenizer, for a kind of task without
    soft targets, and for keys that have no effect.
    """
    settings, base = config.distill, task.objective()
    settings.check_unused()
    if not settings.teacher:
        return None
    if settings.positions != "masked":
        raise UserError(
            f"distill.positions is {settings.positions}, which is for pretraining; a task compares what has a label. "
            "Omit it"
        )
    loaded = open_teacher(settings, vocabulary)
    if loaded.model.max_positions < task.max_length:
        raise UserError(
            f"task.max_length is {task.max_length}, but distill.teacher={settings.teacher} has "
            f"{loaded.model.max_positions} positions; use --config.task.max_length={loaded.model.max_positions}"
        )
    heads = Heads()
    if settings.soft_weight:
        loaded = _of_the_task(loaded, task, base, settings.teacher)
        heads = loaded.heads
    return distilled(DistilledTask, base, settings, student, loaded, heads)


def _of_the_task(loaded: LoadedModel, task: Task, base: TaskObjective, path: str) -> LoadedModel:
    """The teacher, with the outputs of its head in the order of the task's labels, and in the task's scale.

    Raises UserError for a task without soft targets, and for a teacher with other outputs.
    """
    advice = "learn from its hidden states alone: --config.distill.soft_weight=0 --config.distill.hidden_weight=1"
    if not base.has_soft_targets:
        crf = " with crf" if base.heads.crf else ""
        raise UserError(f"a task of kind {task.kind}{crf} has no soft targets for distill.teacher; {advice}")
    if not loaded.task or loaded.task["kind"] != task.kind:
        what = f"a model of a task of kind {loaded.task['kind']}" if loaded.task else "no model of a task"
        raise UserError(
            f"distill.teacher={path} is {what}, but the task is of kind {task.kind}. Use a teacher that was fine-tuned "
            f"for it, or {advice}"
        )
    if loaded.heads.crf:
        raise UserError(
            f"distill.teacher={path} has a CRF, which predicts tags jointly, so it has no soft targets for each word. "
            f"Use a teacher without one, or {advice}"
        )
    loaded = with_labels_of(loaded, task)
    theirs, ours = (tuple(labels or ()) for labels in ((loaded.task or {}).get("labels"), getattr(task, "labels", ())))
    if theirs != ours or any(getattr(loaded.heads, name) != getattr(base.heads, name) for name in OUTPUTS):
        raise UserError(
            f"distill.teacher={path} has the labels {', '.join(theirs) or 'none'}, but the task has "
            f"{', '.join(ours) or 'none'}. Use a teacher with the same labels, name them by task.labels and "
            f"task.label_map, or {advice}"
        )
    return loaded


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
        loaded = with_labels_of(self.loaded, task)
        return initial_params(loaded, self.model, heads, self.tokenizer, registry.to_json(task), report)

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


class Kept:
    """What the settings of a sweep may share: the files of a task, an opened checkpoint, and the encoded data.

    Only those of the last setting are kept, so that they do not add up in memory.
    """

    def __init__(self) -> None:
        self._keys: dict[str, object] = {}  # what decides each value
        self._made: dict[str, tuple[Any, list[str]]] = {}  # the values, and the lines reported when they were made

    def keep_for(self, config: FinetuneConfig) -> None:
        """Drops what this configuration does not share."""
        start = config.init_from, config.init_layers, config.init_average
        keys = {"files": config.task, "checkpoint": start, "data": (config.task, start)}
        self._made = {name: made for name, made in self._made.items() if self._keys[name] == keys[name]}
        self._keys = keys

    def get(self, name: str, make: Callable[[Report], Value], report: Report) -> Value:
        """Returns a value, which is made if there is none, and reports its lines in either case."""
        if name not in self._made:
            lines: list[str] = []
            self._made[name] = make(lines.append), lines
        value, lines = self._made[name]
        for line in lines:
            report(line)
        return value


def prepare(
    config: FinetuneConfig,
    workdir: Location,
    tokenizer: Tokenizer | None = None,
    report: Report = distributed.note,
    kept: Kept | None = None,
) -> tuple[Start, Data, dict[Trial, Run]]:
    """Returns the start, the encoded data, and the run of each seed. Writes nothing; warnings are reported.

    What `kept` has of the configuration before, and this one shares, is neither read nor encoded again.
    """
    _check(config, workdir)
    kept = kept or Kept()
    kept.keep_for(config)
    task, splits = kept.get("files", lambda report: _read(config.task, report), report)
    start = open_start(config, tokenizer, report, kept)
    pooling = getattr(config.task, "pooling", "")
    if start.loaded and not pooling:
        task = with_pooling(task, start.loaded.heads.pooling)
    if start.loaded and start.loaded.task and start.loaded.task["kind"] == task.kind:
        task = _continuing(task, start.loaded.task, config, report)
    task.check_model(start.model)
    if getattr(task, "layer_mix", False) and not task.objective().heads.layer_mix:  # a kind of the user's own
        raise UserError(f"task.layer_mix is set, but the objective of kind {task.kind} does not read it. Leave it out")
    if getattr(task, "pooling", "") == "cls" and not start.tokenizer.adds_special_tokens:
        raise UserError("task.pooling is cls, but the vocabulary adds no [CLS]. Use --config.task.pooling=mean")
    if getattr(task, "pooling", "") == "cls" and not pooling and start.cls_is_untrained:
        report(UNTRAINED_CLS)
    data = kept.get("data", lambda report: _encode(task, splits, start, report), report)
    return start, data, _runs(config, workdir, start, data, report)


def _continuing(task: Task, stored: Mapping[str, Any], config: FinetuneConfig, report: Report) -> Task:
    """The task with what the stored one of the checkpoint decides, which is reported."""
    pooling = getattr(config.task, "pooling", "")
    if pooling and "pooling" in stored:  # it may be one that bert_jax does not have
        stored = {**stored, "pooling": pooling}
    found = task.continuing(registry.from_json(stored), config.task)
    keys = [
        item.name
        for item in dataclasses.fields(TaskConfig.kinds.get(task.kind, config.task))
        if hasattr(task, item.name)
    ]
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
        leaderboards.check(task.name, files)
    train = registry.read(task, files["train"])
    task = task.complete(train)  # with the labels of train, by which those of the other files are matched
    others = {name: path for name, path in files.items() if name != "train"}
    return task, {"train": train} | {
        name: registry.read(task, path, label_required=name.startswith(("train", "dev")))
        for name, path in others.items()
    }


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
    trials.check_seeds(config, workdir)


def open_start(
    config: FinetuneConfig,
    tokenizer: Tokenizer | None,
    report: Report = distributed.note,
    kept: Kept | None = None,
) -> Start:
    """Opens config.init_from, unless `kept` has it; without init_from, the start is config.model with random
    parameters and needs a tokenizer."""
    loaded = (kept or Kept()).get("checkpoint", lambda _: open_initial(config), report)
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
        for line in measurement.remarks(rows[name], registry.metrics_of(task, name), training=name == "train"):
            report(line)
    return Data(task, dict(splits), rows, counts)


def _runs(config: FinetuneConfig, workdir: Location, start: Start, data: Data, report: Report) -> dict[Trial, Run]:
    """Returns the run of each trial; runs differ only in seed and workdir."""
    rows = data.rows["train"]
    distilled = distilled_task(config, start.model, data.task, start.tokenizer)
    objective = data.task.objective() if distilled is None else distilled.objective
    _check_reinitialized(config, start.model)
    initial = start.initial_params(objective.heads, data.task, report)
    evaluators = []
    measured: tuple[str, ...] = ()
    if "dev" in data.rows:
        size = config.evaluation_rows(config.batch_size)
        measured = data.task.metric_names(data.splits["dev"])
        evaluators.append(functools.partial(measurement.measure_in_training, data.task, data.rows["dev"], size))

    every = {
        trial: trials.settings(config, trial, data.task, rows.count, measured=bool(evaluators))
        for trial in trials.trials_of(config)
    }
    steps = next(iter(every.values())).steps
    if rules.gradual_epochs(config.train_layers) is not None:
        layers = max(rules.stacks(bert.abstract_params(start.model, objective.heads)).values(), default=0)
        if line := trials.never_unfrozen(config, rows.count, steps, layers):
            report(line)
    lengths = _padded_lengths(config, steps * len(every), start.model, rows, data.task.max_length)
    options: dict[str, Any] = {
        "batch_size": config.batch_size,
        "lengths": lengths,
        "pool": config.length_pool,
        "steps": steps,
    }
    sources = {trial: TaskSource(rows, seed=trial.seed, **options) for trial in every}
    return {
        trial: Run(
            config=settings,
            model=start.model,
            objective=objective,
            source=sources[trial],
            shapes_at=sources[trial].first_of_each_length(),
            workdir=workdir / trial.folder,
            summary_workdir=workdir,
            tokenizer=start.tokenizer,
            kind="finetuning",
            description=f"{data.task.name} {trial.folder or f'seed {trial.seed}'}",
            evaluators=evaluators,
            measured=measured,
            held_out={"task.dev": fingerprint(data.rows["dev"])} if evaluators else {},
            notes=() if distilled is None else (distilled.note,),
            initial_params=with_random_top(initial, config, start.model, objective, trial.seed),
            constants={} if distilled is None else distilled.constants,
            train_layers="head" if config.lora.rank else config.train_layers,
            unfreeze_every=trials.unfreeze_every(config, rows.count),
            early_stop=config.early_stop,
            task=registry.to_json(data.task),
        )
        for trial, settings in every.items()
    }


def _padded_lengths(
    config: FinetuneConfig, steps: int, model: ModelConfig, rows: TaskRows, max_length: int
) -> tuple[int, ...]:
    """The lengths of training batches; steps are those of all trials together, 0 if the run ends by minutes."""
    most = config.padded_lengths or batches.SHAPES
    if config.padded_lengths or not steps:
        return batches.best_lengths(rows.lengths, max_length, most)
    price = batches.price(model, runtime_of(config), jax.default_backend())
    passes = steps * config.batch_size / rows.count
    return batches.best_lengths(rows.lengths, max_length, most, passes=passes, price=price)
