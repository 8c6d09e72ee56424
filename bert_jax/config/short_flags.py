"""Flags that pretrain and finetune have in common with other commands; each sets a configuration key.

    --checkpoint runs/base    means the same as    --config.init_from=runs/base

A flag has the same name in every command that has what it names. A recipe without the key does not have the flag.
"""

import typing
from collections.abc import Sequence

import ml_collections

from bert_jax.command import UserError

KEYS = {
    "checkpoint": "init_from",
    "average": "init_average",
    "learning_rate": "optimizer.learning_rate",
    "batch_size": "batch_size",
    "compute_dtype": "compute_dtype",
    "budget_minutes": "budget_minutes",
    "seed": "seed",
    "seeds": "seeds",
    "max_length": "task.max_length",
    "text": "task.text",
    "text_pair": "task.text_pair",
    "label": "task.label",
    "label_map": "task.label_map",
}
_BY_FLAG = {**KEYS, **{f"config.{key}": key for key in KEYS.values()}}


def as_keys(overrides: Sequence[str], tree: ml_collections.ConfigDict | None = None) -> list[str]:
    """Returns the overrides with each flag of KEYS replaced by `--config.KEY=VALUE`.

    Raises UserError for a flag without a value, for one whose key the recipe `tree` does not have, and where a flag and
    its key have different values.
    """
    found: list[str] = []
    given: dict[str, dict[str, str]] = {}  # of each key: its values by flag
    rest = iter(overrides)
    for override in rest:
        flag, equals, value = override.lstrip("-").partition("=")
        if not override.startswith("-") or flag not in _BY_FLAG:
            found.append(override)
            continue
        key = _BY_FLAG[flag]
        if tree is not None and flag in KEYS and not _has(tree, key):
            raise UserError(f"unknown flag --{flag}, which sets config.{key}: the recipe has no such key. Omit it")
        if not equals and (value := next(rest, "--")).startswith("--"):
            raise UserError(f"--{flag} has no value; write --{flag}=VALUE")
        given.setdefault(key, {})[flag] = value
        if flag not in KEYS:
            found.append(f"--{flag}={value}")
    for key, values in given.items():
        if len(set(values.values())) > 1:
            (first, one), (second, other) = values.items()
            raise UserError(f"--{first} is {one} and --{second} is {other}, but they set one key; omit one of them")
        if f"config.{key}" not in values:
            found.extend(f"--config.{key}={value}" for value in values.values())
    return found


def help_text(config: type) -> str:
    """Returns the lines of `--help` that list the flags of a command with this configuration."""
    flags = {flag: key for flag, key in KEYS.items() if _defines(config, key)}
    width = max(map(len, flags)) + len("=VALUE")
    lines = [f"  --{f'{flag}=VALUE':{width}}  --config.{key}=VALUE" for flag, key in flags.items()]
    return "\n".join(["Flags of other commands that are accepted here, too, and the keys that they set:", "", *lines])


def _has(tree: ml_collections.ConfigDict, key: str) -> bool:
    section, dot, name = key.rpartition(".")
    return name in (tree.get(section, {}) if dot else tree)


def _defines(config: type, key: str) -> bool:
    name, _, rest = key.partition(".")
    types = typing.get_type_hints(config)
    return name in types and (not rest or _defines(types[name], rest))
