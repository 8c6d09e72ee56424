"""Rules over parameter paths: the one helper behind weight decay, learning rates, sharding and freezing.

A rule list is ((regex, value), ...). The first regex that matches a path (re.search on "pooler/dense/kernel") gives its
value. The layers of an encoder are stored stacked, [L, ...], under a path component `layers`, such as "encoder/layers/"
or "discriminator/encoder/layers/"; rules match any such stack. If layers may have values of their own (`per_layer`),
rules see the layer's number in the path, as in "encoder/layers/3/attention/qkv/kernel", and a stack's values are an
array [L, 1, ...].

The second part splits the parameters into a trained part (Trained) and frozen ones, also by a schedule
(Unfreezing). Only parameters that train at some step are differentiated and have optimizer state.
"""

import re
from collections.abc import Callable, Mapping, Sequence
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

# "We use ... L2 weight decay of 0.01" excludes LayerNorm and biases: google-research/bert optimization.py,
# exclude_from_weight_decay=["LayerNorm", "layer_norm", "bias"]. The scores and the scale of a layer mix, and a CRF's
# scores, do not decay either.
BIASES_AND_NORMS = (r"(^|/)bias$", r"norm/(scale|bias)$", r"^layer_mix/", r"^crf/")

_STACK = re.compile(r"^(?:.*?/)?layers/")


def first_match(rules: Sequence[tuple[str, Value]], path: str) -> Value:
    """Returns the value of the first rule whose regex is found in the path."""
    for pattern, value in rules:
        if re.search(pattern, path):
            return value
    raise ValueError(f"no rule matches the parameter {path}; end the rules with '.*'")


def stack_path(path: str) -> str | None:
    """Returns a parameter's stack of layers, such as "encoder/layers/"; None if there is none."""
    match = _STACK.match(path)
    return match[0] if match else None


def stacks(params: dict[str, Any]) -> dict[str, int]:
    """Returns the number of layers L by stack; params may be abstract.

    Shared parameters are stored once, [1, ...], so a stack's longest parameters tell L.
    """
    sizes: dict[str, int] = {}
    for path, value in paths.flatten(params).items():
        if (stack := stack_path(path)) is not None:
            sizes[stack] = max(sizes.get(stack, 0), value.shape[0])
    return sizes


def per_layer(rules: Numbers, params: dict[str, Any]) -> dict[str, Any]:
    """Maps parameters to the rules' values: a float32 number, or [L, 1, ...] if the layers of a stack differ."""

    def values(path: str, leaf: Any) -> np.ndarray | np.float32:
        # [L, 1, ...] broadcasts against the stack [L, ...] in any product with it. Equal values stay a single number,
        # which costs no array in the program.
        by_layer = np.array([first_match(rules, name) for name in _names(path, leaf)], np.float32)
        return by_layer[0] if (by_layer == by_layer[0]).all() else by_layer.reshape(-1, *[1] * (leaf.ndim - 1))

    return paths.unflatten({path: values(path, leaf) for path, leaf in paths.flatten(params).items()})


def _names(path: str, value: Any) -> list[str]:
    """Returns the paths seen by rules: one per layer for a stacked parameter."""
    if (stack := stack_path(path)) is None:
        return [path]
    # If only some layers are given (SomeLayers), they keep their numbers in the stack.
    layers = getattr(value, "layers", range(value.shape[0]))
    return [f"{stack}{layer}/{path.removeprefix(stack)}" for layer in layers]


def check(numbers: Mapping[str, float], key: str, params: dict[str, Any] | None = None) -> Numbers:
    """Returns the rules of a configuration's {REGEX: NUMBER}.

    Raises:
        UserError: a number is negative, or a regex does not compile or, with params, matches no parameter.
    """
    # One name per layer, as rules see them: a regex may be for a single layer.
    names = [name for path, value in paths.flatten(params or {}).items() for name in _names(path, value)]
    for pattern, value in numbers.items():
        problem = ""
        try:
            compiled = re.compile(pattern)
            if not pattern or not 0 <= value < float("inf"):
                problem = f"{key} has {pattern!r}: {value}. Use a number of 0 or more, such as {{'^embeddings/': 0.1}}"
            elif params is not None and not any(map(compiled.search, names)):
                examples = " and ".join((names[0], next((name for name in names if stack_path(name)), names[-1])))
                problem = f"no parameter matches {pattern!r} in {key}; parameters have names such as {examples}"
        except re.error as error:
            problem = f"{key} has {pattern!r}, which is not a regular expression: {error}"
        if problem:
            raise UserError(problem)
    return tuple(numbers.items())


def by_depth(value: Callable[[int], float], params: dict[str, Any], top: float) -> Numbers:
    """Makes rules by depth: value(1) for a stack's last layer, value(L) for its first, value(L + 1) for its embeddings.

    All other parameters, above all heads, get `top`.
    """
    rules: list[tuple[str, float]] = []
    sizes = stacks(params)
    # The first match counts, so the embeddings outside of encoders and `top` come last. Several encoders may share such
    # embeddings, which are therefore below the deepest stack.
    for stack, layers in sizes.items():
        model = _model_path(stack)  # all layers build on its embeddings and its relative position biases
        rules.append((rf"^{model}embeddings/|^{model}encoder/relative_bias/", value(layers + 1)))
        rules += [(rf"^{re.escape(stack)}{layer}/", value(layers - layer)) for layer in range(layers)]
    return (*rules, (r"^embeddings/", value(max(sizes.values(), default=0) + 1)), (r".*", top))


def trainable(train_layers: str, params: dict[str, Any], fresh: frozenset[str] = frozenset()) -> dict[str, Any] | None:
    """Returns which parameters train: a tree of float32 factors 0 or 1 (as from per_layer), None for all.

    Args:
        train_layers: `all`, and `gradual` (see stages); `head` (everything but embeddings, encoder and pooler);
            `last:K` (heads, the pooler and the last K layers); `no_embeddings`.
        fresh: paths that always train.

    Raises:
        UserError: another value, or K above the model's number of layers.
    """
    if train_layers == "all" or gradual_epochs(train_layers) is not None:
        return None
    sizes = stacks(params)
    # last:K must name layers that every stack has.
    layers = min(sizes.values(), default=0)
    match = re.fullmatch(r"last:(\d+)", train_layers)
    frozen = {"head": "(embeddings|encoder|pooler)/", "no_embeddings": "embeddings/"}.get(train_layers)
    last = int(match[1]) if match else 0
    if frozen is not None:
        off = [(rf"^{_model_path(stack)}{frozen}", 0.0) for stack in sizes]
        rules: Numbers = (*off, (r"^embeddings/", 0.0), (r".*", 1.0))
    elif 0 < last <= layers:
        rules = by_depth(lambda depth: float(depth <= last), params, 1.0)
    else:
        usual = "; use all, head, last:K, no_embeddings, gradual or gradual:EPOCHS"
        advice = f", but the model has {layers} layers; use last:1 to last:{layers}" if match else usual
        raise UserError(f"train_layers is {train_layers!r}{advice}")
    factors = paths.flatten(per_layer(rules, params))
    return paths.unflatten({path: np.float32(1) if path in fresh else factors[path] for path in factors})


def gradual_epochs(train_layers: str) -> float | None:
    """Returns the epochs between layers for `gradual` (1) or `gradual:EPOCHS`; None for other values of train_layers.

    Raises:
        UserError: the number of epochs is not positive and finite.
    """
    kind, colon, text = train_layers.partition(":")
    if kind != "gradual":
        return None
    try:
        epochs = float(text) if colon else 1.0
    except ValueError:
        epochs = 0.0
    if not 0.0 < epochs < float("inf"):
        raise UserError(f"train_layers is {train_layers!r}; use gradual, or gradual:EPOCHS such as gradual:0.5")
    return epochs


def stages(params: dict[str, Any], fresh: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Returns the stages at which parameters begin to train in gradual unfreezing (Howard and Ruder 2018, 3.3).

    Stage 0 trains like `head`, and the `fresh` paths; stage K trains like `last:K`; the embeddings come last. The
    values have per_layer's form.
    """
    # What lies above the layers in an encoder, such as a last norm, and the pooler begin with the last layer.
    pooled = tuple((rf"^{_model_path(stack)}(encoder|pooler)/", 1.0) for stack in stacks(params))
    # The rule for everything else must stay last.
    *depths, rest = by_depth(float, params, 0.0)
    numbers = paths.flatten(per_layer((*depths, *pooled, rest), params))
    return paths.unflatten({path: np.float32(0) if path in fresh else numbers[path] for path in numbers})


def _model_path(stack: str) -> str:
    """Returns the escaped path of a stack's encoder and heads: empty for "encoder/layers/"."""
    return re.escape(re.sub(r"(encoder/)?layers/$", "", stack))


ENCODER_STACK = "encoder/layers/"


@dataclass(frozen=True)
class Trained:
    """The trained part of the parameters; all others are frozen.

    `layers` maps paths to the trained layers of a stack, in order, or to None for a whole parameter. A stacked
    parameter [L, ...] has the shape [K, ...] in this part.
    """

    layers: Mapping[str, tuple[int, ...] | None]

    @classmethod
    def everything(cls, params: dict[str, Any]) -> "Trained":
        """Selects (abstract) parameters as the trained part of a larger tree."""
        return cls(dict.fromkeys(paths.flatten(params)))

    @classmethod
    def by_factors(cls, factors: dict[str, Any] | None) -> "Trained | None":
        """Selects parameters whose learning-rate factors are not zero; None if that is everything."""
        if factors is None or all(np.all(factor) for factor in jax.tree.leaves(factors)):
            return None
        layers: dict[str, tuple[int, ...] | None] = {}
        for path, factor in paths.flatten(factors).items():
            if np.any(factor):
                # A parameter that trains as a whole needs no list of layers, and is then taken without slices.
                layers[path] = None if np.all(factor) else tuple(map(int, np.flatnonzero(np.ravel(factor))))
        return cls(layers)

    def check(self, rates: Mapping[str, float], train_layers: str = "all") -> None:
        """Refuses a configuration by which nothing trains.

        Raises:
            UserError: optimizer.rates, or train_layers if it is not `all`, trains no parameter.
        """
        if not self.layers:
            frozen, advice = f"train_layers is {train_layers}", "of this model. Use all, no_embeddings or last:K"
            if train_layers == "all":
                frozen, advice = f"optimizer.rates is {rates!r}", "of this model. Raise a rate"
            raise UserError(f"{frozen}, which trains no parameter {advice}")

    def take(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Selects this part from parameters or per_layer's values."""

        def select(leaf: Any, layers: tuple[int, ...] | None) -> Any:
            if layers is None or not np.ndim(leaf):  # per_layer has one number if all layers are alike
                return leaf
            # per_layer's arrays are numpy's: they stay constants. Parameters are sliced by runs of layers, since an
            # index by a list would be a gather.
            if isinstance(leaf, np.ndarray):
                return leaf[list(layers)]
            parts = [leaf[first:end] for first, end in _ranges(layers)]
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

        leaves = paths.flatten(tree)
        return paths.unflatten({path: select(leaves[path], layers) for path, layers in self.layers.items()})

    def abstract(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Selects this part from (abstract) parameters, without values; rules know its stacks' layers."""
        # Rules match layers by their number in the whole stack, which a shape [K, ...] does not contain.
        leaves, part = paths.flatten(tree), {}
        for path, layers in self.layers.items():
            leaf = leaves[path]
            whole = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            part[path] = whole if layers is None else SomeLayers(leaf.shape[1:], leaf.dtype, layers)
        return paths.unflatten(part)

    def put(self, tree: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
        """Replaces this part of the tree; in the tree's memory, if that is donated."""

        def place(leaf: Array, new: Array, ranges: Sequence[tuple[int, int]]) -> Array:
            taken = 0
            for first, end in ranges:
                # An update in place if the old tree is donated, where a concatenation would copy all layers.
                leaf = jax.lax.dynamic_update_slice_in_dim(leaf, new[taken : taken + end - first], first, axis=0)
                taken += end - first
            return leaf

        return self._replaced(tree, part, place)

    def join(self, tree: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
        """Does the same by concatenations: reading one layer of the result does not copy the others."""

        def place(leaf: Array, new: Array, ranges: Sequence[tuple[int, int]]) -> Array:
            pieces, taken, before = [], 0, 0
            for first, end in ranges:
                pieces += [leaf[before:first], new[taken : taken + end - first]]
                taken, before = taken + end - first, end
            return jnp.concatenate([piece for piece in (*pieces, leaf[before:]) if len(piece)])

        return self._replaced(tree, part, place)

    def frozen_layers(self, params: dict[str, Any]) -> int:
        """Returns how many of the encoder's lowest layers need no backward pass: nothing in or below them trains.

        It is 0 for a model with several stacks of layers.
        """
        sizes = stacks(params)
        if list(sizes) != [ENCODER_STACK]:
            return 0
        lowest = sizes[ENCODER_STACK]
        for path, layers in self.layers.items():
            # The encoder's parameters outside of its layers, such as position biases, are read by all layers, except
            # the norm above them. Heads are above the layers, too. Layers ascend, so the first one is the lowest.
            if path.startswith(("embeddings/", "encoder/")) and not path.startswith("encoder/final_norm/"):
                lowest = min(lowest, layers[0] if layers and path.startswith(ENCODER_STACK) else 0)
        return lowest

    def _replaced(self, tree: dict[str, Any], part: dict[str, Any], place: Callable[..., Array]) -> dict[str, Any]:
        leaves, values = paths.flatten(tree), paths.flatten(part)
        for path, layers in self.layers.items():
            leaves[path] = values[path] if layers is None else place(leaves[path], values[path], _ranges(layers))
        return paths.unflatten(leaves)


class SomeLayers(jax.ShapeDtypeStruct):
    """Some layers of a stacked parameter, abstract [K, ...], with their numbers in the stack."""

    __slots__ = ("layers",)

    def __init__(self, layer_shape: tuple[int, ...], dtype: Any, layers: tuple[int, ...]) -> None:
        super().__init__((len(layers), *layer_shape), dtype)
        self.layers = layers


def _ranges(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Splits layers into runs of successive ones: the first layer and the end."""
    ranges: list[tuple[int, int]] = []
    for layer in layers:
        if ranges and ranges[-1][1] == layer:
            ranges[-1] = (ranges[-1][0], layer + 1)
        else:
            ranges.append((layer, layer + 1))
    return ranges


@dataclass(frozen=True, eq=False)
class Unfreezing:
    """Gradual unfreezing: a mask of the parameters with a schedule (Howard and Ruder 2018, section 3.3).

    `begins` holds the step from which a parameter trains, in per_layer's form, for the updated part.
    Until then its gradient and its update, weight decay included, are zero. So its moments stay zero, it counts in no
    norm, and the optimizer state has the same tensors in all steps.
    """

    begins: dict[str, Any]

    @classmethod
    def by_stages(cls, stages: dict[str, Any], every: int) -> "Unfreezing":
        """Begins stage K (rules.stages) at step K * every."""
        return cls(jax.tree.map(lambda stage: np.asarray(stage * every, np.int32), stages))

    def mask(self, tree: dict[str, Any], step: Int[Array, ""]) -> dict[str, Any]:
        """Zeroes gradients or updates of parameters that do not train yet."""
        # Not a product, since the gradient of a parameter that does not train may be infinite.
        return jax.tree.map(lambda leaf, begins: jnp.where(step >= begins, leaf, 0), tree, self.begins)

    def update_counts(self, step: Int[Array, ""]) -> dict[str, Int[Array, "..."]]:
        """Returns the number of each parameter's updates by path, including this step's, and at least 1.

        Adam corrects the bias of moments by it. With the run's number, moments that begin at zero would count as long
        averages, and the first updates would be three to seven times as long (train/update_directions.py). Steps
        skipped because they are not finite count as updates here.
        """
        return {path: jnp.maximum(step - begins + 1, 1) for path, begins in paths.flatten(self.begins).items()}
