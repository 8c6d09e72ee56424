"""Name tables: where each parameter lies in a family's Hugging Face layout, and the ways in and out by one.

Theirs keeps each layer's tensors apart and has a token table of exactly vocab_size rows. Ours stacks the layers, and
pads the table with zeros. How one parameter is made of their tensors is its Layout; most are shared by the families.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.model import paths
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads import Heads
from bert_jax.shapes import padded_vocabulary

LAYERS = "encoder/layers/"  # what is stacked, [L, ...]


class Layout(NamedTuple):
    """How one parameter is made of their tensors (one layer's), and taken apart again."""

    join: Callable[[Sequence[np.ndarray], ModelConfig], np.ndarray]
    part: Callable[[np.ndarray, ModelConfig], Sequence[np.ndarray]]


class Entry(NamedTuple):
    """One parameter: its path, and the names that a base model has for it, {} standing for the layer.

    Layers before `first_layer` have no such tensor; there the parameter, which then nothing reads, is `without`.
    `tied` says that only a model whose output is (or is not) tied to the token table has this entry.
    """

    path: str
    names: tuple[str, ...]
    layout: Layout
    first_layer: int = 0
    without: float = 0.0
    tied: bool | None = None


def _pad(table: np.ndarray, config: ModelConfig) -> np.ndarray:
    missing = padded_vocabulary(config.vocab_size) - len(table)
    return np.pad(table, [(0, missing)] + [(0, 0)] * (table.ndim - 1))


def head_shape(config: ModelConfig) -> tuple[int, int]:
    """Heads and the width of one."""
    return config.heads, config.width // config.heads


def _fuse_kernels(kernels: Sequence[np.ndarray], config: ModelConfig) -> np.ndarray:
    return np.stack([kernel.T.reshape(config.width, *head_shape(config)) for kernel in kernels], axis=1)


def _part_kernels(fused: np.ndarray, config: ModelConfig) -> list[np.ndarray]:
    return [fused[:, which].reshape(config.width, config.width).T for which in range(3)]


SAME = Layout(lambda tensors, _: tensors[0], lambda ours, _: [ours])
# A dense kernel is [out, in] in torch.
DENSE = Layout(lambda tensors, _: tensors[0].T, lambda ours, _: [ours.T])
VOCABULARY = Layout(lambda tensors, c: _pad(tensors[0], c), lambda ours, c: [ours[: c.vocab_size]])
# Read from the first; the second is written, and nothing reads it.
VOCABULARY_TWICE = Layout(VOCABULARY.join, lambda ours, c: [ours[: c.vocab_size]] * 2)
# Query, key and value, each apart.
QKV_KERNEL = Layout(_fuse_kernels, _part_kernels)
QKV_BIAS = Layout(
    lambda tensors, c: np.stack([bias.reshape(head_shape(c)) for bias in tensors]),
    lambda ours, c: list(ours.reshape(3, c.width)),
)
ATTENTION_OUTPUT = Layout(
    lambda tensors, c: tensors[0].T.reshape(*head_shape(c), c.width),
    lambda ours, c: [ours.reshape(c.width, c.width).T],
)


def dense(path: str, name: str, kernel: Layout = DENSE) -> tuple[Entry, ...]:
    """A dense layer's kernel and bias."""
    return Entry(f"{path}/kernel", (f"{name}.weight",), kernel), Entry(f"{path}/bias", (f"{name}.bias",), SAME)


def norm(path: str, name: str) -> tuple[Entry, ...]:
    """A LayerNorm's scale and bias."""
    return Entry(f"{path}/scale", (f"{name}.weight",), SAME), Entry(f"{path}/bias", (f"{name}.bias",), SAME)


def output_entries(path: str, decoder: str, bias: str) -> tuple[Entry, ...]:
    """The output of a masked language model of transformers: an untied one has a bias of its own in its `decoder`."""
    return (
        Entry(f"{path}/bias", (bias,), VOCABULARY, tied=True),
        Entry(f"{path}/output/table", (f"{decoder}.weight",), VOCABULARY, tied=False),
        Entry(f"{path}/bias", (f"{decoder}.bias", bias), VOCABULARY_TWICE, tied=False),
    )


def to_theirs(table: Sequence[Entry], params: Mapping[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """Their tensors by name, of parameters by path; views where nothing has to move."""
    tensors: dict[str, np.ndarray] = {}
    for entry in _used(table, params, config):
        ours = params[entry.path]
        for layer, one in enumerate(ours) if entry.path.startswith(LAYERS) else [(0, ours)]:
            if layer >= entry.first_layer:
                names = [name.format(layer) for name in entry.names]
                tensors |= dict(zip(names, entry.layout.part(one, config), strict=True))
    return tensors


def from_theirs(
    table: Sequence[Entry], read: Callable[[str], np.ndarray], config: ModelConfig, heads: Heads
) -> dict[str, np.ndarray]:
    """Parameters by path, of their tensors, which `read` gives by name in the right shape."""
    abstract = paths.flatten(abstract_params(config, heads))
    params = {}
    for entry in _used(table, abstract, config):
        shape = abstract[entry.path].shape
        if not entry.path.startswith(LAYERS):
            params[entry.path] = np.ascontiguousarray(_read(entry, 0, read, config))
            continue
        without = [np.full(shape[1:], entry.without, np.float32)] * entry.first_layer
        layers = [_read(entry, layer, read, config) for layer in range(entry.first_layer, config.layers)]
        params[entry.path] = np.stack(without[: config.layers] + layers)
    return params


def shapes_of_theirs(table: Sequence[Entry], config: ModelConfig, heads: Heads) -> dict[str, tuple[int, ...]]:
    """The names and shapes of their tensors for an architecture."""
    abstract = paths.flatten(abstract_params(config, heads))
    empty = {path: np.broadcast_to(np.float32(0), leaf.shape) for path, leaf in abstract.items()}
    return {name: tensor.shape for name, tensor in to_theirs(table, empty, config).items()}


def _read(entry: Entry, layer: int, read: Callable[[str], np.ndarray], config: ModelConfig) -> np.ndarray:
    return entry.layout.join([read(name.format(layer)) for name in entry.names], config)


def _used(table: Sequence[Entry], params: Mapping[str, object], config: ModelConfig) -> list[Entry]:
    found = [entry for entry in table if entry.path in params and entry.tied in (None, config.tied_output)]
    assert len(found) == len(params), f"not in the name table: {set(params) - {entry.path for entry in found}}"
    return found
