"""What a checkpoint says of the run that made it: configuration, data, versions; and what may differ to go on from it.

Whatever changes the numbers of the run must be the same, or be allowed by name (allow_changes). Where a file lies
changes nothing: what configuration keys name by path is compared by fingerprint.
"""

import dataclasses
import difflib
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from bert_jax.command import UserError
from bert_jax.config import ModelConfig, to_dict
from bert_jax.model.heads import Heads
from bert_jax.train.run import Run, runtime_of

FINGERPRINT_DIGITS = 16
PACKAGES = ("bert_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
ALL = "all"

# Keys, or what they begin with, that change no number of the run (eval: but for how much of it is measured).
FREE = (
    *("log_every", "profile", "checkpoint", "eval", "mesh", "data.prefetch", "data.cache_dir", "seeds"),
    *("learning_rates", "run_together", "allow_changes", "on_nonfinite", "skip_at_most"),
)
# What is measured depends on it, so that it is free where nothing is chosen by what was measured.
MEASURED_AT = "task.null_threshold"
# They name files: the fingerprints of what was read stand in their place.
PATHS = (
    "data.train",
    "data.phases",
    "data.eval",
    "init_from",
    "init_average",
    "task.data_dir",
    "task.train",
    "task.dev",
    "task.test",
    "task.submission",
)
# When a run ends. The learning rate follows from how much of the run is done, so a change is told.
ENDS = ("steps", "budget_minutes", "budget_replay", "epochs", "early_stop")
# What a step's batch depends on (law 1), but for what is only measured.
BATCHES = ("batch_size", "batch_schedule", "length_pool", "seed", "data", "task")
HELD_OUT = ("data.eval", "task.dev", MEASURED_AT)


def provenance(run: Run) -> dict[str, Any]:
    """What a checkpoint keeps of its run, as JSON values: `configuration` by key, and `versions`."""
    kept = {key: value for key, value in _flat(to_dict(run.config)).items() if not _begins(key, (*PATHS, "model"))}
    kept |= {
        "compute_dtype": runtime_of(run.config).compute_dtype,  # not auto: what that is depends on the device
        "train_layers": run.train_layers,
        "init_from": _fingerprint(run.initial_params),
        **{key: f"fingerprint {value[:FINGERPRINT_DIGITS]}" for key, value in _fingerprints(run).items()},
        **_flat({"model": to_dict(run.model), "heads": run.objective.heads.to_json()}),
    }
    return {"configuration": json.loads(json.dumps(kept)), "versions": _versions()}


def check_same(run: Run, here: Mapping[str, Any], there: Mapping[str, Any] | None, where: str) -> list[str]:
    """What is to be told of going on from a checkpoint, a line each.

    here    the run's `provenance`
    there   that of the checkpoint; None: it has none
    where   names the checkpoint
    Raises UserError, which lists each key with its value there and here, for changes that config.allow_changes does not
    name; and for a name in it that is no key.
    """
    if there is None:
        raise UserError(
            f"{where} does not say which run made it (it is of convert, or of an earlier version of bert_jax), so "
            "nothing can go on from it. Name another --workdir, and it by --config.init_from"
        )
    now = here["configuration"]
    before = {key: value for key, value in _defaults(run).items() if key in now} | there["configuration"]
    keys = sorted({*before, *now})
    allowed = _allowed(run.config.allow_changes, keys)
    free = (*FREE, *_unused(before, now), *(key for key in run.held_out if key not in before))
    changed = [key for key in keys if before.get(key) != now.get(key) and not _begins(key, free)]
    said = {key: f"{key}: {_shown(before.get(key))} -> {_shown(now.get(key))}" for key in changed}
    # Of fine-tuning, warmup is a share of the run unless it is given.
    ends = (*ENDS, "optimizer.warmup_steps", "optimizer.warmup_share") if run.kind == "finetuning" else ENDS
    refused = [key for key in changed if key not in ends and not _begins(key, allowed) and ALL not in allowed]
    if refused:
        raise UserError(
            f"{where} is of another run: {'; '.join(said[key] for key in refused)}. Go on with what it had, name "
            f"another --workdir, or allow it to change from here on: --config.allow_changes={','.join(refused)}"
        )
    lines = [f"changed from here on: {line}" for line in said.values()]
    # The last steps that share a pool of rows of like length are those before the end (tasks/source.py).
    batches = (*BATCHES, "steps") if now.get("length_pool", 1) > 1 else BATCHES
    if any(_begins(key, batches) and not _begins(key, HELD_OUT) for key in changed):
        lines.append("batches are from here on those of a run that had this configuration from its first step")
    versions = [
        f"{name} {there['versions'].get(name)} -> {version}"
        for name, version in here["versions"].items()
        if there["versions"].get(name) != version
    ]
    return lines + ([f"other versions from here on: {'; '.join(versions)}"] if versions else [])


def _fingerprints(run: Run) -> dict[str, str]:
    return {**run.source.fingerprints, **run.held_out}


def _unused(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """What has no effect beside another key, or without one."""
    scheduled = bool(before.get("batch_schedule")) and bool(now.get("batch_schedule"))
    chosen = bool(now.get("checkpoint.best"))
    return (*(("batch_size",) if scheduled else ()), *(() if chosen else (MEASURED_AT,)))


def _allowed(names: str, known: Iterable[str]) -> tuple[str, ...]:
    """The keys, or what keys begin with, that config.allow_changes names."""
    given = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in given:
        if name != ALL and not any(_begins(key, (name,)) for key in known):
            near = difflib.get_close_matches(name, list(known), n=1)
            meant = f"did you mean {near[0]}?" if near else "name keys as in the message that refused them, or all"
            raise UserError(f"config.allow_changes names {name!r}, which is no key of a checkpoint; {meant}")
    return given


def _defaults(run: Run) -> dict[str, Any]:
    """What a checkpoint was made with that is older than a key."""
    values = {key: value for key, value in _flat(to_dict(type(run.config)())).items() if not _begins(key, PATHS)}
    for name, kind in (("model", ModelConfig), ("heads", Heads)):
        for item in dataclasses.fields(kind):
            if item.default is not dataclasses.MISSING:
                values[f"{name}.{item.name}"] = item.default
    return json.loads(json.dumps(values))


def _versions() -> dict[str, str]:
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "not installed"  # bert_jax, run from its folder
    return {"python": platform.python_version(), **packages, "device": jax.devices()[0].device_kind}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _begins(key: str, names: Iterable[str]) -> bool:
    """Whether a key is one of those named, or lies within one: optimizer.beta1 lies within optimizer."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _shown(value: Any) -> str:
    return "none" if value in (None, "") else str(value)


def _fingerprint(params: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b()
    for path, value in sorted(params.items()):
        digest.update(path.encode())
        digest.update(np.ascontiguousarray(value).data)
    return f"fingerprint {digest.hexdigest()[:FINGERPRINT_DIGITS]}" if params else "none"
