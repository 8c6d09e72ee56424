"""What the Hugging Face layout says of a family of models: architectures, names, and the fields of config.json."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.interop.names import Entry
from bert_jax.model.heads import Heads
from bert_jax.tokenizer import Tokenizer

# What stands on the encoder, by the field of Heads; those of COUNTED say how many outputs they have.
COUNTED = ("classes", "tags")
# How a model is trained; what its parameters mean is the same with other values.
TRAINING_FIELDS = ("dropout", "attention_dropout", "initializer_range")
ARCHITECTURE_FIELDS = tuple(one.name for one in dataclasses.fields(ModelConfig) if one.name not in TRAINING_FIELDS)

LARGEST = 1 << 24  # of a number in config.json: far over any model, and products of three still are 64-bit sizes

# Names of transformers' activations; all those of one value compute the same, and the first is what we write.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
    "relu": "relu",
}
WRITTEN_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}

Parts = dict[str, tuple[Entry, ...]]


class Architecture(NamedTuple):
    """A class of transformers: the parts without which a file of it is not whole, and those it may have besides."""

    required: Parts
    optional: Parts


@dataclass(frozen=True)
class Family:
    """One family's layout. Names are bare: without the prefix that a model with a head has for its base model.

    model_type      as config.json has it
    title           for people
    prefix          of the base model's tensors in a model with a head: "bert."
    base            how the base model's tensors begin: ("embeddings.", "encoder.", "pooler.")
    base_class      the architecture that is the base model alone, whose tensors have no prefix
    encoder         the names of what every architecture has
    architectures   by name, the base model's among them
    copies          tensors that a file may hold besides: the copy's name and that of the original
    buffers         tensors that a file may hold besides, and that nothing reads; {} stands for a layer
    unread          the same, but they have been learnt: reading says that they are left out
    read_model      config.json (its path for messages, its fields) to the architecture
    write_model     the fields of config.json of an architecture, as near as the layout comes to it
    read_heads      further fields of Heads that config.json decides, of its path, its fields and the parts
    write_heads     and back
    always          what the architectures of the family have in common, by the field of ModelConfig
    tokenizers      kinds of tokenizer that the family's models have; None for any
    """

    model_type: str
    title: str
    prefix: str
    base: tuple[str, ...]
    base_class: str
    encoder: tuple[Entry, ...]
    architectures: Mapping[str, Architecture]
    read_model: Callable[[Path, Mapping[str, Any]], ModelConfig]
    write_model: Callable[[ModelConfig, Tokenizer], dict[str, Any]]
    copies: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    read_heads: Callable[[Path, Mapping[str, Any], frozenset[str]], dict[str, Any]] = lambda where, values, parts: {}
    write_heads: Callable[[Heads], dict[str, Any]] = lambda heads: {}
    always: Mapping[str, Any] = field(default_factory=dict)
    tokenizers: tuple[str, ...] | None = None

    def table(self, architecture: str) -> tuple[Entry, ...]:
        """All names of an architecture."""
        required, optional = self.architectures[architecture]
        return tuple(self.encoder) + tuple(entry for part in (required | optional).values() for entry in part)

    def whole_name(self, bare: str, architecture: str) -> str:
        """A tensor's name in a file of the architecture."""
        return self.prefix + bare if architecture != self.base_class and bare.startswith(self.base) else bare

    def is_buffer(self, bare: str) -> bool:
        """Whether a tensor is one of the buffers."""
        return re.sub(r"(?<=\.)\d+(?=\.)", "{}", bare) in self.buffers

    def architecture_of(self, heads: Heads) -> str | None:
        """The class that holds these heads, None where there is none."""
        has = parts_of(heads)
        found = [
            name
            for name, (required, optional) in self.architectures.items()
            if set(required) <= has <= set(required) | set(optional)
        ]
        return max(found, key=lambda name: len(self.architectures[name].required), default=None)

    def foreign_head(self, heads: Heads) -> str | None:
        """The first field of Heads, beside the parts, that this layout cannot hold; None where it holds all."""
        held = dataclasses.asdict(Heads()) | self.read_heads(
            Path(), self.write_heads(heads), frozenset(parts_of(heads))
        )
        parts = {name for architecture in self.architectures.values() for part in architecture for name in part}
        return next(
            (name for name, value in dataclasses.asdict(heads).items() if name not in parts and value != held[name]),
            None,
        )

    def foreign_fields(self, model: ModelConfig, words: Tokenizer) -> list[str]:
        """The fields of an architecture that this layout cannot hold; none where it holds all."""
        foreign = [name for name, value in self.always.items() if getattr(model, name) != value]
        try:
            again = self.read_model(Path(), self.write_model(model, words))
        except UserError:  # RoBERTa's positions begin behind the padding id, which may lie behind all positions
            return foreign or ["position_offset"]
        foreign += [
            name
            for name in ARCHITECTURE_FIELDS
            if name not in self.always and getattr(again, name) != getattr(model, name)
        ]
        # A position table of another length is but the consequence of another first position.
        return [name for name in foreign if name != "max_positions" or foreign == ["max_positions"]]


def parts_of(heads: Heads) -> set[str]:
    """The names of the heads that a model has."""
    values = {one.name: getattr(heads, one.name) for one in dataclasses.fields(heads)}
    return {name for name, value in values.items() if value is True or (name in COUNTED and value)}


class Field(NamedTuple):
    """One number: our field, theirs, and the value that theirs has where a file leaves it out (None: no such)."""

    ours: str
    theirs: str
    default: Any


def read_fields(where: Path, values: Mapping[str, Any], fields: tuple[Field, ...]) -> dict[str, Any]:
    """Our fields of theirs. Raises UserError, naming the field, for what is no number."""
    found: dict[str, Any] = {}
    for ours, theirs, default in fields:
        value = values.get(theirs, default)
        kind = int if default is None or isinstance(default, int) else (int, float)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(f"{where}: {theirs} is {value!r}; wanted a {'whole ' if kind is int else ''}number")
        least = 1 if default is None else 0
        if not least <= value < LARGEST:
            raise UserError(f"{where}: {theirs} is {value!r}; wanted a number from {least} to below {LARGEST:,}")
        found[ours] = value if kind is int else float(value)
    return found


def read_activation(where: Path, values: Mapping[str, Any], name: str) -> str:
    """Our name of the activation in a field. Raises UserError, naming the field, for one that there is not."""
    value = values.get(name, "gelu")
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise UserError(f"{where}: {name} is {value!r}; only {', '.join(map(repr, ACTIVATIONS))} can be read")
    return ACTIVATIONS[value]


def model_config(where: Path, names: tuple[Field, ...], **fields: Any) -> ModelConfig:
    """The architecture of these fields. Raises UserError where they do not go together, naming the file and the fields
    as the file calls them."""
    try:
        return ModelConfig(**fields)
    except UserError as error:
        theirs = {ours: name for ours, name, _ in names}
        told = re.sub(r"model\.(\w+)", lambda found: theirs.get(found[1], found[0]), str(error))
        raise UserError(f"{where}: {told}") from None


def write_fields(model: ModelConfig, fields: tuple[Field, ...]) -> dict[str, Any]:
    return {theirs: getattr(model, ours) for ours, theirs, _ in fields}


def check_fixed(where: Path, values: Mapping[str, Any], fixed: tuple[tuple[str, tuple[Any, ...]], ...]) -> None:
    """Raises UserError for what a configuration asks for and this model does not do.

    `fixed` has each field with the values that are fine, the first of them where a file leaves it out.
    """
    for name, fine in fixed:
        if (value := values.get(name, fine[0])) not in fine:
            raise UserError(f"{where}: {name} is {value!r}; only {' or '.join(map(repr, fine))} can be read")
