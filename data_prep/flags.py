"""The options of a data-preparation command as one dataclass: each field gives a flag, its default and its help.

    @dataclass(frozen=True)
    class Options:
        output: str = option(REQUIRED, "the folder to create", metavar="DIR")
        seed: int = option(0, "seed of the shuffle", valid=between(0, 99))
        __post_init__ = check

`parse` makes them from flags, `from_keywords` from the arguments of a function.
"""

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from bert_jax.command_line import Parser
from bert_jax.errors import UserError
from data_prep.readers.corpus import Reading
from data_prep.readers.text import FORMATS

T = typing.TypeVar("T")
REQUIRED: Any = dataclasses.MISSING


class Valid(NamedTuple):
    """A condition on the value of an option, and its description in an error message."""

    holds: Callable[[Any], bool]
    expected: str


def between(low: int | float, high: int | float) -> Valid:
    return Valid(lambda value: low <= value <= high, f"from {low} to {high}")


def option(
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    choices: Sequence[str] = (),
    valid: Valid | None = None,
    dashes: bool = False,
    aliases: Sequence[str] = (),
) -> Any:
    """A field of a dataclass of options. With `dashes`, its value may look like a flag: `--separator ---`.

    aliases are further names of its flag: those that other commands have for the same thing.
    """
    metadata = {"help": help, "metavar": metavar, "choices": choices, "valid": valid, "dashes": dashes}
    return dataclasses.field(default=default, metadata=metadata | {"aliases": tuple(aliases)})


def by_field(options: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values of a class of options by the names of its fields, where they may have aliases.

    Raises UserError for two names of one field.
    """
    names = {alias: field.name for field in dataclasses.fields(options) for alias in field.metadata["aliases"]}
    for alias, name in names.items():
        if alias in values and name in values:
            raise UserError(f"{name} and {alias} are the same option; give one of them")
    return {names.get(name, name): value for name, value in values.items()}


def from_keywords(options: type[T], values: Mapping[str, Any]) -> T:
    """Makes options from keyword arguments, which may be aliases.

    Raises UserError for an unknown name, two names of one field, a value of another type, and one that is missing.
    """
    fields, hints = dataclasses.fields(options), typing.get_type_hints(options)  # type: ignore[arg-type]
    given = by_field(options, values)
    for name, value in given.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            advice = f"did you mean {near[0]}?" if near else "see the flags in --help"
            raise UserError(f"unknown option {name}; {advice}")
        if not _fits(value, hints[name]):
            raise UserError(f"{name} is {value!r}; expected {_described(hints[name])}")
    if missing := [field.name for field in fields if field.default is REQUIRED and field.name not in given]:
        raise UserError(f"options are missing: {', '.join(missing)}")
    return options(**given)


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, each) for each in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(each, typing.get_args(hint)[0]) for each in value)
    if hint in (int, float):  # True is an int to Python
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)


def _described(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_described(each) for each in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a tuple of {typing.get_args(hint)[0].__name__}"
    return "None" if hint is type(None) else f"{hint.__name__}"


def check(options: Any) -> None:
    """Raises UserError, with the name of the flag, for the first value that its field does not allow."""
    for field in dataclasses.fields(options):
        value, choices, valid = getattr(options, field.name), field.metadata["choices"], field.metadata["valid"]
        if choices and value not in choices:
            raise UserError(f"unknown --{field.name} {value}; choose from {', '.join(choices)}")
        if valid and value is not None and not valid.holds(value):
            given = ",".join(map(str, value)) if isinstance(value, tuple) else value
            raise UserError(f"--{field.name} {given}: it must be {valid.expected}")


def parse(program: str, description: str, options: Any, arguments: Sequence[str]) -> Any:
    """Parses the flags of a command: one for each field of its options, whose type decides how the flag is parsed."""
    parser = Parser(program, description)
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        flag, help, required = f"--{field.name}", field.metadata["help"], field.default is REQUIRED
        if hints[field.name] == bool | None:
            parser.add_switch(field.name, help=help)
        elif hints[field.name] is bool:
            parser.add_argument(flag, action="store_true", help=help)
        else:
            parser.add_argument(
                flag,
                *(f"--{alias}" for alias in field.metadata["aliases"]),
                dest=field.name,
                required=required,
                default=field.default,
                type=_PARSERS.get(hints[field.name], str),
                metavar=field.metadata["metavar"],
                help=help if required or "default" in help else f"{help}; default {field.default}",
            )
    with_dashes = {f"--{field.name}" for field in dataclasses.fields(options) if field.metadata["dashes"]}
    return options(**vars(parser.parse_args(_joined(arguments, with_dashes))))


def _joined(arguments: Sequence[str], flags: Container[str]) -> list[str]:
    """The arguments with = between some flags and their values, which argparse would otherwise take for flags."""
    joined: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        value = next(rest, None) if argument in flags else None
        joined.append(argument if value is None else f"{argument}={value}")
    return joined


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(",")) if text else ()
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text}: expected numbers separated by commas, for example 0.8,0.1,0.1"
        ) from None


_PARSERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    float | None: float,
    tuple[float, ...]: _numbers,
}


# The flags by which every command that takes --input reads it.


def input_format() -> Any:
    return option(
        "auto",
        f"format of every input file: {', '.join(FORMATS)}; or auto: by its name, and text by its content, too",
        metavar="NAME",
    )


def text_field() -> Any:
    return option(
        "text",
        "field or column that holds the text, in JSONL, CSV, TSV, Parquet, Arrow and TFDS",
        metavar="NAME",
        aliases=["text"],
    )


def document() -> Any:
    return option("blank_line", "what separates the documents of text: blank_line, or file (each file is one document)")


def document_separator() -> Any:
    return option(
        "",
        "the line that separates the documents of text, in place of blank lines, for example '<|endoftext|>' or ---; "
        "default: a blank line",
        metavar="LINE",
        dashes=True,
    )


def on_error() -> Any:
    return option("fail", "for input that cannot be used: fail, or skip and count it")


def workers(help: str) -> Any:
    valid = Valid(lambda count: count >= 0, "at least 0 (0: one for each core)")
    return option(0, help, metavar="N", valid=valid)


def reading(options: Any, workers: int) -> Reading:
    """What options with these fields state, by so many processes. Raises UserError for an unknown choice."""
    given = options.text_field, options.document, options.on_error, options.input_format, options.document_separator
    return Reading(*given, workers)
