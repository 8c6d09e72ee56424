"""Describes a model family in Hugging Face format: tensor names, classes, and the fields of config.json.

Read `Family`, at the end, first; families/*.py fill it in. Its name tables (Entry, Layout) map parameters to tensors,
and its fields (Field) map config.json to ModelConfig.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
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

# Name tables. The Hugging Face format stores each layer's tensors separately, and its token table has exactly
# vocab_size rows. bert_jax stacks the layers and pads the table with zero rows.

LAYERS = "encoder/layers/"  # parameters stacked over layers, [L, ...]


class Layout(NamedTuple):
    """Joins one layer's tensors into a parameter, and splits the parameter again."""

    join: Callable[[Sequence[np.ndarray], ModelConfig], np.ndarray]
    split: Callable[[np.ndarray, ModelConfig], Sequence[np.ndarray]]


class Entry(NamedTuple):
    """One parameter: its path and its tensors' bare names, with {} for the layer.

    Layers before `first_layer` have no such tensor; their part of the parameter is `absent_value`, and never used.
    `tied` limits the entry to models whose output is tied to the token table (True) or not (False).
    """

    path: str
    names: tuple[str, ...]
    layout: Layout
    first_layer: int = 0
    absent_value: float = 0.0
    tied: bool | None = None


Parts = dict[str, tuple[Entry, ...]]  # name tables by head


def pad_rows(table: np.ndarray, rows: int) -> np.ndarray:
    """Appends zero rows to a table."""
    return np.pad(table, [(0, rows - len(table))] + [(0, 0)] * (table.ndim - 1))


def head_shape(config: ModelConfig) -> tuple[int, int]:
    """Attention heads and their width: [N, H]."""
    return config.heads, config.width // config.heads


# Each Layout is (join, split). Parameters have the shapes that bert_jax.model computes with, [in, ...]; tensors have
# torch's, [out, in].
SAME = Layout(lambda tensors, _: tensors[0], lambda param, _: [param])
DENSE = Layout(lambda tensors, _: tensors[0].T, lambda param, _: [param.T])
VOCABULARY = Layout(
    lambda tensors, c: pad_rows(tensors[0], padded_vocabulary(c.vocab_size)), lambda param, c: [param[: c.vocab_size]]
)
# Two tensors that hold the same values: the first is read, both are written.
VOCABULARY_TWICE = Layout(VOCABULARY.join, lambda param, c: [param[: c.vocab_size]] * 2)
# Query, key and value as separate tensors: kernel [D, 3, N, H], bias [3, N, H].
_QKV_KERNEL = Layout(
    lambda tensors, c: np.stack([kernel.T.reshape(c.width, *head_shape(c)) for kernel in tensors], axis=1),
    lambda param, c: [param[:, index].reshape(c.width, c.width).T for index in range(3)],
)
_QKV_BIAS = Layout(
    lambda tensors, c: np.stack([bias.reshape(head_shape(c)) for bias in tensors]),
    lambda param, c: list(param.reshape(3, c.width)),
)
JOINED_QKV_BIAS = Layout(lambda tensors, c: tensors[0].reshape(3, *head_shape(c)), lambda param, _: [param.reshape(-1)])
ATTENTION_OUTPUT = Layout(
    lambda tensors, c: tensors[0].T.reshape(*head_shape(c), c.width),
    lambda param, c: [param.reshape(c.width, c.width).T],
)


def dense(path: str, name: str, kernel: Layout = DENSE) -> tuple[Entry, ...]:
    """The kernel and bias of a dense layer."""
    return Entry(f"{path}/kernel", (f"{name}.weight",), kernel), Entry(f"{path}/bias", (f"{name}.bias",), SAME)


def norm(path: str, name: str) -> tuple[Entry, ...]:
    """The scale and bias of a LayerNorm."""
    return Entry(f"{path}/scale", (f"{name}.weight",), SAME), Entry(f"{path}/bias", (f"{name}.bias",), SAME)


def qkv(*names: str) -> tuple[Entry, ...]:
    """Queries, keys and values that are three dense layers."""
    path = f"{LAYERS}attention/qkv"
    kernel = Entry(f"{path}/kernel", tuple(f"{name}.weight" for name in names), _QKV_KERNEL)
    return kernel, Entry(f"{path}/bias", tuple(f"{name}.bias" for name in names), _QKV_BIAS)


def attention_output(name: str, kernel: Layout = ATTENTION_OUTPUT) -> tuple[Entry, ...]:
    """The dense layer after attention."""
    return dense(f"{LAYERS}attention/output", name, kernel)


def mlm_head(transform: str, transform_norm: str, decoder: str, bias: str) -> Parts:
    """The head of a masked language model. An untied output has a second bias, in `decoder`."""
    return {
        "mlm": (
            *dense("mlm_head/transform", transform),
            *norm("mlm_head/norm", transform_norm),
            Entry("mlm_head/bias", (bias,), VOCABULARY, tied=True),
            Entry("mlm_head/output/table", (f"{decoder}.weight",), VOCABULARY, tied=False),
            Entry("mlm_head/bias", (f"{decoder}.bias", bias), VOCABULARY_TWICE, tied=False),
        )
    }


def export_tensors(
    table: Sequence[Entry], params: Mapping[str, np.ndarray], config: ModelConfig
) -> dict[str, np.ndarray]:
    """Converts parameters by path to tensors by bare name, as views unless values must move."""
    tensors: dict[str, np.ndarray] = {}
    for entry in _used_entries(table, params, config):
        param = params[entry.path]
        # Only a layer's parameters are stacked; a name without {} ignores the layer.
        for layer, value in enumerate(param) if entry.path.startswith(LAYERS) else [(0, param)]:
            if layer >= entry.first_layer:
                names = [name.format(layer) for name in entry.names]
                tensors |= dict(zip(names, entry.layout.split(value, config), strict=True))
    return tensors


def import_params(
    table: Sequence[Entry], read: Callable[[str], np.ndarray], config: ModelConfig, heads: Heads
) -> dict[str, np.ndarray]:
    """Converts tensors to parameters by path; `read` returns a tensor by bare name in the right shape."""
    # Shapes alone: parameters may be larger than memory allows twice.
    abstract = paths.flatten(abstract_params(config, heads))

    def join(entry: Entry, layer: int = 0) -> np.ndarray:
        return entry.layout.join([read(name.format(layer)) for name in entry.names], config)

    params = {}
    for entry in _used_entries(table, abstract, config):
        shape = abstract[entry.path].shape
        if not entry.path.startswith(LAYERS):
            params[entry.path] = np.ascontiguousarray(join(entry))
            continue
        absent = [np.full(shape[1:], entry.absent_value, np.float32)] * entry.first_layer
        # shape[0] is 1 if all layers share the parameter.
        layers = [join(entry, layer) for layer in range(entry.first_layer, shape[0])]
        params[entry.path] = np.stack(absent[: shape[0]] + layers)
    return params


def tensor_shapes(table: Sequence[Entry], config: ModelConfig, heads: Heads) -> dict[str, tuple[int, ...]]:
    """The model's tensor shapes by bare name."""
    abstract = paths.flatten(abstract_params(config, heads))
    # A broadcast scalar has a parameter's shape without taking its memory.
    empty = {path: np.broadcast_to(np.float32(0), leaf.shape) for path, leaf in abstract.items()}
    return {name: tensor.shape for name, tensor in export_tensors(table, empty, config).items()}


def _used_entries(table: Sequence[Entry], params: Mapping[str, object], config: ModelConfig) -> list[Entry]:
    # A table has the entries of all heads and of both kinds of output; a model uses some, but none of its parameters
    # may lack one.
    used = [entry for entry in table if entry.path in params and entry.tied in (None, config.tied_output)]
    assert len(used) == len(params), f"the name table lacks: {set(params) - {entry.path for entry in used}}"
    return used


# Fields of config.json.

# Numbers in config.json must be below: far above any model, and a product of three still fits a 64-bit size.
LARGEST = 1 << 24

# Activations by name in transformers. Export writes the first of several names.
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

# Fields with their supported values; the first is the default.
Fixed = tuple[tuple[str, tuple[Any, ...]], ...]
# Whether the output matrix is the token table; None means yes.
TIED = ("tie_word_embeddings", (True, False, None))


class Field(NamedTuple):
    """A number: its field of ModelConfig, its name in config.json, and its default (None: it is required)."""

    field: str
    name: str
    default: Any


def read_fields(file: Path, values: Mapping[str, Any], fields: tuple[Field, ...]) -> dict[str, Any]:
    """Reads numbers by their field of ModelConfig.

    Raises:
        UserError: A value is not a number or is out of range.
    """
    numbers: dict[str, Any] = {}
    for model_field, name, default in fields:
        value = values.get(name, default)
        kind = int if default is None or isinstance(default, int) else (int, float)
        # Required numbers are sizes; the others, such as rates, may be 0.
        least = 1 if default is None else 0
        expected = ""
        if not isinstance(value, kind) or isinstance(value, bool):  # bool is a subclass of int
            expected = "an integer" if kind is int else "a number"
        elif not least <= value < LARGEST:
            expected = f"at least {least} and less than {LARGEST:,}"
        if expected:
            raise UserError(f"{file}: {name} is {value!r}; expected {expected}")
        numbers[model_field] = value if kind is int else float(value)
    return numbers


def choose(file: Path, name: str, value: Any, choices: Mapping[str, Any]) -> Any:
    """Looks up the meaning of a field's value.

    Raises:
        UserError: The value is not among the choices.
    """
    if not isinstance(value, str) or value not in choices:
        raise UserError(f"{file}: {name} is {value!r}; choose from {', '.join(map(repr, choices))}")
    return choices[value]


def check_fixed(file: Path, values: Mapping[str, Any], fixed: Fixed) -> None:
    """Checks that fields have supported values.

    Raises:
        UserError: A field asks for something that bert_jax does not implement.
    """
    for name, supported in fixed:
        if (value := values.get(name, supported[0])) not in supported:
            raise UserError(f"{file}: {name} is {value!r}; only {' or '.join(map(repr, supported))} is supported")


# Families.

# Fields of Heads that are a number of outputs.
COUNTED = ("classes", "tags")
# All fields but those for training only, and the adapters, which are merged on reading (bert_jax/model/lora.py).
_NO_ARCHITECTURE = ("dropout", "attention_dropout", "initializer_range", "lora")
ARCHITECTURE_FIELDS = tuple(
    field.name for field in dataclasses.fields(ModelConfig) if field.name not in _NO_ARCHITECTURE
)


@dataclass(frozen=True)
class Family:
    """One family's Hugging Face format.

    Tensor names are bare, without the prefix that the base model has within a model with heads.
    """

    model_type: str  # as in config.json
    title: str  # the name shown to users
    prefix: str  # of the base model's tensors in a model with a head, such as "bert."
    base: tuple[str, ...]  # how the base model's bare names begin: ("embeddings.", "encoder.", "pooler.")
    base_class: str  # the base model alone, whose tensors have no prefix
    encoder: tuple[Entry, ...]  # the encoder's name table, which every class shares
    classes: Mapping[str, Parts]  # the heads that a file must hold, by class name
    fields: tuple[Field, ...]  # the numbers in config.json
    always: Mapping[str, Any]  # fields of ModelConfig that all models of the family share
    # (architecture, vocabulary) -> further fields of config.json
    write_further: Callable[[ModelConfig, Vocabulary], dict[str, Any]]
    # (path for messages, content of config.json, fields read) -> further fields of ModelConfig
    read_further: Callable[[Path, Mapping[str, Any], dict[str, Any]], dict[str, Any]] = lambda file, values, fields: {}
    # (path, content of config.json, head names) -> further fields of Heads; write_heads is the inverse
    read_heads: Callable[[Path, Mapping[str, Any], frozenset[str]], dict[str, Any]] = lambda file, values, names: {}
    write_heads: Callable[[Heads], dict[str, Any]] = lambda heads: {}
    activation: tuple[str, str] = ("hidden_act", "gelu")  # its name in config.json, and its default
    fixed: Fixed = ()
    optional: Parts = field(default_factory=dict)  # heads that any file may hold, too, as published files often do
    # whether positions begin after the vocabulary's padding id, which is in the format
    positions_after_padding: bool = False
    copies: Mapping[str, str] = field(default_factory=dict)  # tensors that a file may hold: copy -> original
    buffers: tuple[str, ...] = ()  # tensors that a file may hold and that are not read; {} stands for a layer
    unread: tuple[str, ...] = ()  # trained tensors that a file may hold; reading leaves them out and reports this
    tokenizers: tuple[str, ...] | None = None  # the family's kinds of tokenizer; None for any

    def read_model(self, file: Path, values: Mapping[str, Any]) -> ModelConfig:
        """Reads the architecture from config.json; `values` is the content of `file`.

        Raises:
            UserError: A field is wrong or not supported, or fields contradict each other.
        """
        # First, so that an unsupported architecture is named before its sizes.
        check_fixed(file, values, (TIED, *self.fixed))
        name, default = self.activation
        fields = {**self.always, **read_fields(file, values, self.fields)}
        fields["activation"] = choose(file, name, values.get(name, default), ACTIVATIONS)
        # None and an absent field mean tied, as in transformers.
        fields["tied_output"] = values.get(TIED[0]) is not False
        fields |= self.read_further(file, values, fields)
        try:
            return ModelConfig(**fields)
        except UserError as error:
            # The message names fields of ModelConfig, but users know the names in the file.
            names = {field: name for field, name, _ in self.fields}
            message = re.sub(r"model\.(\w+)", lambda match: names.get(match[1], match[0]), str(error))
            raise UserError(f"{file}: {message}") from None

    def write_model(self, model: ModelConfig, vocabulary: Vocabulary) -> dict[str, Any]:
        """Returns the fields of config.json, as close as the format allows."""
        values = {name: getattr(model, field) for field, name, _ in self.fields}
        values |= {self.activation[0]: WRITTEN_ACTIVATIONS[model.activation], TIED[0]: model.tied_output}
        return values | {"pad_token_id": vocabulary.pad_id} | self.write_further(model, vocabulary)

    def parts(self, class_name: str) -> Parts:
        """The heads that a class's file may hold."""
        return self.optional | self.classes[class_name]

    def table(self, class_name: str) -> tuple[Entry, ...]:
        """The name table of a class with all its heads."""
        return (*self.encoder, *(entry for part in self.parts(class_name).values() for entry in part))

    def full_name(self, bare: str, class_name: str) -> str:
        """A tensor's name in a file of a class."""
        # The base model alone has no prefix; in other classes, heads have none.
        return self.prefix + bare if class_name != self.base_class and bare.startswith(self.base) else bare


def head_names(heads: Heads) -> set[str]:
    """Returns the names of a model's heads."""
    values = {field.name: getattr(heads, field.name) for field in dataclasses.fields(heads)}
    return {name for name, value in values.items() if value is True or (name in COUNTED and value)}
