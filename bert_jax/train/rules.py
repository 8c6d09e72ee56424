"""Rules over parameter paths: the one helper behind weight decay, learning rates, freezing and sharding.

A rule list is ((regex, value), ...); the first regex that matches a path (re.search on "pooler/dense/kernel") gives its
value. Layers are stored stacked, [L, ...]. Where each layer may have a value of its own (`per_layer`), it is asked for
by its number, as "encoder/layers/3/attention/qkv/kernel", and the values of a stack are an array [L, 1, ...].
"""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from bert_jax.command import UserError
from bert_jax.model import paths

Value = TypeVar("Value")
Numbers = tuple[tuple[str, float], ...]  # rules whose values are numbers
STACK = "encoder/layers/"

# "We use ... L2 weight decay of 0.01" leaves out LayerNorm and biases: google-research/bert optimization.py,
# exclude_from_weight_decay=["LayerNorm", "layer_norm", "bias"].
BIASES_AND_NORMS = (r"(^|/)bias$", r"norm/(scale|bias)$")


def first_match(rules: Sequence[tuple[str, Value]], path: str) -> Value:
    """The value of the first rule whose regex is found in path."""
    for pattern, value in rules:
        if re.search(pattern, path):
            return value
    raise ValueError(f"no rule matches the parameter {path}; end the rules with '.*'")


def layers_of(params: dict[str, Any]) -> int:
    """L, the layers of the stack in params (which may be abstract); 0 where there is none."""
    return next((value.shape[0] for path, value in paths.flatten(params).items() if path.startswith(STACK)), 0)


def numbered(path: str, layers: int) -> list[str]:
    """The path of each layer of a stacked parameter; of another, its path alone."""
    if not path.startswith(STACK):
        return [path]
    return [f"{STACK}{layer}/{path.removeprefix(STACK)}" for layer in range(layers)]


def per_layer(rules: Numbers, params: dict[str, Any]) -> dict[str, Any]:
    """A tree like params, of the rules' values: a float32 number, or [L, 1, ...] where the layers of a stack differ."""
    layers = layers_of(params)

    def values(path: str, value: Any) -> np.ndarray | np.float32:
        found = np.array([first_match(rules, name) for name in numbered(path, layers)], np.float32)
        return found[0] if (found == found[0]).all() else found.reshape(-1, *[1] * (value.ndim - 1))

    return paths.unflatten({path: values(path, value) for path, value in paths.flatten(params).items()})


def parse(text: str, key: str, params: dict[str, Any]) -> Numbers:
    """Rules from "REGEX=NUMBER;REGEX=NUMBER", the form of the configuration's `key`; none from an empty text.

    Raises UserError for another form, a negative number, a regex that does not compile or that no parameter matches.
    """
    found: list[tuple[str, float]] = []
    layers = layers_of(params)
    names = [name for path in paths.flatten(params) for name in numbered(path, layers)]
    for entry in text.split(";") if text else ():
        pattern, separator, number = entry.rpartition("=")
        try:
            value = float(number)
            compiled = re.compile(pattern)
        except (ValueError, re.error) as error:
            raise UserError(
                f"{key}: {entry!r}: {error}; it is REGEX=NUMBER;REGEX=NUMBER, as ^embeddings/=0.1"
            ) from None
        if not separator or not pattern or not 0 <= value < float("inf"):
            raise UserError(f"{key}: {entry!r}; it is REGEX=NUMBER, the number 0 or more, as ^embeddings/=0.1")
        if not any(compiled.search(name) for name in names):
            examples = " and ".join((names[0], next((name for name in names if name.startswith(STACK)), names[-1])))
            raise UserError(f"{key}: no parameter matches {pattern!r}; they are named as {examples}")
        found.append((pattern, value))
    return tuple(found)


def trainable(train_layers: str, params: dict[str, Any], fresh: frozenset[str] = frozenset()) -> dict[str, Any] | None:
    """Which parameters learn: a tree of float32 factors 0 or 1 (as per_layer gives), None for all.

    train_layers: `all`, and `gradual` (see stages); `head` (what stands outside embeddings, encoder and pooler);
    `last:K` (the head, the pooler and the last K layers); `no_embeddings`. fresh are paths that learn in any case.
    Raises UserError for anything else, or for K over the model's layers.
    """
    if train_layers == "all" or gradual_epochs(train_layers) is not None:
        return None
    factors = paths.flatten(per_layer(((_frozen(train_layers, layers_of(params)), 0.0), (r".*", 1.0)), params))
    return paths.unflatten({path: np.float32(1) if path in fresh else factors[path] for path in factors})


def gradual_epochs(train_layers: str) -> float | None:
    """The epochs from one layer to the next of train_layers `gradual` (1) or `gradual:EPOCHS`; None of any other.

    Raises UserError for a number of epochs that is none.
    """
    kind, colon, epochs = train_layers.partition(":")
    if kind != "gradual":
        return None
    try:
        found = float(epochs) if colon else 1.0
    except ValueError:
        found = 0.0
    if not 0.0 < found < float("inf"):
        raise UserError(f"train_layers is {train_layers!r}; use gradual, or gradual:EPOCHS as gradual:0.5")
    return found


def stages(params: dict[str, Any], fresh: frozenset[str] = frozenset()) -> dict[str, Any]:
    """When a parameter begins to learn in gradual unfreezing (Howard and Ruder 2018, section 3.3), as per_layer gives.

    At stage 0 what `head` lets learn, and fresh paths, do; at stage K what `last:K` does; and at last the embeddings.
    """
    layers = layers_of(params)
    by_layer = tuple((rf"^{STACK}{layer}/", float(layers - layer)) for layer in range(layers))
    bottom = (r"^embeddings/|^encoder/relative_bias/", layers + 1.0)
    found = paths.flatten(per_layer((bottom, *by_layer, (r"^(encoder|pooler)/", 1.0), (r".*", 0.0)), params))
    return paths.unflatten({path: np.float32(0) if path in fresh else found[path] for path in found})


def _frozen(train_layers: str, layers: int) -> str:
    """A regex of what train_layers leaves as it is."""
    if train_layers == "head":
        return r"^(embeddings|encoder|pooler)/"
    if train_layers == "no_embeddings":
        return r"^embeddings/"
    match = re.fullmatch(r"last:(\d+)", train_layers)
    if not match:
        raise UserError(
            f"train_layers is {train_layers!r}; use all, head, last:K, no_embeddings, gradual or gradual:EPOCHS"
        )
    if not 0 < (last := int(match[1])) <= layers:
        raise UserError(
            f"train_layers is {train_layers!r}, but the model has {layers} layers; use last:1 to last:{layers}"
        )
    first = "|".join(f"layers/{layer}" for layer in range(layers - last))
    below = f"|^encoder/({first})/" if first else ""
    return rf"^embeddings/|^encoder/relative_bias/{below}"  # relative biases serve all layers
