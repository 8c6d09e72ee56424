"""Rules over parameter paths: the one helper behind weight decay, learning rates, sharding and freezing.

A rule list is ((regex, value), ...). The first regex that matches a path (re.search on "pooler/dense/kernel") gives its
value. The layers of an encoder are stored stacked, [L, ...], under a path component `layers`, such as "encoder/layers/"
or "discriminator/encoder/layers/"; rules match any such stack. Where each layer may have a value of its own
(`per_layer`), rules see the layer's number in the path, as in "encoder/layers/3/attention/qkv/kernel", and the values
of a stack are an array [L, 1, ...].

The second part splits the parameters into those that train (Trained) and those that are frozen, also by a schedule
(Unfreezing). Only what trains at some step is differentiated and has optimizer state.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from bert_jax.errors import UserError
from bert_jax.model import layers as paths

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


def check(numbers: Mapping[str, float], key: str, params: dict[str, Any] | None = None) -> Numbers:
    """Returns the rules of a configuration's {REGEX: NUMBER}.

    Raises UserError for a negative number, a regex that does not compile or, with params, one that no parameter
    matches.
    """
    names = [name for path, value in paths.flatten(params or {}).items() for name in _names(path, value)]
    for pattern, value in numbers.items():
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise UserError(f"{key} has {pattern!r}, which is not a regular expression: {error}") from None
        if not pattern or not 0 <= value < float("inf"):
            raise UserError(
                f"{key} has {pattern!r}: {value}. Use a number of 0 or more, such as {{'^embeddings/': 0.1}}"
            )
        if params is not None and not any(compiled.search(name) for name in names):
            examples = " and ".join((names[0], next((name for name in names if stack_of(name)), names[-1])))
            raise UserError(f"no parameter matches {pattern!r} in {key}; parameters have names such as {examples}")
    return tuple(numbers.items())


def by_depth(value: Callable[[int], float], params: dict[str, Any], top: float) -> Numbers:
    """Rules by depth: value(depth) for depth 1, the last layer of a stack, to L, its first, and L + 1, its
    embeddings; `top` for everything else, heads above all.

    Embeddings outside every encoder, which several may share, are below the deepest stack.
    """
    rules: list[tuple[str, float]] = []
    sizes = stacks(params)
    for stack, layers in sizes.items():
        model = _model_of(stack)  # all layers build on its embeddings and its relative position biases
        rules.append((rf"^{model}embeddings/|^{model}encoder/relative_bias/", value(layers + 1)))
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
    # Where some layers alone are given (SomeLayers), they keep the numbers that they have in the stack.
    return numbered(path, getattr(value, "layers", range(value.shape[0]))) if stack_of(path) else [path]


def _model_of(stack: str) -> str:
    """The escaped path of the encoder and heads that a stack belongs to: empty for "encoder/layers/"."""
    return re.escape(re.sub(r"(encoder/)?layers/$", "", stack))


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


ENCODER_STACK = "encoder/layers/"
# The parts of a model that the layers of its encoder build on, or that every layer reads.
_BELOW_HEADS = ("embeddings/", "encoder/")
_ABOVE_LAYERS = ("encoder/final_norm/",)


@dataclass(frozen=True)
class Trained:
    """The part of the parameters that trains: by path, the layers of a stack in order, or None for all of a parameter.

    Parameters that are not named are frozen. The part may hold some layers of a stack: [K, ...] of [L, ...].
    """

    layers: Mapping[str, tuple[int, ...] | None]

    @classmethod
    def where(cls, trains: dict[str, Any]) -> "Trained":
        """Returns the part whose values are not zero in a tree like that of rules.per_layer, such as rate factors."""
        found: dict[str, tuple[int, ...] | None] = {}
        for path, value in paths.flatten(trains).items():
            if np.all(value):
                found[path] = None
            elif np.any(value):
                found[path] = tuple(int(layer) for layer in np.flatnonzero(np.ravel(value)))
        return cls(found)

    @classmethod
    def everything(cls, params: dict[str, Any]) -> "Trained":
        """Returns all of a tree of (abstract) parameters, as the part of a larger tree that trains."""
        return cls(dict.fromkeys(paths.flatten(params)))

    @classmethod
    def by_factors(cls, factors: dict[str, Any] | None) -> "Trained | None":
        """Returns the part whose learning-rate factors are not zero; None where that is everything."""
        if factors is None or all(np.all(factor) for factor in jax.tree.leaves(factors)):
            return None
        return cls.where(factors)

    def check(self, rates: Mapping[str, float], train_layers: str = "all") -> None:
        """Raises UserError where nothing trains, by optimizer.rates or by train_layers."""
        if self.layers:
            return
        if train_layers == "all":
            raise UserError(f"optimizer.rates is {rates!r}, which trains no parameter. Raise a rate")
        raise UserError(
            f"train_layers is {train_layers}, which trains no parameter of this model. Use all, no_embeddings or last:K"
        )

    def take(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Returns this part of a tree of parameters, or of one of rules.per_layer."""
        leaves = paths.flatten(tree)
        return paths.unflatten({path: _take(leaves[path], layers) for path, layers in self.layers.items()})

    def abstract(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Returns this part of a tree of (abstract) parameters without values; rules know the layers of its stacks."""
        leaves = paths.flatten(tree)
        return paths.unflatten({path: _abstract(leaves[path], layers) for path, layers in self.layers.items()})

    def put(self, tree: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
        """Returns the tree with this part replaced; where the tree is donated, in its memory."""
        return self._replaced(tree, part, _put)

    def join(self, tree: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
        """Returns what `put` does, as concatenations: reading a layer of the result does not copy the others."""
        return self._replaced(tree, part, _join)

    def frozen_layers(self, params: dict[str, Any]) -> int:
        """Returns how many of the lowest layers of the encoder need no backward pass: nothing in or below them trains.

        It is 0 for a model with several stacks of layers.
        """
        sizes = stacks(params)
        if list(sizes) != [ENCODER_STACK]:
            return 0
        lowest = sizes[ENCODER_STACK]
        for path, layers in self.layers.items():
            if path.startswith(_BELOW_HEADS) and not path.startswith(_ABOVE_LAYERS):
                lowest = min(lowest, layers[0] if layers and path.startswith(ENCODER_STACK) else 0)
        return lowest

    def _replaced(self, tree: dict[str, Any], part: dict[str, Any], place: Callable[..., Array]) -> dict[str, Any]:
        leaves, values = paths.flatten(tree), paths.flatten(part)
        for path, layers in self.layers.items():
            leaves[path] = values[path] if layers is None else place(leaves[path], values[path], _ranges(layers))
        return paths.unflatten(leaves)


@dataclass(frozen=True, eq=False)
class Unfreezing:
    """Gradual unfreezing: a mask of the parameters with a schedule (Howard and Ruder 2018, section 3.3).

    begins   the step from which each parameter trains, of the part that the optimizer updates, as rules.per_layer
             gives it

    Until then a parameter has a gradient of zero, which leaves its moments at zero and counts in no norm, and its
    update, weight decay included, is left out. The optimizer state has the same tensors in all steps.

    A parameter that begins at step s is updated as if the run had begun there: its moments start at zero, and Adam
    corrects their bias by the number of its own updates, not of the run's. Corrected by the run's number, they would
    count as long averages, and the first updates would be three to seven times as long (optim/directions.py). Steps
    that are skipped because they are not finite count as updates here.
    """

    begins: dict[str, Any]

    @classmethod
    def by_stages(cls, stages: dict[str, Any], every: int) -> "Unfreezing":
        """Returns the schedule by which stage K (rules.stages) begins at step K * every.

        Raises ValueError if `every` is below 1.
        """
        if every < 1:
            raise ValueError(f"the number of steps between unfrozen layers is {every}; use 1 or more")
        return cls(jax.tree.map(lambda stage: np.asarray(stage * every, np.int32), stages))

    def mask(self, tree: dict[str, Any], step: Int[Array, ""]) -> dict[str, Any]:
        """Returns gradients or updates with zeros in place of those of parameters that do not train yet."""
        # Not a product, since the gradient of a parameter that does not train may be infinite.
        return jax.tree.map(lambda leaf, begins: jnp.where(step >= begins, leaf, 0), tree, self.begins)

    def update_counts(self, step: Int[Array, ""]) -> dict[str, Int[Array, "..."]]:
        """Returns the number of updates of each parameter, by path, with that of this step, and at least 1."""
        return {path: jnp.maximum(step - begins + 1, 1) for path, begins in paths.flatten(self.begins).items()}


class SomeLayers(jax.ShapeDtypeStruct):
    """The abstract value [K, ...] of some layers of a stacked parameter, with their numbers in the stack."""

    __slots__ = ("layers",)

    def __init__(self, shape: tuple[int, ...], dtype: Any, layers: tuple[int, ...]) -> None:
        super().__init__(shape, dtype)
        self.layers = layers


def _abstract(leaf: Any, layers: tuple[int, ...] | None) -> jax.ShapeDtypeStruct:
    if layers is None:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return SomeLayers((len(layers), *leaf.shape[1:]), leaf.dtype, layers)


def _ranges(layers: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last layer, exclusive, of each run of successive layers."""
    found: list[tuple[int, int]] = []
    for layer in layers:
        if found and found[-1][1] == layer:
            found[-1] = (found[-1][0], layer + 1)
        else:
            found.append((layer, layer + 1))
    return found


def _take(leaf: Any, layers: tuple[int, ...] | None) -> Any:
    if layers is None or not np.ndim(leaf):  # a tree of rules.per_layer has one number where all layers are alike
        return leaf
    if isinstance(leaf, np.ndarray):
        return leaf[list(layers)]
    parts = [leaf[first:end] for first, end in _ranges(layers)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _put(leaf: Array, part: Array, ranges: Sequence[tuple[int, int]]) -> Array:
    taken = 0
    for first, end in ranges:
        leaf = jax.lax.dynamic_update_slice_in_dim(leaf, part[taken : taken + end - first], first, axis=0)
        taken += end - first
    return leaf


def _join(leaf: Array, part: Array, ranges: Sequence[tuple[int, int]]) -> Array:
    pieces, taken, before = [], 0, 0
    for first, end in ranges:
        pieces += [leaf[before:first], part[taken : taken + end - first]]
        taken, before = taken + end - first, end
    return jnp.concatenate([piece for piece in (*pieces, leaf[before:]) if len(piece)])
