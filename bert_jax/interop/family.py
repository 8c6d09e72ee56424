"""Describes a model family in Hugging Face format: architectures, tensor names, and the fields of config.json.

`Family`, at the end, is what families/*.py fill in. It is built from two kinds of tables, which come first: name tables
(Entry, Layout), which say how each parameter is joined from tensors, and fields of config.json (Field).
"""

import dataclasses
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.model import layers as paths
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads.config import Heads
from bert_jax.shapes import padded_vocabulary
from bert_jax.tokenization.vocabulary import Vocabulary

# Name tables. The Hugging Face format stores each layer's tensors separately and its token table has exactly vocab_size
# rows; bert_jax stacks the layers and pads the table with zero rows.

LAYERS = "encoder/layers/"  # parameters stacked over layers, [L, ...]


class Layout(NamedTuple):
    """How one parameter is joined from the tensors of one layer, and split into them again."""

    join: Callable[[Sequence[np.ndarray], ModelConfig], np.ndarray]
    split: Callable[[np.ndarray, ModelConfig], Sequence[np.ndarray]]


class Entry(NamedTuple):
    """One parameter: its path, and its tensors' names in a base model, with {} for the layer.

    Layers before `first_layer` have no such tensor. There the parameter exists but is never read, and is
    filled with `absent_value`. `tied` limits the entry to models whose output is tied to the token table
    (True) or not (False).
    """

    path: str
    names: tuple[str, ...]
    layout: Layout
    first_layer: int = 0
    absent_value: float = 0.0
    tied: bool | None = None


def _pad(table: np.ndarray, config: ModelConfig) -> np.ndarray:
    missing = padded_vocabulary(config.vocab_size) - len(table)
    return np.pad(table, [(0, missing)] + [(0, 0)] * (table.ndim - 1))


def head_shape(config: ModelConfig) -> tuple[int, int]:
    """Returns the number of attention heads and the width of each."""
    return config.heads, config.width // config.heads


SAME = Layout(lambda tensors, _: tensors[0], lambda param, _: [param])
# A dense kernel is [out, in] in torch and [in, out] here.
DENSE = Layout(lambda tensors, _: tensors[0].T, lambda param, _: [param.T])
VOCABULARY = Layout(lambda tensors, c: _pad(tensors[0], c), lambda param, c: [param[: c.vocab_size]])
# Two tensors that hold the same values: the first is read, both are written.
VOCABULARY_TWICE = Layout(VOCABULARY.join, lambda param, c: [param[: c.vocab_size]] * 2)
# Query, key and value as separate tensors.
_QKV_KERNEL = Layout(
    lambda tensors, c: np.stack([kernel.T.reshape(c.width, *head_shape(c)) for kernel in tensors], axis=1),
    lambda param, c: [param[:, index].reshape(c.width, c.width).T for index in range(3)],
)
_QKV_BIAS = Layout(
    lambda tensors, c: np.stack([bias.reshape(head_shape(c)) for bias in tensors]),
    lambda param, c: list(param.reshape(3, c.width)),
)
ATTENTION_OUTPUT = Layout(
    lambda tensors, c: tensors[0].T.reshape(*head_shape(c), c.width),
    lambda param, c: [param.reshape(c.width, c.width).T],
)


def dense(path: str, name: str, kernel: Layout = DENSE) -> tuple[Entry, ...]:
    """Returns the entries of a dense layer's kernel and bias."""
    return Entry(f"{path}/kernel", (f"{name}.weight",), kernel), Entry(f"{path}/bias", (f"{name}.bias",), SAME)


def norm(path: str, name: str) -> tuple[Entry, ...]:
    """Returns the entries of a LayerNorm's scale and bias."""
    return Entry(f"{path}/scale", (f"{name}.weight",), SAME), Entry(f"{path}/bias", (f"{name}.bias",), SAME)


def qkv(*names: str) -> tuple[Entry, ...]:
    """Returns the entries of queries, keys and values that are three dense layers."""
    path = f"{LAYERS}attention/qkv"
    kernel = Entry(f"{path}/kernel", tuple(f"{name}.weight" for name in names), _QKV_KERNEL)
    return kernel, Entry(f"{path}/bias", tuple(f"{name}.bias" for name in names), _QKV_BIAS)


def mlm_head(transform: str, transform_norm: str, decoder: str, bias: str) -> "Parts":
    """Returns the head of a masked language model; an untied output has its own bias in `decoder`.

    transformers 4 ties both biases even there, and its files may hold `bias` alone (absent_copies).
    """
    entries = (
        *dense("mlm_head/transform", transform),
        *norm("mlm_head/norm", transform_norm),
        Entry("mlm_head/bias", (bias,), VOCABULARY, tied=True),
        Entry("mlm_head/output/table", (f"{decoder}.weight",), VOCABULARY, tied=False),
        Entry("mlm_head/bias", (f"{decoder}.bias", bias), VOCABULARY_TWICE, tied=False),
    )
    return {"mlm": entries}


def absent_copies(table: Sequence[Entry], held: Container[str]) -> dict[str, str]:
    """Returns the first names of VOCABULARY_TWICE that a file lacks, with the second ones, which stand for them."""
    twice = [entry.names for entry in table if entry.layout is VOCABULARY_TWICE]
    return {first: second for first, second in twice if first not in held and second in held}


def export_tensors(
    table: Sequence[Entry], params: Mapping[str, np.ndarray], config: ModelConfig
) -> dict[str, np.ndarray]:
    """Converts parameters by path to tensors by bare name, as views where no value has to move."""
    tensors: dict[str, np.ndarray] = {}
    for entry in _used(table, params, config):
        param = params[entry.path]
        for layer, value in enumerate(param) if entry.path.startswith(LAYERS) else [(0, param)]:
            if layer >= entry.first_layer:
                names = [name.format(layer) for name in entry.names]
                tensors |= dict(zip(names, entry.layout.split(value, config), strict=True))
    return tensors


def import_params(
    table: Sequence[Entry], read: Callable[[str], np.ndarray], config: ModelConfig, heads: Heads
) -> dict[str, np.ndarray]:
    """Converts tensors, which `read` returns by bare name in the right shape, to parameters by path."""
    abstract = paths.flatten(abstract_params(config, heads))

    def joined(entry: Entry, layer: int = 0) -> np.ndarray:
        return entry.layout.join([read(name.format(layer)) for name in entry.names], config)

    params = {}
    for entry in _used(table, abstract, config):
        shape = abstract[entry.path].shape
        if not entry.path.startswith(LAYERS):
            params[entry.path] = np.ascontiguousarray(joined(entry))
            continue
        absent = [np.full(shape[1:], entry.absent_value, np.float32)] * entry.first_layer
        layers = [joined(entry, layer) for layer in range(entry.first_layer, shape[0])]
        params[entry.path] = np.stack(absent[: shape[0]] + layers)
    return params


def tensor_shapes(table: Sequence[Entry], config: ModelConfig, heads: Heads) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of an architecture's tensors by bare name."""
    abstract = paths.flatten(abstract_params(config, heads))
    # A broadcast scalar has the shape of a parameter without taking its memory.
    empty = {path: np.broadcast_to(np.float32(0), leaf.shape) for path, leaf in abstract.items()}
    return {name: tensor.shape for name, tensor in export_tensors(table, empty, config).items()}


def _used(table: Sequence[Entry], params: Mapping[str, object], config: ModelConfig) -> list[Entry]:
    used = [entry for entry in table if entry.path in params and entry.tied in (None, config.tied_output)]
    assert len(used) == len(params), f"the name table lacks: {set(params) - {entry.path for entry in used}}"
    return used


# Fields of config.json.

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
    read: dict[str, Any] = {}
    for model_field, name, default in fields:
        value = values.get(name, default)
        kind = int if default is None or isinstance(default, int) else (int, float)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(f"{where}: {name} is {value!r}; expected {'an integer' if kind is int else 'a number'}")
        least = 1 if default is None else 0
        if not least <= value < LARGEST:
            raise UserError(f"{where}: {name} is {value!r}; expected at least {least} and less than {LARGEST:,}")
        read[model_field] = value if kind is int else float(value)
    return read


def write_fields(model: ModelConfig, fields: tuple[Field, ...]) -> dict[str, Any]:
    """Returns the values of some fields by their name in config.json."""
    return {name: getattr(model, field) for field, name, _ in fields}


def read_activation(where: Path, values: Mapping[str, Any], name: str) -> str:
    """Returns the activation that a field selects. Raises UserError for an unknown one."""
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


# Families.

# Fields of Heads whose value is a number of outputs.
COUNTED = ("classes", "tags")
# Fields that affect training only; parameters mean the same whatever their values.
TRAINING_FIELDS = ("dropout", "attention_dropout", "initializer_range", "bptt")
# Adapters come on top of an architecture; a checkpoint is read with them merged (bert_jax/model/lora.py).
ARCHITECTURE_FIELDS = tuple(
    field.name for field in dataclasses.fields(ModelConfig) if field.name not in (*TRAINING_FIELDS, "lora")
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
        parts = [part for name in architectures for heads in self.architectures[name] for part in heads.values()]
        return {name for part in parts for entry in part for name in entry.names}

    def full_name(self, bare: str, architecture: str) -> str:
        """Returns a tensor's name in a file of the architecture."""
        return self.prefix + bare if architecture != self.base_class and bare.startswith(self.base) else bare

    def is_buffer(self, bare: str) -> bool:
        """Returns whether a tensor is one of the buffers."""
        return re.sub(r"(?<=\.)\d+(?=\.)", "{}", bare) in self.buffers


def parts_of(heads: Heads) -> set[str]:
    """Returns the names of the heads that a model has."""
    values = {field.name: getattr(heads, field.name) for field in dataclasses.fields(heads)}
    return {name for name, value in values.items() if value is True or (name in COUNTED and value)}
