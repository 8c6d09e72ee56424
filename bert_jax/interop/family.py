"""Describes a model family in Hugging Face format: architectures, tensor names, and the fields of config.json."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.config import ModelConfig
from bert_jax.interop.name_table import Entry
from bert_jax.model.heads import Heads
from bert_jax.vocabulary import Vocabulary

# Fields of Heads whose value is a number of outputs.
COUNTED = ("classes", "tags")
# Fields that affect training only; parameters mean the same whatever their values.
TRAINING_FIELDS = ("dropout", "attention_dropout", "initializer_range")
ARCHITECTURE_FIELDS = tuple(one.name for one in dataclasses.fields(ModelConfig) if one.name not in TRAINING_FIELDS)

Parts = dict[str, tuple[Entry, ...]]  # name tables by the name of the head that they belong to


class Architecture(NamedTuple):
    """A model class of transformers: the heads that a file of it must hold, and those that it may hold."""

    required: Parts
    optional: Parts


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
    read_model      (path for messages, fields of config.json) -> architecture
    write_model     (architecture, vocabulary) -> fields of config.json, as close as the format allows
    read_heads      (path, fields, heads found) -> further fields of Heads that config.json decides
    write_heads     the inverse of read_heads
    always          the fields of ModelConfig that are the same for all models of the family
    tokenizers      the kinds of tokenizer that the family's models have; None for any
    """

    model_type: str
    title: str
    prefix: str
    base: tuple[str, ...]
    base_class: str
    encoder: tuple[Entry, ...]
    architectures: Mapping[str, Architecture]
    read_model: Callable[[Path, Mapping[str, Any]], ModelConfig]
    write_model: Callable[[ModelConfig, Vocabulary], dict[str, Any]]
    copies: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    read_heads: Callable[[Path, Mapping[str, Any], frozenset[str]], dict[str, Any]] = lambda where, values, parts: {}
    write_heads: Callable[[Heads], dict[str, Any]] = lambda heads: {}
    always: Mapping[str, Any] = field(default_factory=dict)
    tokenizers: tuple[str, ...] | None = None

    def table(self, architecture: str) -> tuple[Entry, ...]:
        """Returns the name table of an architecture with all its heads."""
        required, optional = self.architectures[architecture]
        return tuple(self.encoder) + tuple(entry for part in (required | optional).values() for entry in part)

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
