"""Prepares the runs of a fine-tuning: their start, their encoded data, and a `Run` for each trial.

Read `prepare` first: it reads the files, opens the checkpoint (`Start`), encodes the splits (`Data`) and builds a `Run`
for each trial. Above it are the changes to a checkpoint's parameters, and the teacher of a distillation.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
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
from bert_jax.tasks import batches, held_out, leaderboards, measurement, registry, trials
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
from bert_jax.train.run import Run, make_runtime, root_key

STACK = "encoder/layers/"
POOLER = "pooler/"
# By kind, the heads with one output for each label, in their order.
HEADS = {"classification": ("classifier",), "multilabel": ("classifier",), "tagging": ("tagger", "crf")}
# The heads whose outputs are soft targets: these fields of both models must be equal.
OUTPUTS = ("classes", "choices", "tags", "question")
# Published embedding tables are padded to a multiple of up to this many rows beyond the vocabulary.
PADDED_TABLE = 128

UNTRAINED_CLS = (
    "the checkpoint was pretrained without next sentences, so [CLS] does not represent a text yet; "
    "--config.task.pooling=mean often scores much higher (docs/finetuning.md)"
)

Report = Callable[[str], None]
Value = TypeVar("Value")


def _check_reinitialized(config: FinetuneConfig, model: ModelConfig) -> None:
    """Raises UserError if config.reinit_layers does not fit the model or the other keys."""
    count = config.reinit_layers
    if not count:
        return
    trained, _, last = config.train_layers.partition(":")
    too_few = trained == "last" and last.isdecimal() and int(last) < count
    refusals = {
        "init_from is not set, so all layers are random. Omit it": not config.init_from,
        f"init_from is a model of kind {model.encoder.kind}. Omit it": model.encoder.kind != "transformer",
        "init_from is a model whose layers share parameters. Omit it": model.shared_layers != "none",
        f"the model has {model.layers} layers. Use 1 to {model.layers - 1}": not 0 < count < model.layers,
        f"lora.rank={config.lora.rank} trains adapters and no layers. Omit one of the two": config.lora.rank,
        f"train_layers={config.train_layers} does not train all of these layers from the beginning. Use "
        "train_layers=all, no_embeddings, or last:K with a larger K": trained in ("head", "gradual") or too_few,
    }
    if reason := next((reason for reason, refused in refusals.items() if refused), ""):
        raise UserError(f"reinit_layers is {count}, but {reason}")


def with_random_top(
    params: Mapping[str, np.ndarray], config: FinetuneConfig, model: ModelConfig, objective: Objective, seed: int
) -> dict[str, np.ndarray]:
    """Gives the last config.reinit_layers layers random parameters (Zhang et al. 2021, section 4).

    A run from scratch with this seed has the same ones. The pooler is removed, so that it is initialized like any
    parameter that a checkpoint lacks.
    """
    if not config.reinit_layers:
        return dict(params)

    # Only the top is returned from the compiled function, so that nothing else is stored.
    def top_layers(key: Key[Array, ""]) -> dict[str, Array]:
        every = layers.flatten(objective.init(model, key))
        return {path: every[path][-config.reinit_layers :] for path in params if rules.stack_path(path) == STACK}

    random = jax.device_get(jax.jit(top_layers)(root_key(seed)))
    changed = {path: value for path, value in params.items() if not path.startswith(POOLER)}
    for path, top in random.items():
        # [layers, ...]: layers are stacked along the first axis.
        changed[path] = np.concatenate([params[path][: -config.reinit_layers], np.asarray(top, params[path].dtype)])
    return changed


def with_task_labels(loaded: LoadedModel, task: Task) -> LoadedModel:
    """Reorders the outputs of a checkpoint's head by the task's labels, and changes a regression to its scale.

    A checkpoint of another kind, or with labels that labels.permutation does not pair, is returned as it is.
    """
    # The outputs keep their meaning, so that training continues at the old loss.
    if isinstance(task, ScaledTask):
        return with_target_scale(loaded, task.target_mean, task.target_std)
    if not loaded.task or loaded.task["kind"] != task.kind or task.kind not in HEADS or not task.labels:
        return loaded
    order = permutation(task.labels, tuple(loaded.task.get("labels") or ()))
    if order is None:
        return loaded
    params = dict(loaded.params)
    for path in params:
        if path.split(layers.SEPARATOR)[0] in HEADS[task.kind]:
            params[path] = params[path].take(order, axis=-1)
            if path == "crf/transitions":  # [from, to]
                params[path] = params[path].take(order, axis=0)
    return dataclasses.replace(loaded, params=params, task={**loaded.task, "labels": list(task.labels)})


@dataclass(frozen=True)
class DistilledTask(DistilledObjective):
    """A task with a teacher. The soft term is the mean of TaskObjective.soft_sum over whatever has a label."""

    base: TaskObjective

    def soft_count(self, batch: TaskBatch) -> Float[Array, ""]:
        return batch.label_weights.sum()

    def compare(self, models: Pair, batch: TaskBatch, dropout_key: PRNGKeyArray | None) -> tuple[Terms, Scalar]:
        outputs = self.base.outputs(models.student, batch, dropout_key)
        terms = self.base.loss_terms(models.student, outputs, batch)
        # Without soft targets, the teacher only gives hidden states.
        if SOFT not in self.term_metrics:
            return terms, jnp.zeros(())
        # Without a key, the teacher has no dropout.
        targets = self.base.outputs(models.teacher, batch, None)
        return terms, self.base.soft_sum(outputs, targets, batch, self.config.temperature)


def distilled_task(
    config: FinetuneConfig, student: ModelConfig, task: Task, vocabulary: Vocabulary
) -> Distilled | None:
    """Returns a task's objective with the teacher of config.distill; None without one.

    Raises:
        UserError: The teacher has another task, other labels or another tokenizer, the kind of task has no soft
            targets, or a key has no effect.
    """
    settings, base = config.distill, task.objective()
    settings.check_unused()
    if not settings.teacher:
        return None
    loaded = open_teacher(settings, vocabulary)
    teacher, kind = f"distill.teacher={settings.teacher}", loaded.task["kind"] if loaded.task else ""
    if settings.soft_weight and kind == task.kind:
        # Before labels are compared, the teacher's outputs get the order of the student's labels.
        loaded = with_task_labels(loaded, task)
    described = f"a model of a task of kind {kind}" if kind else "no model of a task"
    theirs, ours = (tuple(labels or ()) for labels in ((loaded.task or {}).get("labels"), task.labels))
    other_outputs = any(getattr(loaded.heads, name) != getattr(base.heads, name) for name in OUTPUTS)
    advice = "learn from its hidden states alone: --config.distill.soft_weight=0 --config.distill.hidden_weight=1"
    refusals = {
        f"distill.positions is {settings.positions}, which is for pretraining; a task compares what has a label. Omit "
        "it": settings.positions != "masked",
        f"task.max_length is {task.max_length}, but {teacher} has {loaded.model.max_positions} positions; use "
        f"--config.task.max_length={loaded.model.max_positions}": loaded.model.max_positions < task.max_length,
    }
    if settings.soft_weight:
        refusals |= {
            f"a task of kind {task.kind}{' with crf' if base.heads.crf else ''} has no soft targets for "
            f"distill.teacher; {advice}": not base.has_soft_targets,
            f"{teacher} is {described}, but the task is of kind {task.kind}. Use a teacher that was fine-tuned for it, "
            f"or {advice}": kind != task.kind,
            f"{teacher} has a CRF, which predicts tags jointly, so it has no soft targets for each word. Use a teacher "
            f"without one, or {advice}": bool(loaded.heads.crf),
            f"{teacher} has the labels {', '.join(theirs) or 'none'}, but the task has {', '.join(ours) or 'none'}. "
            f"Use a teacher with the same labels, name them by task.labels and task.label_map, or {advice}": (
                theirs != ours or other_outputs
            ),
        }
    if message := next((message for message, refused in refusals.items() if refused), ""):
        raise UserError(message)
    # Hidden states alone need no head of the teacher.
    heads = loaded.heads if settings.soft_weight else Heads()
    return distilled(DistilledTask, base, settings, student, loaded, heads)


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

    def summary(self) -> dict[str, Any] | None:
        """Returns `start` in result.json: the path, and the task if the checkpoint was fine-tuned."""
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
    """The data that a sweep's settings share: a task's files, an opened checkpoint, and the encoded data.

    Only the last setting's data is kept, so that it does not add up in memory.
    """

    def __init__(self) -> None:
        self._keys: dict[str, object] = {}  # what decides each value
        self._made: dict[str, tuple[Any, list[str]]] = {}  # the values, and the lines reported when they were made

    def keep_for(self, config: FinetuneConfig) -> None:
        """Drops the data that this configuration does not share."""
        start = config.init_from, config.init_layers, config.init_average
        keys = {"files": config.task, "checkpoint": start, "data": (config.task, start)}
        # Before anything new is made, so that two data sets are never in memory together.
        self._made = {name: made for name, made in self._made.items() if self._keys[name] == keys[name]}
        self._keys = keys

    def get(self, name: str, make: Callable[[Report], Value], report: Report) -> Value:
        """Returns a value, which is made if there is none. Its lines are reported in either case."""
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
    """Returns the start, the encoded data, and the runs by trial. Writes nothing; warnings are reported.

    Args:
        kept: Data of the last configuration; the parts that this one shares are not read or encoded again.
    """
    # Mistakes in the configuration are reported before any file is read.
    _check(config, workdir)
    kept = kept or Kept()
    kept.keep_for(config)
    task, splits = kept.get("files", lambda report: _read(config.task, report), report)
    start = open_start(config, tokenizer, report, kept)
    # The checkpoint decides what the configuration leaves open: the pooling of its heads, which Hugging Face folders
    # record too, then the options of its task.
    given = getattr(config.task, "pooling", "")
    if start.loaded and not given:
        task = with_pooling(task, start.loaded.heads.pooling)
    if start.loaded and start.loaded.task and start.loaded.task["kind"] == task.kind:
        task = _continuing(task, start.loaded.task, config, report)
    task.check_model(start.model)
    by_cls = getattr(task, "pooling", "") == "cls"
    if by_cls and not start.tokenizer.adds_special_tokens:
        raise UserError("task.pooling is cls, but the vocabulary adds no [CLS]. Use --config.task.pooling=mean")
    if getattr(task, "layer_mix", False) and not task.objective().heads.layer_mix:  # an extension's kind
        raise UserError(f"task.layer_mix is set, but the objective of kind {task.kind} does not read it. Omit it")
    if by_cls and not given and start.cls_is_untrained:
        report(UNTRAINED_CLS)
    data = kept.get("data", lambda report: _encode(task, splits, start, report), report)
    return start, data, _runs(config, workdir, start, data, report)


def _continuing(task: Task, stored: Mapping[str, Any], config: FinetuneConfig, report: Report) -> Task:
    """Takes over options from the checkpoint's task, and reports them."""
    pooling = getattr(config.task, "pooling", "")
    if pooling and "pooling" in stored:  # which may be one that bert_jax does not have
        stored = {**stored, "pooling": pooling}
    continued = task.continuing(registry.from_json(stored), config.task)
    options = [item.name for item in dataclasses.fields(TaskConfig.kinds.get(task.kind, config.task))]
    changed = [
        f"task.{key}={getattr(continued, key)!r}"
        for key in options
        if hasattr(task, key) and getattr(continued, key) != getattr(task, key)
    ]
    if changed:
        report(f"as in {config.init_from}: {', '.join(changed)}")
    return continued


def _read(config: TaskConfig, report: Report) -> tuple[Task, dict[str, Split]]:
    """Reads all files of a task, which its training file completes."""
    task, files = registry.resolve(config)
    for path in files.values():
        for line in measurement.file_remarks(path):
            report(line)
    # Before any file is read, which may take long.
    if config.submission:
        leaderboards.check(task, files)
    # The training file comes first, because its labels decide what the labels of the other files mean.
    train = registry.read(task, files["train"])
    # Of all rows: held-out ones have the same labels and scale.
    complete = task.complete(train)
    splits = {"train": train}
    if "dev" not in files:
        splits["train"], dev, line = held_out.split(task, train, config.dev_share)
        report(line)
        splits |= {"dev": dev} if dev else {}
    task = complete
    for name, path in files.items():
        if name != "train":
            splits[name] = registry.read(task, path, label_required=name.startswith(("train", "dev")))
    return task, splits


def _check(config: FinetuneConfig, workdir: Location) -> None:
    """Raises UserError for keys out of range, and for a workdir with other trials."""
    check_batch_size(config.batch_size)
    if max(config.epochs, config.steps, config.budget_minutes) <= 0:
        raise UserError(f"config.epochs is {config.epochs}; use more than 0, or set steps or budget_minutes")
    if config.eval.max_rows:
        raise UserError("config.eval.max_rows is for pretraining; task metrics are computed over whole files. Omit it")
    trials.check_workdir(config, workdir)


def open_start(
    config: FinetuneConfig,
    tokenizer: Tokenizer | None,
    report: Report = distributed.note,
    kept: Kept | None = None,
) -> Start:
    """Opens config.init_from, unless `kept` has it; without it, config.model starts with random parameters."""
    loaded = (kept or Kept()).get("checkpoint", lambda _: open_initial(config), report)
    if loaded is None:
        if tokenizer is None:
            raise UserError(
                "init_from is not set; name the checkpoint to fine-tune with --config.init_from=CHECKPOINT (see --help)"
            )
        return Start(sizes.model_config(config.model, tokenizer.vocab_size), tokenizer, None)
    # Dropout has no parameters, so it may differ from the checkpoint.
    for name, value in sizes.given_fields(config.model).items():
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


def _encode(task: Task, splits: Mapping[str, Split], start: Start, report: Report) -> Data:
    rows, counts = {}, {}
    # A split without labels is kept for a submission.
    for name, split in splits.items():
        if not split.labelled:
            report(f"{split.path} has no labels; it is not evaluated")
            continue
        rows[name] = task.encode(split, start.tokenizer)
        # The training file is the first split, so the others are encoded with the options that follow from it.
        if name == "train":
            task = task.fitted(rows[name])
        counts[name] = measurement.counts(rows[name], task, start.tokenizer)
        part = "held-out rows of " if name == "dev" and split.path == splits["train"].path else ""
        for line in measurement.remarks(rows[name], registry.with_split_metrics(task, name), training=name == "train"):
            report(f"{part}{line}")
    return Data(task, dict(splits), rows, counts)


def _runs(config: FinetuneConfig, workdir: Location, start: Start, data: Data, report: Report) -> dict[Trial, Run]:
    """Makes the runs, which differ only in seed and workdir."""
    rows, task, model, loaded = data.rows["train"], data.task, start.model, start.loaded
    distilled = distilled_task(config, model, task, start.tokenizer)
    objective = task.objective() if distilled is None else distilled.objective
    _check_reinitialized(config, model)
    initial: dict[str, np.ndarray] = {}  # the checkpoint's parameters; each seed initializes the others at random
    if loaded is not None:
        fitted, values = with_task_labels(loaded, task), registry.to_json(task)
        initial = initial_params(fitted, model, objective.heads, start.tokenizer, values, report)
    evaluators = []
    measured: tuple[str, ...] = ()
    if "dev" in data.rows:
        size = config.evaluation_rows(config.batch_size)
        measured = task.metric_names(data.splits["dev"])
        evaluators.append(functools.partial(measurement.measure_in_training, task, data.rows["dev"], size))

    every = {
        trial: trials.settings(config, trial, task, rows.count, measured=bool(evaluators))
        for trial in trials.list_trials(config)
    }
    # Trials differ only in their seeds, so the first one stands for all.
    steps = next(iter(every.values())).steps
    if rules.gradual_epochs(config.train_layers) is not None:
        layers = max(rules.stacks(bert.abstract_params(model, objective.heads)).values(), default=0)
        if line := trials.never_unfrozen(config, rows.count, steps, layers):
            report(line)
    # Few seeds may not repay compiling for many lengths, so the lengths depend on the steps of all trials together.
    lengths = _padded_lengths(config, steps * len(every), model, rows, task.max_length)
    runs = {}
    for trial, settings in every.items():
        source = TaskSource(rows, config.batch_size, trial.seed, lengths, pool=settings.length_pool, steps=steps)
        runs[trial] = Run(
            config=settings,
            model=model,
            objective=objective,
            source=source,
            shapes_at=source.first_of_each_length(),
            workdir=workdir / trial.folder,
            summary_workdir=workdir,
            tokenizer=start.tokenizer,
            kind="finetuning",
            description=f"{task.name} {trial.folder or f'seed {trial.seed}'}",
            evaluators=evaluators,
            measured=measured,
            held_out={"task.dev": fingerprint(data.rows["dev"])} if evaluators else {},
            notes=() if distilled is None else (distilled.note,),
            initial_params=with_random_top(initial, config, model, objective, trial.seed),
            constants={} if distilled is None else distilled.constants,
            train_layers="head" if config.lora.rank else config.train_layers,
            unfreeze_every=trials.unfreeze_every(config, rows.count),
            early_stop=config.early_stop,
            task=registry.to_json(task),
        )
    return runs


def _padded_lengths(
    config: FinetuneConfig, steps: int, model: ModelConfig, rows: TaskRows, max_length: int
) -> tuple[int, ...]:
    """Chooses the lengths of training batches; without steps, the run ends by minutes."""
    if not steps:
        return batches.best_lengths(rows.lengths, max_length)
    # Every length must repay its compilation.
    price = batches.price(model, make_runtime(config), jax.default_backend())
    passes = steps * config.batch_size / rows.count
    return batches.best_lengths(rows.lengths, max_length, passes=passes, price=price)
