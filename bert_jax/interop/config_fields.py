"""Reads and writes the fields of a Hugging Face config.json as fields of ModelConfig."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.command import UserError
from bert_jax.config import ModelConfig

# The largest number accepted from a config.json: far above any model, and small enough that a product of
# three still fits a 64-bit size.
LARGEST = 1 << 24

# Activations by their names in transformers. Names with the same value compute the same function, and the
# first of them is the one that export writes.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
    "relu": "relu",
}
WRITTEN_ACTIVATIONS = {activation: name for name, activation in reversed(ACTIVATIONS.items())}


class Field(NamedTuple):
    """A number in config.json: its field of ModelConfig, its name there, and its default (None: it is required)."""

    field: str
    name: str
    default: Any


def read_fields(where: Path, values: Mapping[str, Any], fields: tuple[Field, ...]) -> dict[str, Any]:
    """Returns the values of some fields by their field of ModelConfig.

    Raises UserError, naming the field, for a value that is not a number or is out of range.
    """
    found: dict[str, Any] = {}
    for field, name, default in fields:
        value = values.get(name, default)
        kind = int if default is None or isinstance(default, int) else (int, float)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(f"{where}: {name} is {value!r}; expected {'an integer' if kind is int else 'a number'}")
        least = 1 if default is None else 0
        if not least <= value < LARGEST:
            raise UserError(f"{where}: {name} is {value!r}; expected at least {least} and less than {LARGEST:,}")
        found[field] = value if kind is int else float(value)
    return found


def write_fields(model: ModelConfig, fields: tuple[Field, ...]) -> dict[str, Any]:
    """Returns the values of some fields by their name in config.json."""
    return {name: getattr(model, field) for field, name, _ in fields}


def read_activation(where: Path, values: Mapping[str, Any], name: str) -> str:
    """Returns the activation that a field selects. Raises UserError, naming the field, for an unknown one."""
    value = values.get(name, "gelu")
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise UserError(f"{where}: {name} is {value!r}; choose from {', '.join(map(repr, ACTIVATIONS))}")
    return ACTIVATIONS[value]


def check_fixed(where: Path, values: Mapping[str, Any], fixed: tuple[tuple[str, tuple[Any, ...]], ...]) -> None:
    """Raises UserError for a field whose value asks for something that bert_jax does not implement.

    `fixed` lists each field with its supported values, the first of which is the default.
    """
    for name, supported in fixed:
        if (value := values.get(name, supported[0])) not in supported:
            raise UserError(f"{where}: {name} is {value!r}; only {' or '.join(map(repr, supported))} is supported")


def make_model_config(where: Path, names: tuple[Field, ...], **fields: Any) -> ModelConfig:
    """Returns the architecture with these fields.

    Raises UserError if the fields are inconsistent. The message names the file, and the fields as the
    file names them.
    """
    try:
        return ModelConfig(**fields)
    except UserError as error:
        in_file = {field: name for field, name, _ in names}
        message = re.sub(r"model\.(\w+)", lambda found: in_file.get(found[1], found[0]), str(error))
        raise UserError(f"{where}: {message}") from None
