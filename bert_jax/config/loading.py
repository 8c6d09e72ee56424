"""Converts a recipe and its overrides to a configuration dataclass and back.

`read_flags` serves the command line and `read_values` serves Python. Both run the recipe, apply the overrides and
return a ConfigDict, from which `load` builds the dataclass. Unknown keys are errors that suggest the nearest key.

The first part has the short flags: `--checkpoint runs/base` means `--config.init_from=runs/base`. A flag has the same
name in every command that has what it names. A recipe without the key does not have the flag.
"""

import dataclasses
import difflib
import inspect
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import ml_collections
from absl import flags
from ml_collections import config_dict, config_flags
from ml_collections.config_flags import config_path

from bert_jax.config.recipes import recipe_module
from bert_jax.errors import UserError

Config = TypeVar("Config")
Values: TypeAlias = Mapping[str, Any] | ml_collections.ConfigDict

# The configuration key that each short flag sets.
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
    replaced: list[str] = []
    given: dict[str, dict[str, str]] = {}  # of each key: its values by flag
    rest = iter(overrides)
    for override in rest:
        flag, equals, value = override.lstrip("-").partition("=")
        if not override.startswith("-") or flag not in _BY_FLAG:
            replaced.append(override)
            continue
        key = _BY_FLAG[flag]
        if tree is not None and flag in KEYS and not _has_key(tree, key):
            raise UserError(f"unknown flag --{flag}, which sets config.{key}: the recipe has no such key. Omit it")
        if not equals and (value := next(rest, "--")).startswith("--"):
            raise UserError(f"--{flag} has no value; write --{flag}=VALUE")
        given.setdefault(key, {})[flag] = value
        if flag not in KEYS:
            replaced.append(f"--{flag}={value}")
    for key, values in given.items():
        if len(set(values.values())) > 1:
            (first, value), (second, other) = values.items()
            raise UserError(f"--{first} is {value} and --{second} is {other}, but they set one key; omit one of them")
        if f"config.{key}" not in values:
            replaced.extend(f"--config.{key}={value}" for value in values.values())
    return replaced


def help_text(config: type) -> str:
    """Returns the lines of `--help` that list the flags of a command with this configuration."""
    flags = {flag: key for flag, key in KEYS.items() if _defines(config, key)}
    width = max(map(len, flags)) + len("=VALUE")
    lines = [f"  --{f'{flag}=VALUE':{width}}  --config.{key}=VALUE" for flag, key in flags.items()]
    return "\n".join(["Flags of other commands that are accepted here, too, and the keys that they set:", "", *lines])


def _has_key(tree: ml_collections.ConfigDict, key: str) -> bool:
    section, dot, name = key.rpartition(".")
    return name in (tree.get(section, {}) if dot else tree)


def _defines(config: type, key: str) -> bool:
    name, _, rest = key.partition(".")
    types = typing.get_type_hints(config)
    return name in types and (not rest or _defines(types[name], rest))


# Of keys whose text is a mapping with other signs than a:1,b:2.
MAPPING_SIGNS = {
    "task.class_weights": ("=", ","),
    "optimizer.rates": ("=", ";"),
    "optimizer.decays": ("=", ";"),
    "data.mixture": ("=", ","),
    "sweep": ("=", ";"),
}


def recipe(config: Any) -> ml_collections.ConfigDict:
    """The ConfigDict of a configuration dataclass, for a recipe's get_config; overrides may also set None fields."""
    tree = ml_collections.ConfigDict()
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            tree[item.name] = recipe(value)
        elif value is None:
            tree[item.name] = config_dict.placeholder(_plain_type(hints[item.name]))
        else:
            tree[item.name] = value
    return tree


def load(config_class: type[Config], values: Values, where: str = "config") -> Config:
    """Builds a configuration dataclass from a ConfigDict or a dict, recursively.

    Raises UserError for an unknown key (naming the nearest known one), a missing key or a value of the wrong type.
    """
    hints = typing.get_type_hints(config_class)
    fields = {item.name: item for item in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise UserError(_unknown_key(where, key, fields))
    arguments = {}
    for name, item in fields.items():
        if name in values:
            arguments[name] = _convert(hints[name], values[name], f"{where}.{name}")
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}.{name} is missing. Give a value of type {_plain_type(hints[name]).__name__}")
    return config_class(**arguments)


def to_dict(config: Any) -> dict[str, Any]:
    """The JSON values of a configuration dataclass."""
    return dataclasses.asdict(config)


def read_flags(recipe_name: str, overrides: Sequence[str] = ()) -> ml_collections.ConfigDict:
    """The configuration of a recipe, FILE or NAME or either with :ARG, with `--config.a.b=value` overrides applied.

    NAME is that of a recipe that comes with bert_jax. The flags of KEYS are overrides, too. `KEY=none` of a
    number gives None, which unsets one that may be None. Raises UserError for a recipe that does not exist, an argument
    that it does not accept, an unknown key or a value of the wrong type.
    """
    return _with_flags(recipe_name, _run_recipe(recipe_name), overrides)


def _with_flags(
    recipe_name: str, tree: ml_collections.ConfigDict, overrides: Sequence[str], unset: Iterable[str] = ()
) -> ml_collections.ConfigDict:
    """A recipe's configuration with overrides, and with None for the keys `unset`."""
    values = flags.FlagValues()
    overrides = as_keys(overrides, tree)
    for override in overrides:
        _check_override(tree, override)
    overrides, also_unset = _split_off_none(tree, overrides)
    arguments = ["command", *overrides]
    try:
        config_flags.DEFINE_config_dict("config", tree, flag_values=values, sys_argv=arguments)
        rest = values(arguments)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"invalid override of {recipe_name}: {' '.join(str(error).split())}") from error
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r}. Write overrides as --config.KEY=VALUE")
    for key in (*also_unset, *unset):
        config_path.set_value(key, values.config, None)
    return values.config


def read_values(recipe_name: str, *overrides: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """The configuration of a recipe with overrides as Python has them; of a key in several of them, the last counts.

    {"model.dropout": 0.1} and {"model": {"dropout": 0.1}} mean the same. A key whose value is text also takes a list,
    as a,b, and a mapping, as a:1,b:2 or with the signs of MAPPING_SIGNS; a value of it may be a list, a,b. Arrays of
    NumPy and all that can be iterated over count as lists. Raises UserError as read_flags does, for a value with the
    sign that separates it from others, for a set, and for seeds in a list of one, which could mean their number.
    """
    tree = _run_recipe(recipe_name)
    values = {key: _plain(key, value) for each in overrides for key, value in _flattened(tree, each)}
    if isinstance(seeds := values.get("seeds"), tuple) and len(seeds) == 1 and seeds != (0,):
        raise UserError(
            f"config.seeds is a list of {seeds[0]} alone. Give seeds={seeds[0]} for so many seeds, or seed={seeds[0]} "
            "for this one"
        )
    given = {key: value for key, value in values.items() if value is not None}
    unset = values.keys() - given.keys()  # load refuses None where a key must have a value
    for key in unset:
        _check_override(tree, f"--config.{key}=")
    return _with_flags(
        recipe_name, tree, [f"--config.{key}={_as_typed(tree, key, given[key])}" for key in given], unset
    )


def _flattened(
    tree: ml_collections.ConfigDict, values: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the value of each override; a mapping is one value where the recipe has no group."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and isinstance(_value_at(tree, key), ml_collections.ConfigDict):
            yield from _flattened(tree, value, f"{key}.")
        else:
            yield key, value


def _value_at(tree: ml_collections.ConfigDict, key: str) -> Any:
    """The recipe's value of a dotted key; None for an unknown key."""
    node: Any = tree
    for name in key.split("."):
        node = node[name] if isinstance(node, ml_collections.ConfigDict) and name in node else None
    return node


def _as_typed(tree: ml_collections.ConfigDict, key: str, value: Any) -> str:
    """A value as the command line has it."""
    if not isinstance(_value_at(tree, key), str) or not isinstance(value, tuple | Mapping):
        return str(value)
    between, after = MAPPING_SIGNS.get(key, (":", ","))
    if key == "sweep" and isinstance(value, Mapping):
        choices = {old: new if isinstance(new, tuple) else (new,) for old, new in value.items()}
        return after.join(f"{old}{between}{','.join(map(_choice, new))}" for old, new in choices.items())
    if isinstance(value, Mapping):
        texts = {old: _joined(key, new, ",") if isinstance(new, tuple) else new for old, new in value.items()}
        value = [f"{old}{between}{new}" for old, new in texts.items()]
    return _joined(key, value, after)


def _choice(value: Any) -> str:
    """A value as a sweep has it: in double quotes where it is empty or has a sign that separates values."""
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f'"{text}"' if not text or {*",;"} & {*text} else text


def _joined(key: str, values: Iterable[Any], sign: str) -> str:
    parts = [*map(str, values)]
    if wrong := next((part for part in parts if sign in part), ""):
        raise UserError(f"config.{key} has {wrong!r}, but {sign!r} separates its values. Use values without it")
    return sign.join(parts)


def _plain(key: str, value: Any) -> Any:
    """A value without types of NumPy, with tuples for all that has an order. Raises UserError for a set."""
    if hasattr(value, "tolist"):  # arrays and numbers of NumPy, jax and torch, columns of pandas
        value = value.tolist()
    if isinstance(value, set | frozenset):
        raise UserError(f"config.{key} is {value!r}, a set, which has no order. Give a list")
    if isinstance(value, Mapping):
        return {_plain(key, old): _plain(key, new) for old, new in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | ml_collections.ConfigDict):
        return tuple(_plain(key, each) for each in value)
    return value


def _split_off_none(tree: ml_collections.ConfigDict, overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides without `--config.KEY=none` of numbers, which no parser of numbers accepts, and these keys.

    A space may stand for the equals sign. The last override of a key applies. The value of a text may be "none".
    """
    rest: list[str] = []
    unset: dict[str, None] = {}
    waiting = list(overrides)
    while waiting:
        override = waiting.pop(0)
        flag, equals, value = override.lstrip("-").partition("=")
        value = value if equals else next(iter(waiting), "")
        section, _, key = flag.partition(".")
        if section == "config" and value.lower() == "none" and config_path.get_type(key, tree) in (bool, int, float):
            unset[key] = None
            if not equals:
                waiting.pop(0)
        else:
            unset.pop(key, None)
            rest.append(override)
    return rest, list(unset)


def _check_override(tree: ml_collections.ConfigDict, override: str) -> None:
    """Raises UserError for `--config.a.b=...` if the recipe has no key a.b, and for a key that lacks `config.`."""
    if not (match := re.match(r"--?config\.([\w.]+)", override)):
        name = re.match(r"--?([\w.]+)", override)
        if name and name[1].partition(".")[0] in tree:
            raise UserError(f"unknown flag --{name[1]}; write the key as --config.{name[1]}=VALUE")
        return
    where = "config"
    node: Any = tree
    for key in match[1].split("."):
        if not isinstance(node, ml_collections.ConfigDict):
            raise UserError(f"unknown key {where}.{key}; {where} is a single value. Write --{where}=VALUE")
        if key not in node:
            raise UserError(_unknown_key(where, key, node.keys()))
        where, node = f"{where}.{key}", node[key]


def _unknown_key(where: str, key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    advice = f"did you mean {where}.{near[0]}?" if near else f"choose from {', '.join(sorted(known))}"
    return f"unknown key {where}.{key}; {advice}"


def _run_recipe(recipe_name: str) -> ml_collections.ConfigDict:
    """Runs get_config of a recipe, with the text after the colon as its argument."""
    file, colon, argument = recipe_name.partition(":")
    get_config = getattr(recipe_module(file), "get_config", None)
    if get_config is None:
        raise UserError(f"{file} does not define get_config(). `bert-jax recipes bert_tiny` shows a recipe")
    if not colon:
        return get_config()
    if not inspect.signature(get_config).parameters:
        raise UserError(f"{file} takes no argument, but got {argument!r}. Omit the colon and the text after it")
    return get_config(argument)


def _convert(kind: Any, value: Any, where: str) -> Any:
    if value is not None and dataclasses.is_dataclass(plain := _plain_type(kind)):
        kind = plain
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping | ml_collections.ConfigDict):
            raise UserError(f"{where} is {value!r}, but has keys of its own. Write --{where}.KEY=VALUE")
        return load(typing.cast(type[Any], kind), typing.cast(Values, value), where)
    if value is None and types.NoneType in typing.get_args(kind):
        return None
    if typing.get_origin(kind) is tuple:
        element = typing.get_args(kind)[0]
        parts = value if isinstance(value, list | tuple) else (value,)
        return tuple(_convert(element, part, where) for part in parts)
    wanted = _plain_type(kind)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise UserError(f"{where} is {value!r}. Give a value of type {wanted.__name__}")
    return value


def _plain_type(kind: Any) -> type:
    """The type of a value other than None: int for int and int | None; tuple for tuple[...]."""
    inner = [argument for argument in typing.get_args(kind) if argument is not types.NoneType]
    if typing.get_origin(kind) is tuple:
        return tuple
    return inner[0] if inner else kind
