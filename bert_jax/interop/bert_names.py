"""The name table of BERT: where each parameter lies in the Hugging Face layout (modeling_bert.py of transformers).

Theirs keeps each layer's tensors apart, dense kernels as [out, in], query, key and value apart, and a token table
of exactly vocab_size rows. Ours stacks the layers, keeps [in, out], fuses the three, and pads the table with zeros.
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
    path: str
    names: tuple[str, ...]  # {} stands for the layer; the encoder's without the "bert." of a model with a head
    layout: Layout


def _pad(table: np.ndarray, config: ModelConfig) -> np.ndarray:
    missing = padded_vocabulary(config.vocab_size) - len(table)
    return np.pad(table, [(0, missing)] + [(0, 0)] * (table.ndim - 1))


def _head_shape(config: ModelConfig) -> tuple[int, int]:
    return config.heads, config.width // config.heads


def _fuse_kernels(kernels: Sequence[np.ndarray], config: ModelConfig) -> np.ndarray:
    return np.stack([kernel.T.reshape(config.width, *_head_shape(config)) for kernel in kernels], axis=1)


def _part_kernels(fused: np.ndarray, config: ModelConfig) -> list[np.ndarray]:
    return [fused[:, which].reshape(config.width, config.width).T for which in range(3)]


SAME = Layout(lambda tensors, _: tensors[0], lambda ours, _: [ours])
DENSE = Layout(lambda tensors, _: tensors[0].T, lambda ours, _: [ours.T])
VOCABULARY = Layout(lambda tensors, c: _pad(tensors[0], c), lambda ours, c: [ours[: c.vocab_size]])
QKV_KERNEL = Layout(_fuse_kernels, _part_kernels)
QKV_BIAS = Layout(
    lambda tensors, c: np.stack([bias.reshape(_head_shape(c)) for bias in tensors]),
    lambda ours, c: list(ours.reshape(3, c.width)),
)
ATTENTION_OUTPUT = Layout(
    lambda tensors, c: tensors[0].T.reshape(*_head_shape(c), c.width),
    lambda ours, c: [ours.reshape(c.width, c.width).T],
)


def _dense(path: str, name: str, kernel: Layout = DENSE) -> list[Entry]:
    return [Entry(f"{path}/kernel", (f"{name}.weight",), kernel), Entry(f"{path}/bias", (f"{name}.bias",), SAME)]


def _norm(path: str, name: str) -> list[Entry]:
    return [Entry(f"{path}/scale", (f"{name}.weight",), SAME), Entry(f"{path}/bias", (f"{name}.bias",), SAME)]


def _qkv(kind: str) -> tuple[str, ...]:
    return tuple(f"encoder.layer.{{}}.attention.self.{which}.{kind}" for which in ("query", "key", "value"))


TABLE: tuple[Entry, ...] = (
    Entry("embeddings/token/table", ("embeddings.word_embeddings.weight",), VOCABULARY),
    Entry("embeddings/position/table", ("embeddings.position_embeddings.weight",), SAME),
    Entry("embeddings/segment/table", ("embeddings.token_type_embeddings.weight",), SAME),
    *_norm("embeddings/norm", "embeddings.LayerNorm"),
    Entry(f"{LAYERS}attention/qkv/kernel", _qkv("weight"), QKV_KERNEL),
    Entry(f"{LAYERS}attention/qkv/bias", _qkv("bias"), QKV_BIAS),
    *_dense(f"{LAYERS}attention/output", "encoder.layer.{}.attention.output.dense", ATTENTION_OUTPUT),
    *_norm(f"{LAYERS}attention_norm", "encoder.layer.{}.attention.output.LayerNorm"),
    *_dense(f"{LAYERS}feed_forward/input", "encoder.layer.{}.intermediate.dense"),
    *_dense(f"{LAYERS}feed_forward/output", "encoder.layer.{}.output.dense"),
    *_norm(f"{LAYERS}feed_forward_norm", "encoder.layer.{}.output.LayerNorm"),
    *_dense("pooler/dense", "pooler.dense"),
    *_dense("mlm_head/transform", "cls.predictions.transform.dense"),
    *_norm("mlm_head/norm", "cls.predictions.transform.LayerNorm"),
    Entry("mlm_head/bias", ("cls.predictions.bias",), VOCABULARY),
    *_dense("next_sentence_head/dense", "cls.seq_relationship"),
    *_dense("classifier/dense", "classifier"),
    *_dense("tagger/dense", "classifier"),  # the architecture says which of the two a `classifier` is
)


def to_theirs(params: Mapping[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """Their tensors by name, of parameters by path; views where nothing has to move."""
    tensors: dict[str, np.ndarray] = {}
    for entry in _entries(params):
        ours = params[entry.path]
        for layer, one in enumerate(ours) if entry.path.startswith(LAYERS) else [(0, ours)]:
            names = [name.format(layer) for name in entry.names]
            tensors |= dict(zip(names, entry.layout.part(one, config), strict=True))
    return tensors


def from_theirs(read: Callable[[str], np.ndarray], config: ModelConfig, heads: Heads) -> dict[str, np.ndarray]:
    """Parameters by path, of their tensors, which `read` gives by name in the right shape."""
    params = {}
    for entry in _entries(paths.flatten(abstract_params(config, heads))):
        stacked = entry.path.startswith(LAYERS)
        layers = [
            entry.layout.join([read(name.format(layer)) for name in entry.names], config)
            for layer in range(config.layers if stacked else 1)
        ]
        params[entry.path] = np.stack(layers) if stacked else np.ascontiguousarray(layers[0])
    return params


def shapes_of_theirs(config: ModelConfig, heads: Heads) -> dict[str, tuple[int, ...]]:
    """The names and shapes of their tensors for an architecture."""
    abstract = paths.flatten(abstract_params(config, heads))
    empty = {path: np.broadcast_to(np.float32(0), leaf.shape) for path, leaf in abstract.items()}
    return {name: tensor.shape for name, tensor in to_theirs(empty, config).items()}


def _entries(params: Mapping[str, object]) -> list[Entry]:
    found = [entry for entry in TABLE if entry.path in params]
    assert len(found) == len(params), f"not in the name table: {set(params) - {entry.path for entry in found}}"
    return found
