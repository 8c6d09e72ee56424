"""A tiny architecture of each family, of odd sizes, with parameters, batches and losses for tests of all of them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tiny_batches import lay, random_sequence

from bert_jax.config import ModelConfig
from bert_jax.data.example import Batch
from bert_jax.lineage import LSTM, RNN, BiLSTM
from bert_jax.model import layers
from bert_jax.model.bert import bind, init_params
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import masked_logits, next_sentence_logits, pool_vectors, tag_logits
from bert_jax.model.runtime import Runtime
from bert_jax.model.transformer import gather_positions

BERT = ModelConfig(
    vocab_size=61,
    layers=3,
    width=12,
    heads=3,
    feed_forward=20,
    max_positions=32,
    dropout=0.0,
    attention_dropout=0.0,
    initializer_range=0.3,
)
MODERN: dict[str, Any] = {
    "norm": "pre_but_first",
    "bias": False,
    "gated": True,
    "positions": "rotary",
    "rotary_base": 160.0,
    "rotary_base_local": 10.0,
    "window": 2,
    "global_every": 2,
    "segment_types": 0,
    "pooler": "transform",
}
RECURRENT: dict[str, Any] = {"positions": "none", "segment_types": 0, "embedding_norm": False, "causal": True}
CHANGES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"segment_types": 1, "position_offset": 2},
    "pre_norm": {"norm": "pre", "activation": "gelu_tanh", "tied_output": False},
    "original": {"positions": "sinusoidal", "activation": "relu", "segment_types": 0, "embedding_norm": False},
    "shaw": {"positions": "none", "relative": "shaw", "relative_distance": 3},
    "buckets": {"relative": "buckets", "relative_distance": 12, "activation": "gelu_sigmoid"},
    "modernbert": MODERN,
    "albert": {"embedding_width": 7, "shared_layers": "all", "activation": "gelu_tanh"},
    "shared_attention": {"shared_layers": "attention", "norm": "pre", "embedding_width": 12},
    "gpt": {"norm": "pre", "embedding_norm": False, "activation": "gelu_tanh", "segment_types": 0, "causal": True},
    "rnn": RECURRENT | {"encoder": RNN()},
    "bilstm": RECURRENT | {"encoder": BiLSTM(cell_width=7, residual=True), "causal": False, "embedding_width": 5},
    "lstm": RECURRENT | {"encoder": LSTM(), "tied_output": False, "embedding_width": 7},
}
FAMILIES = {name: dataclasses.replace(BERT, **changes) for name, changes in CHANGES.items()}


def random_params(config: ModelConfig, heads: Heads) -> dict[str, Any]:
    """Parameters with every bias and scale off its initial value, so that none can be forgotten unseen."""
    flat = layers.flatten(init_params(config, heads, jax.random.key(0)))
    for index, (path, value) in enumerate(flat.items()):
        if path.endswith(("bias", "scale")):
            noise = 0.2 * jax.random.normal(jax.random.key(index), value.shape)
            flat[path] = value + (noise.at[config.vocab_size :].set(0) if path == "mlm_head/bias" else noise)
    return layers.unflatten(flat)


SEQUENCES = [random_sequence(length, 61, seed) for seed, length in enumerate((9, 6, 8, 3))]
PACKED = jax.tree.map(jnp.asarray, lay([SEQUENCES[:3], SEQUENCES[3:]], slots=25, predictions=6))
SEPARATE = jax.tree.map(jnp.asarray, lay([[sequence] for sequence in SEQUENCES], slots=11, predictions=2))
WAYS = {
    "scan": Runtime(layer_loop="scan"),
    "unrolled": Runtime(layer_loop="unrolled"),
    "scan, layers again": Runtime(layer_loop="scan", remat="layer"),
    "unrolled, layers again": Runtime(layer_loop="unrolled", remat="layer"),
    "scan, products kept": Runtime(layer_loop="scan", remat="matmuls"),
    "unrolled, attention again": Runtime(layer_loop="unrolled", remat="attention"),
}


def heads_of(config: ModelConfig) -> Heads:
    language_model = config.causal or config.directions > 1
    return Heads(mlm=not language_model, lm=language_model, pooler=True, next_sentence=True, tags=4)


@functools.cache
def params_of(family: str):
    return random_params(FAMILIES[family], heads_of(FAMILIES[family]))


def losses(config: ModelConfig, runtime: Runtime, params, batch: Batch) -> jax.Array:
    """Sums over the batch that every parameter has a part in."""
    model = bind(config, heads_of(config), params, runtime)
    hidden = model.encode(batch).last
    # Each direction predicts by itself.
    parts = jnp.split(hidden, config.directions, axis=-1)
    logits = jnp.stack([masked_logits(model, part, batch.masked_positions) for part in parts])
    ids = jnp.stack([batch.masked_ids] * config.directions)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], axis=-1)[..., 0].sum(axis=0)
    pooled = pool_vectors(model, gather_positions(hidden, batch.cls_positions))
    next_sentence = jnp.sin(next_sentence_logits(model, pooled)) * batch.next_sentence_weight[..., None]
    tags = jnp.cos(tag_logits(model, hidden)) * (batch.sequence_ids > 0)[..., None]
    return jnp.stack([-(picked * batch.masked_weights).sum(), next_sentence.sum(), tags.sum()])


@functools.cache
def losses_and_gradients(family: str, way: str, packed: bool):
    def total(params, batch):
        parts = losses(FAMILIES[family], WAYS[way], params, batch)
        return parts.sum(), parts

    batch = PACKED if packed else SEPARATE
    gradients, parts = jax.jit(jax.grad(total, has_aux=True))(params_of(family), batch)
    return parts, layers.flatten(gradients)


def assert_same(got, wanted) -> None:
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5, atol=1e-5)
    assert got[1].keys() == wanted[1].keys()
    for path, gradient in wanted[1].items():
        np.testing.assert_allclose(got[1][path], gradient, rtol=1e-4, atol=2e-5, err_msg=path)
