"""Options: dataclass fields that carry their meaning, so that one declaration serves every way to set them.

    @dataclass(frozen=True)
    class Options(Checked):
        output: str = option(help="folder to create", metavar="DIR")
        seed: int = option(0, "seed of the shuffle", valid=between(0, 99))

`option` declares a field and `check` tests the values. A field becomes a flag of a command (`parse`), a keyword of a
Python function (`from_keywords`), or a key of a recipe (config/loading.py), and `keys` lists it for the documents.
A command whose options extend those of a function inherits from their dataclass, and `values` selects them again.
A field whose type is a subclass of Kinds holds one of several groups of options, chosen by name.
"""

import argparse
import dataclasses
import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from bert_jax.command_line import Parser
from bert_jax.errors import UserError, flag, naming_arguments
from bert_jax.extensions import import_file

T = TypeVar("T")
REQUIRED: Any = dataclasses.MISSING

# What a change of a key means for a run that resumes (train/workdir.py). A key without a mark must have the value of
# the checkpoint, unless allow_changes names it. The mark of a group applies to all its keys.
#   free      no number of the run depends on it: it may change
#   end       it decides when the run ends: it may change, with a note, because the learning rate depends on it
#   file      it names files: the fingerprint of their content is compared instead
#   measured  it changes held-out metrics only: it may change unless checkpoint.best compares them
#   held_out  it names held-out data
#   batches   it decides the batch of a step (law 1): when it changes, the log says from which step on
Mark = Literal["free", "end", "file", "measured", "held_out", "batches"]


class Valid(NamedTuple):
    """A condition on an option's value, and how an error message describes it."""

    holds: Callable[[Any], bool]
    expected: str


def at_least(low: int | float) -> Valid:
    # `low <= nan` is False, so NaN is refused as well.
    return Valid(lambda value: low <= value < math.inf, f"a finite number of at least {low}")


def between(low: int | float, high: int | float) -> Valid:
    return Valid(lambda value: low <= value <= high, f"a number from {low} to {high}")


POSITIVE = Valid(lambda value: 0 < value < math.inf, "a number above 0")
RATE = Valid(lambda value: 0 <= value < 1, "a rate from 0 to below 1, such as 0.1")


def option(
    default: Any = REQUIRED,
    help: str = "",
    *marks: Mark,
    choices: Collection[str] = (),
    valid: Valid | None = None,
    metavar: str | None = None,
    aliases: Sequence[str] = (),
    dashes: bool = False,
    positional: Literal["", "1", "?", "*", "+"] = "",
    section: str = "",
    name: str = "",
    parser: Callable[[str], Any] | None = None,
) -> Any:
    """Declares a dataclass field that is an option.

    Args:
        help: Its meaning, in one or two sentences.
        marks: What a change means for a run that resumes.
        choices: The values that it may have; a mutable collection may grow by extensions.
        aliases: Further names of its flag, which other commands have for the same thing.
        dashes: Whether its value may look like a flag, as in `--separator ---`.
        positional: How many arguments without a flag it takes: 1, or as argparse's nargs; none if empty.
        section: The heading above it in --help.
        name: The name of its flag, if not the field's.
        parser: Converts its text on the command line; by default, its type decides.
    """
    metadata: dict[str, Any] = {"help": help, "marks": marks, "choices": choices, "valid": valid}
    metadata |= {"metavar": metavar, "aliases": tuple(aliases), "dashes": dashes}
    metadata |= {"positional": positional, "section": section, "name": name, "parser": parser}
    # A dataclass refuses a mutable default. The copies keep one configuration from changing another. A dict has no
    # hash, so the other fields stand for all: jit's cache compares them by ==, too.
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, hash=False, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def group(make: Callable[[], Any], help: str, *marks: Mark) -> Any:
    """Declares a dataclass field that holds further options, whose defaults `make` gives."""
    return dataclasses.field(default_factory=make, metadata={"help": help, "marks": marks})


class Kinds:
    """Base class of a union: groups of options of which a configuration has one, chosen by name.

        class ScheduleConfig(Kinds): ...  # the union

        @dataclass(frozen=True)
        class Cosine(ScheduleConfig, kind="cosine"):  # --config.optimizer.schedule=cosine
            final_share: float = option(0.0, "...")  # --config.optimizer.schedule.final_share=0.1

    `kinds` holds the classes by name, the default first. An extension adds a kind by defining its class.
    """

    kind: ClassVar[str] = ""
    kinds: ClassVar[dict[str, Any]]  # classes; typed so that extensions may construct them

    def __init_subclass__(cls, kind: str = "") -> None:
        # A direct subclass is a union, with its own table. Classes without a name hold keys that several kinds share.
        if Kinds in cls.__bases__:
            cls.kinds = {}
        if kind:
            cls.kind = kind
            cls.kinds[kind] = cls


def check(options: Any, prefix: str | None = None) -> None:
    """Checks all values against their fields; None is always allowed.

    Args:
        prefix: What stands before the names of keys. By default, options are named as errors.flag does.

    Raises:
        UserError: A field does not allow its value; the first such field is named.
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        choices, valid = field.metadata.get("choices"), field.metadata.get("valid")
        name = flag(field.name) if prefix is None else f"{prefix}{field.name}"
        if value is None:
            continue
        if isinstance(field.default, tuple) and isinstance(value, str):  # its letters would count as values
            raise UserError(f"{name} is {value!r}. Give a tuple, such as {(value,)}")
        if choices and value not in choices:
            raise UserError(f"unknown {name} {value!r}; choose from {', '.join(filter(None, choices))}")
        if valid and not valid.holds(value):
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            raise UserError(f"{name} is {shown}. Use {valid.expected}")


class Checked:
    """Base class for dataclasses that check their options when they are made."""

    def __post_init__(self) -> None:
        check(self)


def values(options: Any, base: type) -> dict[str, Any]:
    """Selects the options declared by a base class, by name."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(base)}


def marked(config: Any, mark: Mark) -> tuple[str, ...]:
    """Lists the keys and groups with a mark, e.g. mesh.data."""
    names: list[str] = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if mark in item.metadata.get("marks", ()):
            names.append(item.name)
        elif dataclasses.is_dataclass(value):
            names += [f"{item.name}.{name}" for name in marked(value, mark)]
    return tuple(names)


class Key(NamedTuple):
    """A configuration key, which `--config.NAME=VALUE` sets."""

    name: str
    type: str
    default: Any
    meaning: str


def keys(config: Any, prefix: str = "", every_kind: bool = False) -> list[Key]:
    """Lists all keys in a configuration and its groups; the configuration's values are shown as defaults.

    Args:
        config: A configuration dataclass.
        prefix: What stands before the keys' names.
        every_kind: Whether to list also the keys that only a union's other kinds have.
    """
    hints = typing.get_type_hints(type(config))
    listed: list[Key] = []
    for item in dataclasses.fields(config):
        value, about, name = getattr(config, item.name), item.metadata, f"{prefix}{item.name}"
        if kinds := union(hints[item.name]):
            default = None if value is None else value.kind  # None: the preset's
            listed.append(Key(name, "kind", default, f"{about['help']}: {', '.join(kinds.kinds)}"))
            if every_kind:
                listed += _keys_of_kinds(kinds, value, f"{name}.")
            elif value is not None:
                listed += keys(value, f"{name}.")
        elif dataclasses.is_dataclass(value):
            listed += keys(value, f"{name}.", every_kind)
        else:
            listed.append(Key(name, type_name(hints[item.name]), value, _meaning(item)))
    return listed


def _meaning(field: dataclasses.Field[Any]) -> str:
    """Returns a field's help text, followed by its choices unless the text names them."""
    meaning, choices = field.metadata["help"], field.metadata["choices"]
    if all(choice in meaning for choice in choices):
        return str(meaning)
    return f"{meaning}: {', '.join(filter(None, choices))}"


def _keys_of_kinds(kinds: type[Kinds], chosen: Kinds | None, prefix: str) -> list[Key]:
    """Lists a union's keys once. If some kinds lack a key, its meaning begins with the names of those that have it."""
    listed: dict[tuple[str, str], tuple[Key, list[str]]] = {}
    default = chosen or next(iter(kinds.kinds.values()))()
    # The chosen kind comes first, so that keys that kinds share show its values. Equal names with different meanings
    # are listed separately.
    for group in (default, *(kind() for name, kind in kinds.kinds.items() if name != default.kind)):
        for key in keys(group, prefix, every_kind=True):
            listed.setdefault((key.name, key.meaning), (key, []))[1].append(group.kind)
    return [
        key if len(owners) == len(kinds.kinds) else key._replace(meaning=f"{', '.join(owners)}: {key.meaning}")
        for key, owners in listed.values()
    ]


def union(hint: Any) -> type[Kinds] | None:
    """Returns the union in a field's type, which may be optional; None if it has none."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((kind for kind in members if isinstance(kind, type) and issubclass(kind, Kinds)), None)


def type_name(hint: Any) -> str:
    """Returns a type as documents show it, e.g. `int | None` or `tuple[int, ...]`."""
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns advice for an unknown name: the nearest known one, or all of them."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {prefix}{near[0]}?" if near else f"choose from {', '.join(sorted(known))}"


def by_field(options: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Resolves aliases to field names. Raises UserError if a field is given twice."""
    names = {alias: field.name for field in dataclasses.fields(options) for alias in field.metadata["aliases"]}
    for alias, name in names.items():
        if alias in values and name in values:
            raise UserError(f"{name} and {alias} are the same option; give one of them")
    return {names.get(name, name): value for name, value in values.items()}


def from_keywords(options: type[T], values: Mapping[str, Any]) -> T:
    """Makes options from keyword arguments, which may be aliases. A list stands for a tuple.

    Raises:
        UserError: A name is unknown, given twice or missing, or a value has the wrong type.
    """
    fields, hints = dataclasses.fields(options), typing.get_type_hints(options)  # type: ignore[arg-type]
    arguments = {name: tuple(v) if isinstance(v, list) else v for name, v in by_field(options, values).items()}
    for name, value in arguments.items():
        if name not in hints:
            raise UserError(f"unknown option {name}; {nearest(name, hints)}")
        if not _fits(value, hints[name]):
            raise UserError(f"{name} is {value!r}; expected {_described(hints[name])}")
    if missing := [field.name for field in fields if field.default is REQUIRED and field.name not in arguments]:
        raise UserError(f"options are missing: {', '.join(missing)}")
    with naming_arguments():
        return options(**arguments)


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(element, typing.get_args(hint)[0]) for element in value)
    if hint in (int, float):  # True is an int to Python
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, typing.get_origin(hint) or hint)


def _described(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_described(member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a tuple of {typing.get_args(hint)[0].__name__}"
    return "None" if hint is type(None) else f"{hint.__name__}"


def parse(program: str, description: str, options: type[T], arguments: Sequence[str]) -> T:
    """Parses a command's flags into a dataclass with a field for each. Raises UserError if they are wrong."""
    made, rest = parse_known(program, description, options, arguments)
    if rest:
        raise UserError(f"unrecognized arguments: {' '.join(rest)}. See: {program} --help")
    return made


def parse_known(program: str, description: str, options: type[T], arguments: Sequence[str]) -> tuple[T, list[str]]:
    """Parses as `parse` does, and also returns the arguments that no field takes, such as --config.KEY=VALUE."""
    fields = dataclasses.fields(options)  # type: ignore[arg-type]
    with_dashes = {f"--{field.name}" for field in fields if field.metadata["dashes"]}
    namespace, rest = _parser(program, description, options).parse_known_args(_joined(arguments, with_dashes))
    # argparse collects positional arguments in a list.
    return options(**{name: tuple(v) if isinstance(v, list) else v for name, v in vars(namespace).items()}), rest


def _parser(program: str, description: str, options: type) -> Parser:
    """Makes a parser with a flag for each field, whose type decides how the flag is parsed."""
    hints, fields = typing.get_type_hints(options), {field.name: field for field in dataclasses.fields(options)}
    # --help begins with required options; others follow, those of the command before those that it inherits.
    needed = [field for field in fields.values() if field.default is REQUIRED]
    declared = dict.fromkeys(name for base in options.__mro__ for name in inspect.get_annotations(base))
    optional = [fields[name] for name in declared if name in fields and fields[name] not in needed]
    shown = [*needed, *(field for field in optional if field.metadata["positional"])]
    usage = " ".join([program, *map(_in_usage, shown), "[OPTIONS]"])
    parser = Parser(program, description, usage=usage, add_help=False)
    headings = ["required", "options", *(field.metadata["section"] or "options" for field in optional)]
    groups = {heading: parser.add_argument_group(heading) for heading in dict.fromkeys(headings)}
    for field in [*needed, *optional]:
        about, hint = field.metadata, hints[field.name]
        group = groups["required" if field in needed else about["section"] or "options"]
        names = [f"--{name}" for name in (about["name"] or field.name, *about["aliases"])]
        meaning = _meaning(field)
        if field.default not in (REQUIRED, "", None, ()) and "default" not in meaning and hint is not bool:
            default = f"{field.default:g}" if isinstance(field.default, float) else field.default
            meaning = f"{meaning}; default {default}"
        # argparse formats help texts with %.
        meaning = meaning.replace("%", "%%")
        if hint in (bool | None, bool | str | None) and not about["parser"]:
            value = {} if hint == bool | None else {"metavar": _metavar(field)}
            parser.add_switch(field.name, group, help=meaning, **value)
        elif hint is bool:
            group.add_argument(*names, action="store_true", help=meaning)
        elif count := about["positional"]:
            default = None if field in needed else field.default
            nargs = None if count == "1" else count
            group.add_argument(field.name, nargs=nargs, default=default, metavar=_metavar(field), help=meaning)
        else:
            group.add_argument(
                *names,
                dest=field.name,
                required=field in needed,
                default=field.default,
                type=about["parser"] or _PARSERS.get(hint, str),
                metavar=_metavar(field),
                help=meaning,
            )
    about_import = "run this extension first (docs/extending.md)"
    groups["options"].add_argument(
        "--import", action=_Import, metavar="FILE", default=argparse.SUPPRESS, help=about_import
    )
    groups["options"].add_argument("-h", "--help", action="help", help="show this help and exit")
    return parser


class _Import(argparse.Action):
    """Imports the file of --import at once, since it may add kinds and choices for later arguments."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, _: str | None = None) -> None:
        import_file(values)


def _in_usage(field: dataclasses.Field[Any]) -> str:
    form = {"": f"--{field.name} {{}}", "1": "{}", "?": "[{}]", "*": "[{} ...]", "+": "{} ..."}
    return form[field.metadata["positional"]].format(_metavar(field))


def _metavar(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata["metavar"] or field.name.rpartition("_")[2].upper())


def _joined(arguments: Sequence[str], flags: Container[str]) -> list[str]:
    """Joins some flags and their values by =, because argparse would take a value such as --- for a flag."""
    joined: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        value = next(rest, None) if argument in flags else None
        joined.append(argument if value is None else f"{argument}={value}")
    return joined


def yes_or_no(text: str) -> bool:
    """Parses a flag's value, yes or no."""
    if text not in ("yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")
    return text == "yes"


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(",")) if text else ()
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text}: expected numbers separated by commas, for example 0.8,0.1,0.1"
        ) from None


def _count_or_numbers(text: str) -> int | tuple[int, ...]:
    try:
        numbers = tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor several, such as 0,7,9") from None
    # A number alone is a count; several are the values themselves.
    return numbers if len(numbers) > 1 else numbers[0]


_PARSERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    int | None: int,
    float | None: float,
    Path: Path,
    Path | None: Path,
    tuple[float, ...]: _numbers,
    tuple[str, ...]: lambda text: tuple(filter(None, text.split(","))),
    int | tuple[int, ...]: _count_or_numbers,
}
