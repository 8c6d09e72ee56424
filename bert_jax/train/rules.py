"""Rules over parameter paths: the one helper behind weight decay, learning rates, freezing and sharding.

A rule list is ((regex, value), ...). The first regex that matches a path (re.search on "pooler/dense/kernel") gives its
value.

The layers of an encoder are stored stacked, [L, ...], under a path component `layers`, such as "encoder/layers/" or
"discriminator/encoder/layers/". Rules match any such stack, wherever it is in the tree. Where each layer may have a
value of its own (`per_layer`), rules see the layer's number in the path, as in "encoder/layers/3/attention/qkv/kernel",
and the values of a stack are an array [L, 1, ...].
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from bert_jax.command import UserError
from bert_jax.model import paths

Value = TypeVar("Value")
Numbers = tuple[tuple[str, float], ...]  # rules whose values are numbers

# "We use ... L2 weight decay of 0.01" leaves out LayerNorm and biases: google-research/bert optimization.py,
# exclude_from_weight_decay=["LayerNorm", "layer_norm", "bias"]. A mix of layers has only
# scores and a scale, and a CRF only scores, which do not decay either.
BIASES_AND_NORMS = (r"(^|/)bias$", r"norm/(scale|bias)$", r"^layer_mix/", r"^crf/")

_STACK = re.compile(r"^(?:.*?/)?layers/")


def first_match(rules: Sequence[tuple[str, Value]], path: str) -> Value:
    """The value of the first rule whose regex is found in path."""
    for pattern, value in rules:
        if re.search(pattern, path):
            return value
    raise ValueError(f"no rule matches the parameter {path}; end the rules with '.*'")


def stack_of(path: str) -> str | None:
    """The stack of layers that a parameter belongs to, such as "encoder/layers/"; None for any other parameter."""
    match = _STACK.match(path)
    return match[0] if match else None


def stacks(params: dict[str, Any]) -> dict[str, int]:
    """The stacks in params (which may be abstract), and the number of layers L of each.

    Parameters that all layers share are stored once, [1, ...], so those of which each layer has its own tell L.
    """
    found: dict[str, int] = {}
    for path, value in paths.flatten(params).items():
        if (stack := stack_of(path)) is not None:
            found[stack] = max(found.get(stack, 0), value.shape[0])
    return found


def numbered(path: str, layers: Iterable[int]) -> list[str]:
    """The path of each of these layers of a stacked parameter; the path itself for any other parameter."""
    stack = stack_of(path)
    if stack is None:
        return [path]
    return [f"{stack}{layer}/{path.removeprefix(stack)}" for layer in layers]


def per_layer(rules: Numbers, params: dict[str, Any]) -> dict[str, Any]:
    """A tree like params, of the rules' values: a float32 number, or [L, 1, ...] where the layers of a stack differ."""

    def values(path: str, value: Any) -> np.ndarray | np.float32:
        found = np.array([first_match(rules, name) for name in _names(path, value)], np.float32)
        return found[0] if (found == found[0]).all() else found.reshape(-1, *[1] * (value.ndim - 1))

    return paths.unflatten({path: values(path, value) for path, value in paths.flatten(params).items()})


def parse(text: str, key: str, params: dict[str, Any] | None = None) -> Numbers:
    """Rules from "REGEX=NUMBER;REGEX=NUMBER", the value of the configuration's `key`; none from an empty text.

    Raises UserError for another form, a negative number, a regex that does not compile or, with params, one that no
    parameter matches.
    """
    found: list[tuple[str, float]] = []
    names = [name for path, value in paths.flatten(params or {}).items() for name in _names(path, value)]
    for entry in text.split(";") if text else ():
        pattern, separator, number = entry.rpartition("=")
        try:
            value = float(number)
            compiled = re.compile(pattern)
        except (ValueError, re.error) as error:
            raise UserError(
                f"cannot read {entry!r} in {key}: {error}; write REGEX=NUMBER;REGEX=NUMBER, such as ^embeddings/=0.1"
            ) from None
        if not separator or not pattern or not 0 <= value < float("inf"):
            raise UserError(
                f"cannot read {entry!r} in {key}; write REGEX=NUMBER with a number of 0 or more, such as "
                "^embeddings/=0.1"
            )
        if params is not None and not any(compiled.search(name) for name in names):
            examples = " and ".join((names[0], next((name for name in names if stack_of(name)), names[-1])))
            raise UserError(f"no parameter matches {pattern!r} in {key}; parameters have names such as {examples}")
        found.append((pattern, value))
    return tuple(found)


def by_depth(value: Callable[[int], float], params: dict[str, Any], top: float) -> Numbers:
    """Rules by depth: value(depth) for depth 1, the last layer of a stack, to L, its first, and L + 1, its
    embeddings; `top` for everything else, heads above all.

    Embeddings outside every encoder, which several may share, are below the deepest stack.
    """
    rules: list[tuple[str, float]] = []
    sizes = stacks(params)
    for stack, layers in sizes.items():
        rules.append((_below_layers(stack), value(layers + 1)))
        rules += [(rf"^{re.escape(stack)}{layer}/", value(layers - layer)) for layer in range(layers)]
    return (*rules, (r"^embeddings/", value(max(sizes.values(), default=0) + 1)), (r".*", top))


def trainable(train_layers: str, params: dict[str, Any], fresh: frozenset[str] = frozenset()) -> dict[str, Any] | None:
    """Which parameters are trained: a tree of float32 factors 0 or 1 (as per_layer gives), None for all.

    train_layers: `all`, and `gradual` (see stages); `head` (everything but embeddings, encoder and pooler);
    `last:K` (heads, the pooler and the last K layers); `no_embeddings`. The paths in fresh are always trained.
    Raises UserError for anything else, or for K over the model's layers.
    """
    if train_layers == "all" or gradual_epochs(train_layers) is not None:
        return None
    factors = paths.flatten(per_layer(_frozen(train_layers, params), params))
    return paths.unflatten({path: np.float32(1) if path in fresh else factors[path] for path in factors})


def gradual_epochs(train_layers: str) -> float | None:
    """The epochs from one layer to the next of train_layers `gradual` (1) or `gradual:EPOCHS`; None of any other.

    Raises UserError for a number of epochs that is not positive and finite.
    """
    kind, colon, epochs = train_layers.partition(":")
    if kind != "gradual":
        return None
    try:
        found = float(epochs) if colon else 1.0
    except ValueError:
        found = 0.0
    if not 0.0 < found < float("inf"):
        raise UserError(f"train_layers is {train_layers!r}; use gradual, or gradual:EPOCHS such as gradual:0.5")
    return found


def stages(params: dict[str, Any], fresh: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The stage at which each parameter begins to be trained in gradual unfreezing (Howard and Ruder 2018, section
    3.3), as per_layer gives it.

    Stage 0 trains what `head` trains, and the fresh paths; stage K trains what `last:K` trains; the embeddings come
    last.
    """
    pooled = tuple((rf"^{_model_of(stack)}(encoder|pooler)/", 1.0) for stack in stacks(params))
    *depths, rest = by_depth(float, params, 0.0)
    found = paths.flatten(per_layer((*depths, *pooled, rest), params))
    return paths.unflatten({path: np.float32(0) if path in fresh else found[path] for path in found})


def _names(path: str, value: Any) -> list[str]:
    # Where some layers alone are given (freezing.SomeLayers), they keep the numbers that they have in the stack.
    return numbered(path, getattr(value, "layers", range(value.shape[0]))) if stack_of(path) else [path]


def _model_of(stack: str) -> str:
    """The escaped path of the encoder and heads that a stack belongs to: empty for "encoder/layers/"."""
    return re.escape(re.sub(r"(encoder/)?layers/$", "", stack))


def _below_layers(stack: str) -> str:
    """A regex of the parameters that all layers of a stack build on; its relative position biases are such."""
    model = _model_of(stack)
    return rf"^{model}embeddings/|^{model}encoder/relative_bias/"


def _frozen(train_layers: str, params: dict[str, Any]) -> Numbers:
    """Rules with the value 0 for what train_layers does not train, and 1 for the rest."""
    sizes = stacks(params)
    embeddings = (r"^embeddings/", 0.0)
    if train_layers == "head":
        rules = [(rf"^{_model_of(stack)}(embeddings|encoder|pooler)/", 0.0) for stack in sizes]
        return (*rules, embeddings, (r".*", 1.0))
    if train_layers == "no_embeddings":
        return (*((rf"^{_model_of(stack)}embeddings/", 0.0) for stack in sizes), embeddings, (r".*", 1.0))
    match = re.fullmatch(r"last:(\d+)", train_layers)
    if not match:
        raise UserError(
            f"train_layers is {train_layers!r}; use all, head, last:K, no_embeddings, gradual or gradual:EPOCHS"
        )
    layers = min(sizes.values(), default=0)
    if not 0 < (last := int(match[1])) <= layers:
        raise UserError(
            f"train_layers is {train_layers!r}, but the model has {layers} layers; use last:1 to last:{layers}"
        )
    return by_depth(lambda depth: float(depth <= last), params, 1.0)
