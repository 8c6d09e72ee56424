"""Finds a recipe, and reads it and its overrides into a configuration dataclass.

`from_flags` serves the command line and `from_values` serves Python. Both run the recipe, set the overridden keys, and
call `load`, which builds the dataclass. An unknown key is an error that suggests the nearest known one.

Values have one notation, on the command line, in recipes and in Python: Python's literals. On the command line a bare
word is text, so `--config.task.metrics=f1,accuracy` means ("f1", "accuracy").

Some groups of keys are one of several kinds (options.Kinds). --config.objective=causal chooses one, and the keys that
both kinds have keep their values; --config.objective.z_loss=1e-4 then sets a key of that kind.

Short flags set keys, too: `--model runs/base` means `--config.init_from=runs/base`. A flag has the same name in
every command. A configuration without the key does not have the flag."""

import ast
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import operator
import pathlib
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import ml_collections

from bert_jax.config.options import Kinds, nearest, type_name, union
from bert_jax.errors import UserError

# Finds recipes by name, e.g. `bert_base` or `glue`.


# An installation has the recipes in bert_jax/configs (setup.py); the repository has them in its root.
_PACKAGE = Path(__file__).parent.parent
FOLDER = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"


def shipped_recipes() -> dict[str, Path]:
    """Returns each shipped recipe's file by name, sorted."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.py")) if path.stem != "__init__"}


def recipe_file(name: str) -> Path:
    """Finds a recipe's file: a shipped recipe with this name, or else a file of your own.

    A file called `own` therefore does not replace the recipe `own`; write ./own for the file.

    Raises:
        UserError: There is neither a recipe nor a file with this name.
    """
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    if Path(name).is_file():
        return Path(name)
    stem = Path(name).stem
    if stem in shipped:
        raise UserError(f"no such recipe: {name}. bert_jax has one of that name: write {stem}")
    near = difflib.get_close_matches(stem, list(shipped), n=1, cutoff=0.5)
    advice = f"Did you mean {near[0]}?" if near else "Give a file or the name of a recipe:"
    raise UserError(f"no such recipe: {name}. {advice} `bert-jax recipes` lists those of bert_jax")


def recipe_module(name: str) -> ModuleType:
    """Runs a recipe's file and returns its module, so that one recipe can build on another.

    An unchanged file runs only once, since it may define an extension's classes.

    Raises:
        UserError: The recipe does not exist.
    """
    file = recipe_file(name).absolute()
    return _run(file, file.stat().st_mtime_ns)


# `changed` is only a part of the cache's key, so that an edited recipe runs again in the same process.
@functools.cache
def _run(file: Path, changed: int) -> ModuleType:
    specification = importlib.util.spec_from_file_location("recipe", file)
    if specification is None or specification.loader is None:
        raise UserError(f"{file} is not a recipe. Give a Python file that defines get_config()")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


# Reads a recipe and its overrides.


Config = TypeVar("Config")
Values: TypeAlias = Mapping[str, Any] | ml_collections.ConfigDict

# The configuration key that each short flag sets.
KEYS = {
    "model": "init_from",
    "checkpoint": "init_from",
    "average": "init_average",
    "data": "data.train",
    "train": "task.train",
    "dev": "task.dev",
    "test": "task.test",
    "steps": "steps",
    "epochs": "epochs",
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

# The words of transformers and MaxText, and the keys that they mean here: docs/recipes.md has the same table.
OTHER_WORDS = {
    "output_dir": "--workdir",
    "base_output_directory": "--workdir",
    "run_name": "--workdir",
    "model_name_or_path": "init_from",
    "load_parameters_path": "init_from",
    "num_train_epochs": "epochs",
    "num_epoch": "epochs",
    "max_steps": "steps",
    "per_device_train_batch_size": "batch_size",
    "per_device_batch_size": "batch_size",
    "gradient_accumulation_steps": "microbatches",
    "max_seq_length": "task.max_length",
    "max_target_length": "task.max_length",
    "lr": "optimizer.learning_rate",
    "warmup_ratio": "optimizer.schedule.warmup_share",
    "warmup_steps_fraction": "optimizer.schedule.warmup_share",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_schedule_type": "optimizer.schedule",
    "learning_rate_final_fraction": "optimizer.schedule.final_share",
    "optim": "optimizer",
    "opt_type": "optimizer",
    "adam_weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1",
    "adam_b1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_b2": "optimizer.beta2",
    "adam_epsilon": "optimizer.epsilon",
    "adam_eps": "optimizer.epsilon",
    "max_grad_norm": "optimizer.clip_norm",
    "gradient_clipping_threshold": "optimizer.clip_norm",
    "label_smoothing_factor": "task.label_smoothing",
    "init_weights_seed": "seed",
    "data_shuffle_seed": "seed",
    "bf16": "compute_dtype",
    "dtype": "compute_dtype",
    "mlm_probability": "data.mask_rate",
    "gradient_checkpointing": "model.remat",
    "remat_policy": "model.remat",
    "logging_steps": "log_every",
    "log_period": "log_every",
    "eval_steps": "eval.every_steps",
    "eval_interval": "eval.every_steps",
    "save_steps": "checkpoint.every_steps",
    "checkpoint_period": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "load_best_model_at_end": "checkpoint.best",
    "ici_fsdp_parallelism": "mesh.fsdp",
    "ici_tensor_parallelism": "mesh.tensor",
}


def recipe(config: Any) -> ml_collections.ConfigDict:
    """Converts a configuration dataclass to a ConfigDict, for a recipe's get_config.

    A recipe that builds on another may change any value in it; `load` checks the types.
    """
    # Without convert_dict, dictionaries that are values, such as a mixture, do not become groups of keys.
    tree = ml_collections.ConfigDict(type_safe=False, convert_dict=False)
    if isinstance(config, Kinds):
        tree.kind = config.kind
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        tree[item.name] = recipe(value) if dataclasses.is_dataclass(value) else value
    return tree


def to_dict(config: Any) -> dict[str, Any]:
    """Converts a configuration dataclass to nested dictionaries, for JSON; in a union, `kind` comes first."""
    tree: dict[str, Any] = {"kind": config.kind} if isinstance(config, Kinds) else {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        tree[item.name] = to_dict(value) if dataclasses.is_dataclass(value) else value
    return tree


def from_flags(config_class: type[Config], recipe_name: str, arguments: Sequence[str] = ()) -> Config:
    """Runs a recipe and applies command-line overrides: `--config.a.b=value` and the short flags in KEYS.

    Args:
        config_class: PretrainConfig or FinetuneConfig.
        recipe_name: A file or a shipped recipe's name; either may end with :ARGUMENT.
        arguments: The flags and their values.

    Raises:
        UserError: The recipe does not exist or does not accept its argument, a key is unknown, or a value has the wrong
            type.
    """
    tree = _plain(_run_recipe(recipe_name))
    _check_recipe(config_class, tree, recipe_name)
    written: dict[str, tuple[str, str]] = {}  # by key: the flag, as it is written, and its value
    for flag, value in _split_flags(config_class, arguments):
        key = KEYS.get(flag, flag.removeprefix("config."))
        # The same flag may be repeated; the last one counts. Two flags for one key, such as --steps and --config.steps,
        # are more likely a mistake.
        previous = written.get(key)
        if previous and previous[0] != flag and previous[1] != value:
            (first, value_there) = previous
            raise UserError(
                f"--{first} is {value_there} and --{flag} is {value}, but they set one key; omit one of them"
            )
        written[key] = (flag, value)
    _assign(config_class, tree, {key: value for key, (_, value) in written.items()}, _read)
    return load(config_class, tree)


def from_values(config_class: type[Config], recipe_name: str, *overrides: Mapping[str, Any]) -> Config:
    """Runs a recipe and applies overrides from Python; the last override for a key counts.

    {"model.dropout": 0.1} and {"model": {"dropout": 0.1}} mean the same. NumPy arrays and other iterables count as
    tuples.

    Raises:
        UserError: As in from_flags, and for a set, which has no order.
    """
    tree = _plain(_run_recipe(recipe_name))
    _check_recipe(config_class, tree, recipe_name)
    # One override after another, because a later one may set keys of a kind that an earlier one chose.
    for values in overrides:
        leaves = dict(_leaves(config_class, tree, values))
        _assign(config_class, tree, leaves, lambda hint, value, where: _native(where, value))
    return load(config_class, tree)


def change(config: Config, values: Mapping[str, Any]) -> Config:
    """Returns a copy with new values for some dotted keys. Raises UserError as from_values does."""
    tree = to_dict(config)
    _assign(type(config), tree, values, lambda hint, value, where: value)
    return load(type(config), tree)


def load(config_class: type[Config], values: Values, where: str = "config") -> Config:
    """Builds a configuration dataclass from a ConfigDict or a dict, recursively.

    Args:
        config_class: The dataclass; for a union, `kind` in the values chooses one.
        values: The values by key.
        where: The prefix for keys in messages.

    Raises:
        UserError: A key is unknown (the message suggests the nearest one) or missing, or a value has the wrong type.
    """
    values = _plain(values)
    # A union is not built itself: _convert finds the class that `kind` names, and calls this function for it.
    if issubclass(config_class, Kinds) and not config_class.kind:
        return typing.cast(Config, _convert(config_class, values, where))
    hints = typing.get_type_hints(config_class)
    fields = {item.name: item for item in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise UserError(_unknown_key(where, key, config_class))
    arguments = {}
    for name, item in fields.items():
        if name in values:
            arguments[name] = _convert(hints[name], values[name], f"{where}.{name}")
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}.{name} is missing. Give a value of type {_described(hints[name])}")
    return config_class(**arguments)


def help_text(config: type) -> str:
    """Lists the short flags for this configuration, as lines for `--help`."""
    flags = [f"--{flag}: {key}" for flag, key in KEYS.items() if _defines(config, key)]
    listed = textwrap.fill(", ".join(flags), 96, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return f"Some keys have a flag of their own, such as --model=VALUE for --config.init_from=VALUE:\n{listed}"


def _run_recipe(recipe_name: str) -> Values:
    """Calls a recipe's get_config, with the text after the colon as its argument."""
    file, colon, argument = recipe_name.partition(":")
    get_config = getattr(recipe_module(file), "get_config", None)
    if get_config is None:
        raise UserError(f"{file} does not define get_config(). `bert-jax recipes bert_tiny` shows a recipe")
    if not colon:
        return get_config()
    if not inspect.signature(get_config).parameters:
        raise UserError(f"{file} takes no argument, but got {argument!r}. Omit the colon and the text after it")
    return get_config(argument)


def _check_recipe(config_class: type, tree: Mapping[str, Any], recipe_name: str) -> None:
    """Refuses a recipe of the other command, whose keys would only look unknown."""
    if ("task" in tree) != _defines(config_class, "task"):
        kinds = ("fine-tuning", "finetune") if "task" in tree else ("pretraining", "pretrain")
        raise UserError(f"{recipe_name} is a {kinds[0]} recipe, for bert-jax {kinds[1]}. `bert-jax recipes` lists all")


def _split_flags(config_class: type, arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the name and the value of each flag; a space may stand for the equals sign."""
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.lstrip("-").partition("=")
        name = flag.partition(".")[0]
        if not argument.startswith("-"):
            raise UserError(f"unexpected argument {argument!r}. Write overrides as --config.KEY=VALUE")
        # KEYS serves all commands, and e.g. a pretraining recipe has no task.
        if flag in KEYS and not _defines(config_class, KEYS[flag]):
            raise UserError(
                f"unknown flag --{flag}, which sets config.{KEYS[flag]}: the recipe has no such key. Omit it"
            )
        if flag not in KEYS and not flag.startswith("config."):
            if _defines(config_class, name):
                raise UserError(f"unknown flag --{flag}; write the key as --config.{flag}=VALUE")
            key = _meant(flag, config_class)
            advice = _did_you_mean("--config", key) if key else "write overrides as --config.KEY=VALUE"
            raise UserError(f"unknown flag --{flag}; {advice}")
        if not equals:
            # A missing value is treated like a following flag. One dash may begin a value, as in negative numbers.
            value = next(rest, "--")
            if value.startswith("--"):
                raise UserError(f"--{flag} has no value; write --{flag}=VALUE")
        yield flag, value


def _hint(config_class: type, key: str, tree: Any = None) -> Any:
    """Looks up a dotted key's type. Raises UserError if the configuration does not have the key.

    `tree` holds the values so far, which tell the chosen kinds.
    """
    where, hint = "config", config_class
    for name in key.split("."):
        group = _group(hint, tree, where)
        if group is None:
            raise UserError(f"unknown key {where}.{name}; {where} is a single value. Write --{where}=VALUE")
        if name not in {item.name for item in dataclasses.fields(group)}:
            raise UserError(_unknown_key(where, name, group, config_class))
        where, hint = f"{where}.{name}", typing.get_type_hints(group)[name]
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return hint


def _group(hint: Any, value: Any, where: str) -> Any:
    """Returns a group's dataclass; in a union, the value chooses it. None if the key holds a single value."""
    kinds = union(hint)
    if kinds is None:
        # An optional group, such as LoraConfig | None.
        return next((kind for kind in _members(hint) if dataclasses.is_dataclass(kind)), None)
    if hint is kinds and kinds.kind:  # a kind itself, not the union
        return kinds
    name = value.get("kind") if isinstance(value, Mapping) else value
    if name is None:
        return next(iter(kinds.kinds.values()))
    if name not in kinds.kinds:
        raise UserError(f"unknown {where} {name!r}; {nearest(str(name), kinds.kinds)}")
    return kinds.kinds[name]


def _defines(config_class: type, key: str, tree: Any = None) -> bool:
    try:
        _hint(config_class, key, tree)
    except UserError:
        return False
    return True


def _assign(
    config_class: type, tree: dict[str, Any], values: Mapping[str, Any], read: Callable[[Any, Any, str], Any]
) -> None:
    """Sets dotted keys in a tree to read(type, value, name)."""
    names = {key: _without_kind(config_class, key, tree) for key in values}
    # Keys are sorted by depth, so that a kind is chosen before the keys that only this kind has.
    for key, name in sorted(names.items(), key=lambda pair: pair[1].count(".")):
        hint = _hint(config_class, name, tree)
        value = read(hint, values[key], f"config.{name}")
        *groups, last = name.split(".")
        node = tree
        for group in groups:
            if not isinstance(node.get(group), dict):  # None, or the bare name of a kind
                node[group] = {} if node.get(group) is None else {"kind": node[group]}
            node = node[group]
        if isinstance(value, str) and union(hint) is not None:
            # Keys that the new kind has, too, keep their values: another schedule keeps the warmup.
            shared = {item.name for item in dataclasses.fields(_group(hint, value, f"config.{name}"))}
            previous = node.get(last)
            kept = previous.items() if isinstance(previous, Mapping) else ()
            value = {"kind": value} | {name: entry for name, entry in kept if name in shared}
        node[last] = value


def _without_kind(config_class: type, key: str, tree: Any) -> str:
    """Shortens a union's kind to the union: objective.kind=mlm means objective=mlm."""
    parent, dot, last = key.rpartition(".")
    is_kind = dot and last == "kind" and _defines(config_class, parent, tree)
    return parent if is_kind and union(_hint(config_class, parent, tree)) else key


def _leaves(config_class: type, tree: Any, values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the value of each override; a mapping is one value unless its key is a group."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if dataclasses.is_dataclass(value):
            value = to_dict(value)
        # An unknown key passes as it is, and _assign reports it with a suggestion.
        hint = _hint(config_class, key, tree) if _defines(config_class, key, tree) else None
        if isinstance(value, Mapping) and any(map(dataclasses.is_dataclass, _members(hint))):
            yield from _leaves(config_class, tree, value, f"{key}.")
        else:
            yield key, value


def _plain(values: Values) -> dict[str, Any]:
    """Copies nested ConfigDicts and dataclasses as dictionaries."""
    tree = {name: to_dict(value) if dataclasses.is_dataclass(value) else value for name, value in values.items()}
    return {
        name: _plain(value) if isinstance(value, ml_collections.ConfigDict) else value for name, value in tree.items()
    }


def _native(key: str, value: Any) -> Any:
    """Converts a value to plain Python types, and everything ordered to tuples. Raises UserError for a set."""
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if hasattr(value, "tolist"):  # arrays and numbers of NumPy, jax and torch, columns of pandas
        value = value.tolist()
    if isinstance(value, set | frozenset):
        raise UserError(f"config.{key} is {value!r}, a set, which has no order. Give a list")
    if isinstance(value, Mapping):
        return {_native(key, name): _native(key, entry) for name, entry in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return tuple(_native(key, entry) for entry in value)
    return value


def _read(hint: Any, text: str, where: str) -> Any:
    """Reads a command-line value: text as it is, a tuple of texts split at commas, anything else as a literal."""
    others = tuple(kind for kind in _members(hint) if kind not in (str, types.NoneType))
    accepts_text = str in _members(hint)
    if accepts_text and not others:
        return text
    # Names and paths in a list need no quotes. A bracket or a quote begins a literal.
    if others == (tuple[str, ...],) and text[:1] not in ("(", "[", "'", '"'):
        parts = tuple(part.strip() for part in text.split(",") if part.strip())
        return text if accepts_text and len(parts) < 2 else parts
    try:
        value = literal(text)
    except ValueError as error:
        if accepts_text:
            return text
        raise UserError(f"{where} is {text!r}: {error}. Give a value of type {_described(hint)}") from None
    # The key takes text or another type. A literal of the other type counts as such, and all else as text.
    if accepts_text:
        try:
            return _convert(functools.reduce(operator.or_, others), value, where)
        except UserError:
            return text
    return value


def literal(text: str) -> Any:
    """Reads a Python literal, in which a bare word is text: true, 5e-4, (0, 2), {0: 0.3, 5000: 0.15}, f1,accuracy.

    Raises ValueError for anything else, such as text with a slash or a minus that is not in quotes.
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    # Python raises TypeError for a key that cannot be hashed, and the last two for deep nesting.
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is not a Python literal; put text in quotes") from None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return {"true": True, "false": False, "none": None}.get(node.id.lower(), node.id)
        # A configuration key, such as optimizer.learning_rate in a sweep, needs no quotes.
        case ast.Attribute():
            return f"{_value(node.value)}.{node.attr}"
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Tuple() | ast.List():
            return tuple(map(_value, node.elts))
        # A None among the keys stands for **MAPPING.
        case ast.Dict() if None not in node.keys:
            keys = [_value(key) for key in node.keys if key]
            # Python itself would silently keep the last of equal keys.
            for key in keys:
                if keys.count(key) > 1:
                    raise ValueError(f"the key {key!r} occurs twice")
            return dict(zip(keys, map(_value, node.values), strict=True))
    raise ValueError(f"{ast.unparse(node)!r} is not a Python literal; put text in quotes")


def _unknown_key(where: str, key: str, group: Any, root: Any = None) -> str:
    """Writes the message for an unknown key, and suggests the key that is probably meant.

    Args:
        root: The whole configuration's class, if known, in which to look for that key.
    """
    # From the most to the least likely meaning: a key of another kind of this union, a key in this group or below it, a
    # key elsewhere. `nearest` accepts worse matches, so it comes last.
    kinds = group.kinds.items() if isinstance(group, type) and issubclass(group, Kinds) else ()
    owners = [name for name, kind in kinds if key in {item.name for item in dataclasses.fields(kind)}]
    if owners:
        return f"unknown key {where}.{key}: {where}={group.kind} does not have it. Set --{where}={' or '.join(owners)}"
    known = [item.name for item in dataclasses.fields(group)]
    inside = _meant(key, group)  # learning_rate, say, of optimizer
    # If a kind has no keys at all, only the exact name of a key elsewhere is worth a suggestion.
    outside = _meant(key, root, cutoff=0.75 if known else 1.0) if root and not inside else ""
    if inside or outside:
        advice = _did_you_mean(where, inside) if inside else _did_you_mean("config", outside)
    else:
        advice = nearest(key, known, f"{where}.") if known else f"{where}={group.kind} has no keys"
    return f"unknown key {where}.{key}; {advice}"


def _did_you_mean(group: str, key: str) -> str:
    return f"did you mean {key if key.startswith('--') else f'{group}.{key}'}?"  # a flag is no key of a group


def _meant(word: str, root: Any, cutoff: float = 0.75) -> str:
    """Finds the key or flag for another library's word or a misspelt key; "" if there is none."""
    paths = sorted({*_paths(root)}, key=lambda path: (-path.count("."), path))
    last = {path.rpartition(".")[2]: path for path in paths}  # of equal names, the outermost key counts
    # Only the last name counts, since the group may be what is wrong.
    word = word.rpartition(".")[2]
    meant = OTHER_WORDS.get(word, "")
    if meant in paths or meant.startswith("--"):
        return meant
    near = difflib.get_close_matches(word, list(last), n=1, cutoff=cutoff)
    return last[near[0]] if near else ""


def _paths(group: Any) -> Iterator[str]:
    """Yields all dotted keys below a group, including every kind's."""
    hints = typing.get_type_hints(group)
    for item in dataclasses.fields(group):
        yield item.name
        for member in filter(dataclasses.is_dataclass, _members(hints[item.name])):
            for kind in getattr(member, "kinds", {}).values() or (member,):
                yield from (f"{item.name}.{path}" for path in _paths(kind))


def _members(hint: Any) -> tuple[Any, ...]:
    return (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )


def _described(hint: Any) -> str:
    return " or ".join("None" if kind is types.NoneType else type_name(kind) for kind in _members(hint))


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Converts a value to a type. Raises UserError if it has another type."""
    if value is None and types.NoneType in _members(hint):
        return None
    if (kinds := union(hint)) and isinstance(value, str):
        value = {"kind": value}
    if group := _group(hint, value, where):
        if not isinstance(value, Mapping):
            raise UserError(f"{where} is {value!r}, but has keys of its own. Write --{where}.KEY=VALUE")
        return load(group, {name: entry for name, entry in value.items() if not (kinds and name == "kind")}, where)
    # The first type that fits counts.
    for kind in _members(hint):
        try:
            return _as(kind, value)
        except TypeError:
            continue
    raise UserError(f"{where} is {value!r}. Give a value of type {_described(hint)}")


def _as(kind: Any, value: Any) -> Any:
    """Converts a value to a single type (no union). Raises TypeError if it has another type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or (kind is types.NoneType and value is None):
        return value
    if origin is tuple:
        if isinstance(value, Mapping):
            raise TypeError
        # One value without a comma stands for a tuple with one element.
        parts = value if isinstance(value, list | tuple) else (value,)
        if arguments[-1] is Ellipsis:
            return tuple(_as_any(arguments[0], part) for part in parts)
        if len(parts) != len(arguments):
            raise TypeError
        return tuple(_as_any(argument, part) for argument, part in zip(arguments, parts, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError
        return {_as_key(arguments[0], key): _as_any(arguments[1], entry) for key, entry in value.items()}
    # Whole numbers may stand for floats. True is an int to Python, but here a mistake.
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError
    return value


def _as_any(hint: Any, value: Any) -> Any:
    for kind in _members(hint):
        try:
            return _as(kind, value)
        except TypeError:
            continue
    raise TypeError


def _as_key(kind: Any, key: Any) -> Any:
    """A mapping's key. JSON has text for numbers; labels that look like numbers are text."""
    if kind is int and isinstance(key, str) and key.lstrip("-").isdecimal():
        return int(key)
    return str(key) if kind is str else _as(kind, key)
