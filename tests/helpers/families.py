"""A tiny architecture of each family, of odd sizes, and parameters for it, for the tests that all must pass."""

import dataclasses
from typing import Any

import jax

import bert_jax.lineage  # noqa: F401 (adds its encoders)
from bert_jax.config import ModelConfig
from bert_jax.model import layers
from bert_jax.model.bert import init_params
from bert_jax.model.heads.config import Heads

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
    "gpt": {
        "norm": "pre",
        "embedding_norm": False,
        "activation": "gelu_tanh",
        "segment_types": 0,
        "causal": True,
    },
    "rnn": RECURRENT | {"encoder": "rnn"},
    "bilstm": RECURRENT
    | {"encoder": "bilstm", "causal": False, "embedding_width": 5, "cell_width": 7, "recurrent_residual": True},
    "lstm": RECURRENT | {"encoder": "lstm", "tied_output": False, "embedding_width": 7},
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
