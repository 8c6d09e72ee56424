"""Rules over parameter paths: the one helper behind weight decay, freezing and sharding.

A rule list is ((regex, value), ...); the first regex that matches a path (re.search on "encoder/layers/attention/
qkv/kernel") gives its value. Layers are stored stacked, [L, ...], so a per-layer value is an array [L, 1, ...].
"""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from bert_jax.command import UserError
from bert_jax.model import paths

Value = TypeVar("Value")
STACKED = re.compile(r"^encoder/layers/")

# "We use ... L2 weight decay of 0.01" leaves out LayerNorm and biases: google-research/bert optimization.py,
# exclude_from_weight_decay=["LayerNorm", "layer_norm", "bias"].
WEIGHT_DECAY_RULES: tuple[tuple[str, bool], ...] = (
    (r"(^|/)bias$", False),
    (r"norm/(scale|bias)$", False),
    (r".*", True),
)


def first_match(rules: Sequence[tuple[str, Value]], path: str) -> Value:
    """The value of the first rule whose regex is found in path."""
    for pattern, value in rules:
        if re.search(pattern, path):
            return value
    raise ValueError(f"no rule matches the parameter {path}; end the rules with '.*'")


def tree_of(rules: Sequence[tuple[str, Value]], params: dict[str, Any]) -> dict[str, Any]:
    """A tree like params, of the rules' values."""
    return paths.unflatten({path: first_match(rules, path) for path in paths.flatten(params)})


def trainable(train_layers: str, params: dict[str, Any], fresh: frozenset[str] = frozenset()) -> dict[str, Any] | None:
    """Which parameters learn: a tree of float32 factors 0 or 1 ([L, 1, ...] on stacked layers), None for all.

    train_layers: `all`; `head` (what stands outside embeddings, encoder and pooler); `last:K` (the head, the pooler
    and the last K layers); `no_embeddings`. fresh are paths that learn in any case. Raises UserError for anything
    else, or for K over the model's layers.
    """
    if train_layers == "all":
        return None
    flat = paths.flatten(params)
    layers = next(value.shape[0] for path, value in flat.items() if STACKED.search(path))
    if train_layers in ("head", "no_embeddings"):
        frozen = r"^(embeddings|encoder|pooler)/" if train_layers == "head" else r"^embeddings/"
        return paths.unflatten({path: np.float32(path in fresh or not re.search(frozen, path)) for path in flat})
    match = re.fullmatch(r"last:(\d+)", train_layers)
    if not match:
        raise UserError(f"train_layers is {train_layers!r}; use all, head, last:K or no_embeddings")
    if not 0 < (last := int(match[1])) <= layers:
        raise UserError(
            f"train_layers is {train_layers!r}, but the model has {layers} layers; use last:1 to last:{layers}"
        )
    learns = np.arange(layers) >= layers - last

    def factor(path: str, value: Any) -> np.ndarray | np.float32:
        if path in fresh:
            return np.float32(1)
        if STACKED.search(path):
            return learns.astype(np.float32).reshape(layers, *[1] * (value.ndim - 1))
        return np.float32(not path.startswith(("embeddings/", "encoder/relative_bias/")))  # that serves all layers

    return paths.unflatten({path: factor(path, value) for path, value in flat.items()})
