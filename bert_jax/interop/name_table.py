"""Name tables: which tensors of a family's Hugging Face format make up each parameter, and conversion by them.

The Hugging Face format stores each layer's tensors separately and has a token table of exactly
vocab_size rows. bert_jax stacks the layers and pads the table with zero rows. A Layout converts
between the two forms of one parameter; most layouts are shared by the families.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.model import paths
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads import Heads
from bert_jax.shapes import padded_vocabulary

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


def _fuse_kernels(kernels: Sequence[np.ndarray], config: ModelConfig) -> np.ndarray:
    return np.stack([kernel.T.reshape(config.width, *head_shape(config)) for kernel in kernels], axis=1)


def _split_kernels(fused: np.ndarray, config: ModelConfig) -> list[np.ndarray]:
    return [fused[:, which].reshape(config.width, config.width).T for which in range(3)]


SAME = Layout(lambda tensors, _: tensors[0], lambda param, _: [param])
# A dense kernel is [out, in] in torch and [in, out] here.
DENSE = Layout(lambda tensors, _: tensors[0].T, lambda param, _: [param.T])
VOCABULARY = Layout(lambda tensors, c: _pad(tensors[0], c), lambda param, c: [param[: c.vocab_size]])
# Two tensors that hold the same values: the first is read, both are written.
VOCABULARY_TWICE = Layout(VOCABULARY.join, lambda param, c: [param[: c.vocab_size]] * 2)
# Query, key and value as separate tensors.
QKV_KERNEL = Layout(_fuse_kernels, _split_kernels)
QKV_BIAS = Layout(
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


def output_entries(path: str, decoder: str, bias: str) -> tuple[Entry, ...]:
    """Returns the entries of a masked language model's output; an untied output has its own bias in `decoder`.

    transformers 4 ties both biases even there, and its files may hold `bias` alone (absent_copies).
    """
    return (
        Entry(f"{path}/bias", (bias,), VOCABULARY, tied=True),
        Entry(f"{path}/output/table", (f"{decoder}.weight",), VOCABULARY, tied=False),
        Entry(f"{path}/bias", (f"{decoder}.bias", bias), VOCABULARY_TWICE, tied=False),
    )


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
        for layer, one in enumerate(param) if entry.path.startswith(LAYERS) else [(0, param)]:
            if layer >= entry.first_layer:
                names = [name.format(layer) for name in entry.names]
                tensors |= dict(zip(names, entry.layout.split(one, config), strict=True))
    return tensors


def import_params(
    table: Sequence[Entry], read: Callable[[str], np.ndarray], config: ModelConfig, heads: Heads
) -> dict[str, np.ndarray]:
    """Converts tensors, which `read` returns by bare name in the right shape, to parameters by path."""
    abstract = paths.flatten(abstract_params(config, heads))
    params = {}
    for entry in _used(table, abstract, config):
        shape = abstract[entry.path].shape
        if not entry.path.startswith(LAYERS):
            params[entry.path] = np.ascontiguousarray(_read(entry, 0, read, config))
            continue
        absent = [np.full(shape[1:], entry.absent_value, np.float32)] * entry.first_layer
        layers = [_read(entry, layer, read, config) for layer in range(entry.first_layer, shape[0])]
        params[entry.path] = np.stack(absent[: shape[0]] + layers)
    return params


def tensor_shapes(table: Sequence[Entry], config: ModelConfig, heads: Heads) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of an architecture's tensors by bare name."""
    abstract = paths.flatten(abstract_params(config, heads))
    # A broadcast scalar has the shape of a parameter without taking its memory.
    empty = {path: np.broadcast_to(np.float32(0), leaf.shape) for path, leaf in abstract.items()}
    return {name: tensor.shape for name, tensor in export_tensors(table, empty, config).items()}


def _read(entry: Entry, layer: int, read: Callable[[str], np.ndarray], config: ModelConfig) -> np.ndarray:
    return entry.layout.join([read(name.format(layer)) for name in entry.names], config)


def _used(table: Sequence[Entry], params: Mapping[str, object], config: ModelConfig) -> list[Entry]:
    found = [entry for entry in table if entry.path in params and entry.tied in (None, config.tied_output)]
    assert len(found) == len(params), f"the name table lacks: {set(params) - {entry.path for entry in found}}"
    return found
