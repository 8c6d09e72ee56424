"""Describes a model family in Hugging Face format: architectures, tensor names, and the fields of config.json."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.config import ModelConfig
from bert_jax.interop.config_fields import (
    WRITTEN_ACTIVATIONS,
    Field,
    check_fixed,
    make_model_config,
    read_activation,
    read_fields,
    write_fields,
)
from bert_jax.interop.name_table import Entry
from bert_jax.model.heads import Heads
from bert_jax.vocabulary import Vocabulary

# Fields of Heads whose value is a number of outputs.
COUNTED = ("classes", "tags")
# Fields that affect training only; parameters mean the same whatever their values.
TRAINING_FIELDS = ("dropout", "attention_dropout", "initializer_range", "bptt")
# Adapters come on top of an architecture; a checkpoint is read with them merged (bert_jax/model/lora.py).
ARCHITECTURE_FIELDS = tuple(
    one.name for one in dataclasses.fields(ModelConfig) if one.name not in (*TRAINING_FIELDS, "lora")
)

# Whether the output matrix is the token table; None means that it is.
TIED: tuple[str, tuple[Any, ...]] = ("tie_word_embeddings", (True, False, None))

Parts = dict[str, tuple[Entry, ...]]  # name tables by the name of the head that they belong to


class Architecture(NamedTuple):
    """A model class of transformers: the heads that a file of it must hold, and those that it may hold."""

    required: Parts
    optional: Parts


def make_architecture(*required: Parts, optional: Parts) -> Architecture:
    """Returns the architecture that must hold some heads and may hold others."""
    needed = {name: part for parts in required for name, part in parts.items()}
    return Architecture(needed, {name: part for name, part in optional.items() if name not in needed})


@dataclass(frozen=True)
class Family:
    """The Hugging Face format of one family.

    Tensor names are bare: without the prefix that a model with a head gives its base model.

    model_type      as in config.json
    title           the name shown to users
    prefix          of the base model's tensors in a model with a head, such as "bert."
    base            prefixes of the base model's bare names: ("embeddings.", "encoder.", "pooler.")
    base_class      the architecture that is the base model alone, whose tensors have no prefix
    encoder         the name table of the encoder, which every architecture shares
    architectures   by class name, including the base model's
    copies          tensors that a file may hold as a copy of another: copy -> original
    buffers         tensors that a file may hold and that are not read; {} stands for a layer
    unread          trained tensors that a file may hold and that reading reports as left out
    fields          the numbers in config.json
    activation      the name of the activation there, and its default
    fixed           fields of config.json whose other values are not supported (check_fixed)
    always          the fields of ModelConfig that are the same for all models of the family
    read_further    (path for messages, content of config.json, fields read) -> further fields of ModelConfig
    write_further   (architecture, vocabulary) -> further fields of config.json
    read_heads      (path, fields, heads found) -> further fields of Heads that config.json decides
    write_heads     the inverse of read_heads
    tokenizers      the kinds of tokenizer that the family's models have; None for any
    """

    model_type: str
    title: str
    prefix: str
    base: tuple[str, ...]
    base_class: str
    encoder: tuple[Entry, ...]
    architectures: Mapping[str, Architecture]
    fields: tuple[Field, ...]
    write_further: Callable[[ModelConfig, Vocabulary], dict[str, Any]]
    read_further: Callable[[Path, Mapping[str, Any], dict[str, Any]], dict[str, Any]] = lambda where, values, fields: {}
    activation: tuple[str, str] = ("hidden_act", "gelu")
    fixed: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    read_heads: Callable[[Path, Mapping[str, Any], frozenset[str]], dict[str, Any]] = lambda where, values, parts: {}
    write_heads: Callable[[Heads], dict[str, Any]] = lambda heads: {}
    always: Mapping[str, Any] = field(default_factory=dict)
    tokenizers: tuple[str, ...] | None = None

    def read_model(self, where: Path, values: Mapping[str, Any]) -> ModelConfig:
        """Returns the architecture that a config.json describes; `where` is its path.

        Raises UserError, naming the field, for a value that is wrong or not supported.
        """
        check_fixed(where, values, (TIED, *self.fixed))
        name, default = self.activation
        read = {**self.always, **read_fields(where, values, self.fields)}
        read["activation"] = read_activation(where, {name: default, **values}, name)
        read["tied_output"] = values.get(TIED[0]) is not False
        return make_model_config(where, self.fields, **(read | self.read_further(where, values, read)))

    def write_model(self, model: ModelConfig, vocabulary: Vocabulary) -> dict[str, Any]:
        """Returns the fields of config.json, as close as the format allows."""
        written = write_fields(model, self.fields)
        written |= {self.activation[0]: WRITTEN_ACTIVATIONS[model.activation], TIED[0]: model.tied_output}
        return written | {"pad_token_id": vocabulary.pad_id} | self.write_further(model, vocabulary)

    def table(self, architecture: str) -> tuple[Entry, ...]:
        """Returns the name table of an architecture with all its heads."""
        required, optional = self.architectures[architecture]
        return tuple(self.encoder) + tuple(entry for part in (required | optional).values() for entry in part)

    def head_tensors(self, *architectures: str) -> set[str]:
        """Returns the bare names of the tensors of all heads of some architectures."""
        parts = [part for name in architectures for one in self.architectures[name] for part in one.values()]
        return {name for part in parts for entry in part for name in entry.names}

    def full_name(self, bare: str, architecture: str) -> str:
        """Returns a tensor's name in a file of the architecture."""
        return self.prefix + bare if architecture != self.base_class and bare.startswith(self.base) else bare

    def is_buffer(self, bare: str) -> bool:
        """Returns whether a tensor is one of the buffers."""
        return re.sub(r"(?<=\.)\d+(?=\.)", "{}", bare) in self.buffers


def parts_of(heads: Heads) -> set[str]:
    """Returns the names of the heads that a model has."""
    values = {one.name: getattr(heads, one.name) for one in dataclasses.fields(heads)}
    return {name for name, value in values.items() if value is True or (name in COUNTED and value)}
