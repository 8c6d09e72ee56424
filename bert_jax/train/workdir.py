"""Reads and writes a workdir: config.json, the parameters in checkpoints, and the run's provenance.

    config.json             what was trained: WorkdirConfig
    tokenizer/              bert_jax.tokenization.tokenizer
    checkpoints/STEP/       params, optimizer (not in results of convert and export), average (if the run keeps one),
                            meta

A run also writes run.json (train/run_record.py), metrics.jsonl (in a store metrics/), result.json and tensorboard/
(train/metrics.py), and holder.json while it trains (storage/hold.py).

A checkpoint records its run's provenance: configuration, data and versions. A run resumes only from a checkpoint of
equal provenance: everything that changes numbers must be equal, or be named by allow_changes. A file's location changes
no number, so configuration keys that name files are compared by fingerprint.

The last part starts a run at another run's checkpoint, with its optimizer state and step (config.branch_from).
"""

import dataclasses
import difflib
import hashlib
import importlib.metadata
import itertools
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import jax
import numpy as np

import bert_jax
from bert_jax import config as config_lib
from bert_jax.config import ModelConfig, TrainConfig, to_dict
from bert_jax.config.options import keys as config_keys
from bert_jax.config.options import marked
from bert_jax.data.schedules import batch_schedule
from bert_jax.errors import UserError
from bert_jax.model import sizes
from bert_jax.model.heads.config import Heads
from bert_jax.model.layers import unflatten
from bert_jax.storage.location import (
    Location,
    absolute,
    check_access,
    is_stored,
    location,
    read_json,
    store_errors,
    write_json,
)
from bert_jax.train import orbax_io
from bert_jax.train.checkpoint import BEST_FILE, Checkpoints
from bert_jax.train.gradient_sums import sum_dtype
from bert_jax.train.orbax_io import PARAMS, read_arrays, read_meta, signature
from bert_jax.train.run import TOKENS_BEFORE, Run, make_runtime
from bert_jax.train.sharding import make_mesh

CONFIG_FILE, CHECKPOINTS = "config.json", "checkpoints"
FINGERPRINT_DIGITS = 16
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
ALL = "all"

# The dtype in which devices sum gradients; empty: one device has all rows. A change through another mesh is reported;
# one through mesh.reduce_dtype is refused.
SUM_DTYPE = "mesh.reduce_dtype.effective"


@dataclass(frozen=True)
class WorkdirConfig:
    """A workdir's config.json."""

    model: ModelConfig
    heads: Heads
    kind: str = "pretraining"  # or finetuning
    training: Mapping[str, Any] = field(default_factory=dict)  # the configuration of the run; empty after convert
    task: Mapping[str, Any] | None = None  # fine-tuning: name, kind, labels
    dtype: str = "float32"  # of the file from which convert read the parameters
    data: Sequence[Mapping[str, Any]] = ()  # pretraining: what the shards hold (bert_jax/data/phases.py)


def write_config(workdir: str | PurePath, config: WorkdirConfig) -> None:
    """Writes WORKDIR/config.json atomically."""
    values = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    values |= {"model": to_dict(config.model), "heads": config.heads.to_json()}
    target = location(workdir) / CONFIG_FILE
    if not is_stored(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_json(target, values)


def read_config(workdir: str | PurePath) -> WorkdirConfig:
    """Reads WORKDIR/config.json.

    Raises:
        UserError: it is missing, damaged, or was not written by bert_jax.
    """
    path = location(workdir) / CONFIG_FILE
    with store_errors(path, f"read {path}"):
        exists = path.exists()
    if not exists:
        raise UserError(f"{workdir} is not a workdir: it contains no {CONFIG_FILE}. Check the path")
    values = read_json(path)
    keys = set(WorkdirConfig.__dataclass_fields__)
    # Exactly these keys: config.json of other libraries, such as transformers', has others.
    if set(values) != keys:
        raise UserError(f"{path} is not from a workdir of bert_jax, which has the keys {', '.join(sorted(keys))}")
    values["model"] = config_lib.load(ModelConfig, values["model"], f"{path}: model")
    values["heads"] = config_lib.load(Heads, values["heads"], f"{path}: heads")
    return WorkdirConfig(**values | {"data": tuple(values["data"])})


def saved_steps(workdir: str | PurePath) -> list[int]:
    """Returns a workdir's complete checkpoints in ascending order."""
    return orbax_io.saved_steps(absolute(location(workdir)) / CHECKPOINTS)


def latest_step(workdir: str | PurePath) -> int | None:
    """Returns a workdir's newest complete checkpoint, or None."""
    return max(saved_steps(workdir), default=None)


def selected_step(workdir: str | PurePath) -> int | None:
    """Returns the step that represents a workdir: the best one after early_stop, else the newest, or None."""
    newest = latest_step(workdir)
    note = location(workdir) / CHECKPOINTS / BEST_FILE
    if newest is None or not read_config(workdir).training.get("early_stop") or not note.exists():
        return newest
    # The best step may have been deleted by hand since best.json was written.
    step = read_json(note).get("step")
    return step if step in saved_steps(workdir) else newest


def read_params(workdir: str | PurePath, step: int | None = None, item: str = PARAMS) -> dict[str, np.ndarray]:
    """Reads the parameters of a step (None: the newest), or with item=AVERAGE their moving average, and verifies them.

    Returns:
        Arrays in host memory, by path.

    Raises:
        UserError: there is no such checkpoint or item.
        DamagedCheckpoint: files are damaged.
    """
    directory = absolute(location(workdir)) / CHECKPOINTS
    # Listed again below: a run that is still training may have removed the step meanwhile.
    if step is None and (step := latest_step(workdir)) is None:
        raise UserError(f"no checkpoint in {directory}: none has been saved. Train first, or name another folder")
    if step not in (saved := saved_steps(workdir)):
        steps = ", ".join(map(str, saved)) or "none"
        raise UserError(f"no checkpoint of step {step} in {directory}; its steps are {steps}")
    tensors = read_meta(directory / str(step))["tensors"].get(item)
    if tensors is None:
        raise UserError(
            f"checkpoint {directory / str(step)} has no moving average of its parameters: it is an export, or its run "
            "had no --config.optimizer.ema_decay. Use no average, or last:K, which is the mean of several checkpoints"
        )
    return read_arrays(directory / str(step), item, tensors)


def write_params(
    workdir: str | PurePath,
    step: int,
    params: Mapping[str, np.ndarray],
    average: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Writes parameters by path, and their moving average if given, as a checkpoint without an optimizer state."""
    nested = None if average is None else unflatten(dict(average))
    with Checkpoints(location(workdir) / CHECKPOINTS, keep=0) as checkpoints:
        checkpoints.save(step, unflatten(dict(params)), None, {}, nested)


def provenance(run: Run) -> dict[str, Any]:
    """Returns a run's provenance as JSON values: `configuration` by key, and `versions`."""
    dtype, mesh = make_runtime(run.config).compute_dtype, run.config.mesh
    files = (*marked(run.config, "file"), "model")  # the model follows below, as the run derived it
    fingerprints = {**run.source.fingerprints, **run.held_out}
    configuration = {key.name: key.default for key in config_keys(run.config) if not _within(key.name, files)}
    # What the run derived takes the place of what its recipe says, so that equal runs have equal provenance.
    configuration |= {
        "compute_dtype": dtype,  # instead of auto, whose meaning depends on the device
        SUM_DTYPE: sum_dtype(make_mesh(mesh), run.config.microbatches, mesh, dtype),
        "train_layers": run.train_layers,
        "init_from": _fingerprint(run.initial_params),
        **({"distill.teacher": _fingerprint(run.constants)} if run.constants else {}),
        **{key: f"fingerprint {value[:FINGERPRINT_DIGITS]}" for key, value in fingerprints.items()},
        **{f"{key}.share": share for key, share in run.shares.items()},
        **_flat({"model": to_dict(run.model), "heads": run.objective.heads.to_json()}),
    }
    # Through JSON, so that values compare with those that a checkpoint's metadata holds.
    return {"configuration": json.loads(json.dumps(configuration)), "versions": versions()}


def runtime_choices(run: Run) -> dict[str, Any]:
    """Returns the options for the model's computation: equal in all processes, and free on resume."""
    model = {item.name for item in dataclasses.fields(ModelConfig)}
    values = to_dict(run.config.model).items()
    return {f"model.{name}": value for name, value in values if name not in {*model, "preset"}}


def check_provenance(
    run: Run, here: Mapping[str, Any], there: Mapping[str, Any] | None, name: str, may_change: Sequence[str] = ()
) -> list[str]:
    """Compares a run with the checkpoint from which it resumes; returns a line for each allowed difference.

    Args:
        here: the run's `provenance`.
        there: the checkpoint's; None: it has none.
        name: the checkpoint, for messages.
        may_change: keys or prefixes that may differ, in addition to those for a run's end.

    Raises:
        UserError: a key differs and config.allow_changes does not name it, or names an unknown key.
    """
    if there is None:
        raise UserError(
            f"{name} does not record which run made it (it comes from convert), so training "
            "cannot resume from it. Name another --workdir, and this one by --config.init_from"
        )
    now, before = here["configuration"], there["configuration"]
    keys = sorted({*before, *now})
    allowed = run.config.allow_changes
    for key in allowed:
        if key != ALL and not any(_within(known, (key,)) for known in keys):
            near = difflib.get_close_matches(key, keys, n=1)
            advice = f"did you mean {near[0]}?" if near else "copy keys from the message that refused them, or use all"
            raise UserError(f"config.allow_changes: {key!r} is not a key of a checkpoint; {advice}")
    # If a checkpoint is older than all held-out data, new scores contradict none.
    new_held_out = (key for key in run.held_out if key not in before)
    free = (*marked(run.config, "free"), *_without_effect(run.config, before, now), *new_held_out)
    changed = [key for key in keys if before.get(key) != now.get(key) and not _within(key, free)]
    # Options that only one kind of e.g. objective has follow from the change of the kind.
    kinds = [key for key in changed if key in before and key in now]
    changed = [key for key in changed if key in kinds or not _within(key, kinds)]
    changes = {key: f"{key}: {_shown(before.get(key))} -> {_shown(now.get(key))}" for key in changed}
    # Fine-tuning derives its warmup from the length of the run, so it moves with the end.
    warmup = ("optimizer.schedule.warmup_steps", "optimizer.schedule.warmup_share") if run.kind == "finetuning" else ()
    open_keys = (*marked(run.config, "end"), *warmup, SUM_DTYPE, *may_change, *allowed)
    refused = [key for key in changed if not _within(key, open_keys) and ALL not in allowed]
    if refused:
        raise UserError(
            f"{name} belongs to another run: {'; '.join(changes[key] for key in refused)}. Use its values, name "
            f"another --workdir, or allow the change from here on with --config.allow_changes={','.join(refused)}"
        )
    lines = [f"changed from here on: {line}" for line in changes.values()]
    # The last steps that share a pool of rows of similar length are those before the end (tasks/batches.py).
    batches = (*marked(run.config, "batches"), *(("steps",) if now.get("length_pool", 1) > 1 else ()))
    held_out = (*marked(run.config, "held_out"), *marked(run.config, "measured"))
    if any(_within(key, batches) and not _within(key, held_out) for key in changed):
        lines.append("from here on, batches are those of a run that had this configuration from its first step")
    resumes = not may_change  # a branch compares the evaluations in its own workdir only
    if resumes and now.get("checkpoint.best") and any(_within(key, held_out) for key in changed):
        lines.append(
            "scores until here are of other held-out rows, but checkpoint.best and early_stop compare with them; to "
            "compare new scores alone, begin another --workdir with --config.init_from"
        )
    old, new = there["versions"], here["versions"]
    if versions := [f"{name} {old.get(name)} -> {new[name]}" for name in new if old.get(name) != new[name]]:
        lines.append(f"different versions from here on: {'; '.join(versions)}")
    return lines


def _without_effect(config: TrainConfig, before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the keys without effect, because another key is set or unset."""
    # With a schedule in both, no batch has the size of batch_size.
    scheduled = bool(before.get("batch_schedule")) and bool(now.get("batch_schedule"))
    unused: list[set[str]] = []
    for values in (before, now):
        fields = {key.removeprefix("model."): values[key] for key in values if _within(key, ("model",))}
        unused.append({f"model.{name}" for name in sizes.without_effect(fields)})
    # mesh.reduce_dtype counts only if it changes the dtype of the sums. Then one of both keys tells enough.
    key, there, here = "mesh.reduce_dtype", before[SUM_DTYPE], now[SUM_DTYPE]
    if there == here or not there or not here:
        sums: tuple[str, ...] = (key,)
    else:
        sums = (SUM_DTYPE,) if before[key] != now[key] else ()
    return (
        *(("batch_size",) if scheduled else ()),
        *(() if now.get("checkpoint.best") else marked(config, "measured")),
        *(unused[0] & unused[1]),
        *sums,
    )


def versions() -> dict[str, str]:
    """Returns the versions for a checkpoint's record: Python, this package, a step's libraries, and the device."""
    libraries = {name: importlib.metadata.version(name) for name in LIBRARIES}
    packages = {"python": platform.python_version(), "bert_jax": bert_jax.__version__, **libraries}
    return {**packages, "device": jax.devices()[0].device_kind}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turns {"a": {"b": 1}} into {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _within(key: str, names: Iterable[str]) -> bool:
    """Whether a key is one of the names or lies within one, as optimizer.beta1 does within optimizer."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):  # JSON has the steps of a schedule as text
        value = "{" + ", ".join(f"{key}: {entry}" for key, entry in value.items()) + "}" if value else None
    return "none" if value in (None, "") else str(value)


def _fingerprint(params: Mapping[str, np.ndarray]) -> str:
    # Sorted by path, so that the order of a dict changes nothing.
    digest = hashlib.blake2b()
    for path, value in sorted(params.items()):
        digest.update(path.encode())
        digest.update(np.ascontiguousarray(value).data)
    return f"fingerprint {digest.hexdigest()[:FINGERPRINT_DIGITS]}" if params else "none"


# Branches (config.branch_from). Warmup-stable-decay trains a trunk at a constant rate, and a decay from any of its
# checkpoints (Hu et al. 2024, section 4). A branch is such a decay in a workdir of its own. Step, optimizer state,
# average, token count and the order of the data continue: with unchanged settings, it equals the trunk, had it
# continued.
#
# The tokens before a step are a function of the step and of the data and batches from step 0 on (train/clock.py). With
# other data or batches, a branch or a resumed run therefore begins with the count that the checkpoint records.

# Keys of a provenance:
RECORD = "branch"  # the checkpoint from which a run was branched
COUNTED = "counted_from"  # the step at which data or batches last changed
# The key in the first metadata of a branch for the folder of its checkpoint.
BRANCHED = "branched_from"
PHASES = "data.phases."
READ_FROM = ("data.train", "data.mixture", PHASES)  # prefixes of keys for the data that a step reads
# Keys that a branch may change without config.allow_changes, as for a new phase. With rotary positions, no parameter's
# shape depends on the length or the bases, which change for longer rows (Warner et al. 2024, section 3.2).
MAY_CHANGE = (
    *("data", "batch_size", "batch_schedule", "objective", "eval.max_rows"),
    *("model.rotary_base", "model.rotary_base_local", "model.max_positions"),
    *("optimizer.learning_rate", "optimizer.schedule"),
)


@dataclass(frozen=True)
class Branch:
    """The checkpoint at which a run begins."""

    directory: Location  # WORKDIR/checkpoints/STEP
    meta: Mapping[str, Any]
    sha256: str  # of the metadata, which holds a fingerprint for each tensor

    @property
    def step(self) -> int:
        return int(self.directory.name)

    def record(self, changes: list[str]) -> dict[str, Any]:
        """Returns the JSON values by which the branch's checkpoints record its origin."""
        return {"step": self.step, "sha256": self.sha256, "changes": changes, "tokens": float(self.meta[TOKENS_BEFORE])}

    def check_left(self, run: Run) -> None:
        """Raises UserError if a branch's length is used up before its first step."""
        steps, minutes, seconds = run.config.steps, run.config.budget_minutes, self.meta.get("seconds", 0.0)
        # Tokens, steps and minutes all count from the beginning of the first run.
        tokens = float(self.meta[TOKENS_BEFORE])
        at, end = f"branch_from is at step {self.step}", ""
        if run.length is not None and tokens >= run.length.tokens:
            at += f", which has read {tokens:,.0f} tokens"
            end, key = f"tokens is {run.length.tokens:,.0f}", "tokens"
        elif 0 < steps <= self.step:
            end, key = f"steps is {steps}", "steps"
        elif 0 < minutes <= seconds / 60 and not run.config.budget_replay:
            at += f", after {seconds / 60:.4g} minutes of training"
            end, key = f"budget_minutes is {minutes:g}", "budget_minutes"
        if end:
            raise UserError(
                f"{at}, but {end}; lengths count from the beginning of the first run. Set --config.{key} to more, "
                "or name an earlier checkpoint"
            )


def checkpoint_folder(path: str) -> Location:
    """Makes branch_from, WORKDIR/checkpoints/STEP, an absolute path, whether it exists or not.

    Raises:
        UserError: the path has another form.
    """
    directory = absolute(location(path))
    check_access(directory)
    if directory.parent.name != CHECKPOINTS or not directory.name.isdecimal():
        steps = ", ".join(map(str, orbax_io.saved_steps(directory / CHECKPOINTS))) if directory.is_dir() else ""
        known = f"; its steps are {steps}" if steps else ""
        raise UserError(f"branch_from is {path}, which names no step. Use WORKDIR/{CHECKPOINTS}/STEP{known}")
    return directory


def open_branch(path: str) -> Branch:
    """Reads the metadata of WORKDIR/checkpoints/STEP, whose run may still be training.

    Raises:
        UserError: there is no such step.
        DamagedCheckpoint: its metadata is damaged.
    """
    directory = checkpoint_folder(path)
    # A step that is being saved or removed is not among the complete ones.
    if int(directory.name) not in (saved := orbax_io.saved_steps(directory.parent)):
        steps = ", ".join(map(str, saved)) or "none"
        raise UserError(
            f"branch_from: no checkpoint {path}; the steps there are {steps}. Keep more of them with "
            "--config.checkpoint.keep_every"
        )
    document = read_meta(directory)
    return Branch(directory, document["meta"], signature(document))


def counting_on(run: Run, provenance: dict[str, Any], meta: Mapping[str, Any]) -> Run:
    """Returns a run whose tokens and epochs count on from the step at which its data or batches last changed.

    Args:
        provenance: the run's, in which the step is recorded.
        meta: the metadata of the checkpoint from which the run resumes or is branched; empty: it begins.
    """
    count = run.tokens_before
    if count is None:
        return run
    there = meta.get("provenance", {})
    counted = there.get(COUNTED)
    # Steps before the checkpoint were read with its configuration. If this run would have read them otherwise, its own
    # function counts only from here on.
    if meta:
        step: int = meta["step"]
        if _read_before(step, there["configuration"]) != _read_before(step, provenance["configuration"]):
            counted = {"step": step, "tokens": meta[TOKENS_BEFORE]}
    if counted is not None:
        provenance[COUNTED] = counted
        run = dataclasses.replace(run, counted_from=counted["step"])
    recorded = counted or provenance.get(RECORD)
    if recorded is None:
        return run
    # Exactly 0 if data and batches are the same as at that step, so an unchanged run keeps its count bit for bit.
    more = recorded["tokens"] - count(recorded["step"])

    def before(step: int) -> float:
        return more + count(step)

    # A length in tokens ends by the same count, so that logs and the end agree.
    length = None if run.length is None else dataclasses.replace(run.length, before=before)
    return dataclasses.replace(run, tokens_before=before, length=length)


def check_origin(path: str, recorded: Mapping[str, Any] | None, workdir: Location) -> None:
    """Raises UserError if a workdir with checkpoints was not branched from the named checkpoint, as far as it exists.

    `recorded` is the RECORD of the newest checkpoint; None: it is no branch.
    """
    if recorded is None:
        raise UserError(
            f"branch_from is {path}, but {workdir} has checkpoints of a run that did not begin there. Name another "
            "--workdir, or leave out branch_from"
        )
    if location(path).is_dir() and (named := open_branch(path)).sha256 != recorded["sha256"]:
        raise UserError(
            f"{workdir} was branched from another checkpoint (of step {recorded['step']}) than {named.directory}. Name "
            "another --workdir, or that checkpoint"
        )


def _read_before(step: int, configuration: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Returns the configuration that decides which rows earlier steps read: data and batch sizes."""
    data = {key: value for key, value in configuration.items() if key.startswith(READ_FROM) and value}
    data = {key: value for key, value in data.items() if not key.startswith(PHASES) or int(key.split(".")[2]) < step}
    # Successive entries of equal size count as one, and a schedule of one size as a batch_size.
    schedule = batch_schedule(configuration.get("batch_schedule", {}), configuration["batch_size"])
    sizes = [(first, rows) for first, rows in zip(schedule.steps, schedule.values, strict=True) if first < step]
    return data, [next(group) for _, group in itertools.groupby(sizes, key=lambda size: size[1])]
