"""The Transformer encoder: one layer (EncoderLayer), the loop over layers (apply_layers), and the stack (Encoder)."""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, UInt32

from bert_jax.config import ModelConfig
from bert_jax.model.attention.layer import SelfAttention
from bert_jax.model.dropout import DropoutKey, Seeds, row_seeds
from bert_jax.model.embeddings import ATTENTION_BIASES, TokenPositions, token_positions
from bert_jax.model.layers import Dense, Shape, activation, child_key, norm
from bert_jax.model.lora import adapted, add_adapters
from bert_jax.model.ops import operations
from bert_jax.model.runtime import Runtime

ATTENTION_PROBABILITIES, ATTENTION_OUTPUT, FEED_FORWARD_OUTPUT = range(3)  # the places where a layer drops out
SITES = 3

ATTENTION_PARTS = ("attention", "attention_norm")
FEED_FORWARD_PARTS = ("feed_forward", "feed_forward_norm")
# The parts of a layer whose parameters all layers share, by model.shared_layers.
SHARED_PARTS = {
    "none": (),
    "all": ATTENTION_PARTS + FEED_FORWARD_PARTS,
    "attention": ATTENTION_PARTS,
    "feed_forward": FEED_FORWARD_PARTS,
}


class LayerType(NamedTuple):
    """The properties in which layers of one stack may differ."""

    first: bool  # the first layer of a stack whose first layer has no norm before attention
    local: bool  # attends within the window only


class FeedForward(nnx.Module):
    """Two matmuls around an activation (Vaswani et al. 2017, section 3.3), which may be gated (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape) -> None:
        width, inner = (config.width,), (config.feed_forward,)
        through = (2, *inner) if config.gated else inner
        dense = functools.partial(Dense, runtime=runtime, stack=stack, bias=config.bias)
        # `output` is added to the residual stream, so it begins smaller in pre-norm models (residual_deviation).
        self.input = dense(width, through, deviation=config.initializer_range, key=child_key(key, "input"))
        self.output = dense(inner, width, deviation=config.residual_deviation, key=child_key(key, "output"))
        shapes = {"input": (width, through), "output": (inner, width)}
        add_adapters(self, "encoder/layers/feed_forward", config, shapes, runtime=runtime, key=key, stack=stack)
        self.gated = config.gated
        self.runtime, self.unrolled = runtime, runtime.unrolled(config.layers)
        self.activation = activation(config.activation, again=operations(runtime).recomputes_activation)

    def __call__(self, hidden: Float[Array, "B T D"], seeds: Seeds = None) -> Float[Array, "B T D"]:
        """Maps the hidden states of each position; adapters drop out by the seeds."""
        # Both adapters use the seed of the feed-forward's dropout, from which each derives a stream of its own.
        inner = adapted(self, "input", self.input(hidden), hidden, seeds)
        inner = self.runtime.placement.constrain("inner", inner)
        output: Callable[[Array], Array] = functools.partial(self._output, seeds=seeds)
        if operations(self.runtime).recomputes_activation:
            # A scan needs no protection from common subexpression elimination, and a barrier would be a copy.
            output = jax.checkpoint(output, prevent_cse=self.unrolled)
        return output(inner)

    def _output(self, inner: Float[Array, "B T *inner"], seeds: Seeds) -> Float[Array, "B T D"]:
        if self.gated:
            # inner [B, T, 2, F] has the activated half at index 0 and its gate at index 1.
            through, gate = jax.lax.split(inner, (1, 1), axis=2)
            active = self.activation(through[:, :, 0]) * gate[:, :, 0]
        else:
            active = self.activation(inner)
        return adapted(self, "output", self.output(active), active, seeds)


class EncoderLayer(nnx.Module):
    """Attention, then feed-forward, each with a residual connection.

    model.norm is post (a norm after each sum; Vaswani et al. 2017, section 3.1), pre (a norm before attention and
    before feed-forward; Xiong et al. 2020) or pre_but_first (pre without the first layer's norm before attention).
    Parameters have the leading shape `stack`, or (1,) in the parts that model.shared_layers shares.
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape) -> None:
        shared = SHARED_PARTS[config.shared_layers]
        # Shared parts keep an axis of layers, so that rules, checkpoints and sharding see all layers alike.
        stacks = {name: (1,) if name in shared else stack for name in SHARED_PARTS["all"]}

        def part(name: str, module: Any) -> Any:
            return module(config, runtime=runtime, key=child_key(key, name), stack=stacks[name])

        self.attention = part("attention", SelfAttention)
        self.attention_norm = norm(config, runtime=runtime, stack=stacks["attention_norm"])
        self.feed_forward = part("feed_forward", FeedForward)
        self.feed_forward_norm = norm(config, runtime=runtime, stack=stacks["feed_forward_norm"])
        self.config = config
        self.runtime = runtime

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        layer_type: LayerType,
        keys: TokenPositions,
        seeds: UInt32[Array, "3 B 2"] | None,
        *,
        bias: Float[Array, "1 N T T"] | None = None,
        queries: Int[Array, "B Q"] | None = None,
        with_map: bool = False,
    ) -> tuple[Float[Array, "B Q D"], Float[Array, "B N Q T"] | None]:
        """Returns every position's next hidden state, or only those at `queries`, and the attention map if asked for.

        The bias is added to the scores of all positions.
        """
        post = self.config.norm == "post"
        # One seed per dropout site of the layer, in the order of the constants.
        seed = [None] * SITES if seeds is None else seeds
        # Pre-norm normalizes the input of attention only; the residual path keeps it as it is.
        seen = hidden if post or layer_type.first else self.attention_norm(hidden)
        # The residual path holds all positions, or only those with queries.
        residual, selected = hidden, None
        if queries is not None:
            residual, positions = gather_positions(hidden, queries), keys.at(queries)
            selected = (residual if post else gather_positions(seen, queries)), positions
            bias = None if bias is None else gather_queries(bias, queries)
        attended, attention_map = self.attention(
            seen,
            keys,
            seed[ATTENTION_PROBABILITIES],
            local=layer_type.local,
            bias=bias,
            queries=selected,
            with_map=with_map,
        )
        drop = functools.partial(operations(self.runtime).dropout, rate=self.config.dropout)
        placed = functools.partial(self.runtime.placement.constrain, "hidden")
        # Dropout comes before the sum, the norm after it (post) or on the next sublayer's input alone (pre).
        hidden = residual + drop(attended, seeds=seed[ATTENTION_OUTPUT])
        hidden = placed(self.attention_norm(hidden) if post else hidden)
        changed = self.feed_forward(hidden if post else self.feed_forward_norm(hidden), seed[FEED_FORWARD_OUTPUT])
        hidden = hidden + drop(changed, seeds=seed[FEED_FORWARD_OUTPUT])
        return placed(self.feed_forward_norm(hidden) if post else hidden), attention_map


def gather_positions(hidden: Float[Array, "B T D"], positions: Int[Array, "B K"]) -> Float[Array, "B K D"]:
    """Selects the vectors at each row's K positions, exactly."""
    # A one-hot matmul, because its gradient is a matmul too. The gradient of a gather is a scatter, which is serial on
    # a CPU and has no fixed order on a GPU.
    chosen = jax.nn.one_hot(positions, hidden.shape[1], dtype=hidden.dtype)
    return jnp.einsum("bkt,btd->bkd", chosen, hidden, precision=jax.lax.Precision.HIGHEST)


def gather_queries(bias: Float[Array, "1 N T T"], positions: Int[Array, "B Q"]) -> Float[Array, "B N Q T"]:
    """Selects the bias for queries at each row's Q positions, exactly, as gather_positions does."""
    chosen = jax.nn.one_hot(positions, bias.shape[2], dtype=bias.dtype)
    return jnp.einsum("bqs,nst->bnqt", chosen, bias[0], precision=jax.lax.Precision.HIGHEST)


# A layer takes hidden states and the parameters of one layer, and returns hidden states and other outputs.
Layer = Callable[[Array, PyTree], tuple[Array, PyTree]]


@dataclass(frozen=True)
class LayerGroups:
    """A stack's layers in order: `before`, then `repeats` groups of `period` layers with the same types, then `after`.

    A scan over the groups traces and compiles each layer of a group once.
    """

    before: int
    period: int
    repeats: int
    after: int

    @property
    def traced(self) -> int:
        """How many layers a program holds if the groups are scanned."""
        return self.before + self.period + self.after


def repeating_groups(types: Sequence[Hashable]) -> LayerGroups:
    """Finds the groups with the fewest traced layers, and among these with the fewest layers before.

    If no group repeats, all layers are in `before`.
    """
    # ModernBERT's 22 layers (every third is global, and the first has no norm) are one layer and seven groups of three.
    depth = len(types)
    best = LayerGroups(depth, 0, 0, 0)
    # All groups are tried: a stack has a few dozen layers at most.
    for before in range(depth):
        for period in range(1, (depth - before) // 2 + 1):
            # types[before:alike] repeats with this period.
            alike = before + period
            while alike < depth and types[alike] == types[alike - period]:
                alike += 1
            repeats = (alike - before) // period
            groups = LayerGroups(before, period, repeats, depth - before - repeats * period)
            if repeats > 1 and groups.traced < best.traced:
                best = groups
    return best


def apply_layers(layers: Sequence[Layer], hidden: Array, stacked: PyTree, groups: LayerGroups) -> tuple[Array, PyTree]:
    """Applies a stack's L layers in order.

    Args:
        layers: each layer's function; if groups repeat, only the first group's are called.
        stacked: the second argument of the functions, each leaf [L, ...].

    Returns:
        The last layer's hidden states, and all layers' other outputs, each leaf [L, ...]; None without any
        layer.
    """
    # Three parts in order: layers before the groups, the groups in a scan, and layers after them.
    begin, end = groups.before, len(layers) - groups.after
    group = layers[begin : begin + groups.period]
    loops = [
        (begin, lambda *state: _unroll(layers[:begin], *state)),
        (end - begin, lambda *state: _scan(group, groups.repeats, *state)),
        (groups.after, lambda *state: _unroll(layers[end:], *state)),
    ]
    # Empty parts are left out, and a single part needs no split.
    loops = [(count, loop) for count, loop in loops if count]
    parts = split_layers(stacked, tuple(count for count, _ in loops)) if len(loops) > 1 else [stacked] * len(loops)
    outputs = []
    for (_, loop), part in zip(loops, parts, strict=True):
        hidden, output = loop(hidden, part)
        outputs.append(output)
    if len(outputs) < 2:
        return hidden, outputs[0] if outputs else None
    return hidden, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *outputs)


def _unroll(layers: Sequence[Layer], hidden: Array, stacked: PyTree) -> tuple[Array, PyTree]:
    outputs = []
    for layer, part in zip(layers, split_layers(stacked, (1,) * len(layers)), strict=True):
        hidden, output = layer(hidden, jax.tree.map(lambda leaf: leaf[0], part))
        outputs.append(output)
    return hidden, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


def _scan(group: Sequence[Layer], repeats: int, hidden: Array, stacked: PyTree) -> tuple[Array, PyTree]:
    if len(group) == 1:
        return jax.lax.scan(group[0], hidden, stacked, length=repeats)
    # [L, ...] becomes [repeats, period, ...]: the scan runs over groups, and a group is unrolled.
    parts = jax.tree.map(lambda leaf: leaf.reshape(repeats, len(group), *leaf.shape[1:]), stacked)
    hidden, outputs = jax.lax.scan(lambda *state: _unroll(group, *state), hidden, parts, length=repeats)
    return hidden, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)


def apply_frozen_first(
    loop: Callable[[Array, PyTree, slice], tuple[Array, PyTree]],
    hidden: Array,
    stacked: PyTree,
    depth: int,
    frozen: int,
) -> tuple[Array, PyTree]:
    """Applies the lowest `frozen` of `depth` layers without a backward pass, then the others, as apply_layers does.

    Args:
        loop: applies a slice of the layers, given its part of `stacked`.
        stacked: each leaf [depth, ...].
    """
    frozen = min(frozen, depth)
    if not frozen:
        return loop(hidden, stacked, slice(0, depth))
    below, *above = split_layers(stacked, (frozen, depth - frozen)) if frozen < depth else [stacked]
    # Both: the parts of one array share its tangent, which is not zero if any of its layers trains.
    hidden, outputs = loop(*jax.lax.stop_gradient((hidden, below)), slice(0, frozen))
    if not above:
        return hidden, outputs
    hidden, further = loop(hidden, above[0], slice(frozen, depth))
    return hidden, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), outputs, further)


def split_layers(stacked: PyTree, sizes: tuple[int, ...]) -> list[PyTree]:
    """Splits the leading axis into consecutive parts."""
    # The gradient of lax.split is one concatenation; indexing would give a sum for each part.
    leaves, tree = jax.tree.flatten(stacked)
    parts = [jax.lax.split(leaf, sizes) for leaf in leaves]
    return [jax.tree.unflatten(tree, [part[index] for part in parts]) for index in range(len(sizes))]


class Encoded(NamedTuple):
    """Hidden states: the last layer's, the embeddings', and if asked for all layers', and attention maps.

    If a norm follows the stack (pre-norm), `last` and the last of `layers` are taken after it.
    Attention maps are probabilities before dropout, by query and key.
    """

    last: Float[Array, "B T D"]
    embeddings: Float[Array, "B T D"]
    layers: Float[Array, "L B T D"] | None
    attention_maps: Float[Array, "L B N T T"] | None = None


class Encoder(nnx.Module):
    """A stack of L layers, stored as one layer with parameters [L, ...], whether it is scanned or unrolled.

    Parameters that all layers share (model.shared_layers; Lan et al. 2020, section 3.1) are stored as [1, ...].
    Pre-norm layers are followed by a final norm.
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.layers = EncoderLayer(config, runtime=runtime, key=child_key(key, "layers"), stack=(config.layers,))
        if config.norm != "post":
            self.final_norm = norm(config, runtime=runtime)
        if config.relative in ATTENTION_BIASES:
            self.relative_bias = ATTENTION_BIASES[config.relative](config, key=child_key(key, "relative_bias"))
        self.config = config
        self.runtime = runtime

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        sequence_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        dropout_key: DropoutKey,
        *,
        unpacked: bool = False,
        all_layers: bool = False,
        attention_maps: bool = False,
    ) -> Encoded:
        """Encodes embeddings; `unpacked` is as in TokenPositions."""
        keys, bias, stacked = self._inputs(hidden, sequence_ids, positions, dropout_key, unpacked)
        last, (layers, maps) = self._loop(hidden, keys, bias, stacked, self.config.layers, all_layers, attention_maps)
        if self.config.norm != "post":
            # As in transformers, the last of all layers is taken after the final norm.
            last = self.final_norm(last)
            layers = None if layers is None else layers.at[-1].set(last)
        return Encoded(last, hidden, layers, maps)

    def at_positions(
        self,
        hidden: Float[Array, "B T D"],
        sequence_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        wanted: Int[Array, "B K"],
        dropout_key: DropoutKey,
        *,
        unpacked: bool = False,
    ) -> Float[Array, "B K D"]:
        """Returns the last layer's output at each row's K wanted positions, without computing its rest.

        Args:
            hidden: the embeddings of all positions.
            positions: in the sequence, as in a batch.
            wanted: positions in the row, which may repeat.
        """
        keys, bias, stacked = self._inputs(hidden, sequence_ids, positions, dropout_key, unpacked)
        depth = self.config.layers
        # Only the last layer may skip positions: every lower layer is read at all of them as keys and values.
        below, last = split_layers(stacked, (depth - 1, 1))
        hidden, _ = self._loop(hidden, keys, bias, below, depth - 1, False, False)
        state, seeds = jax.tree.map(lambda leaf: leaf[0], last)
        hidden, _ = self._layer(state)(hidden, self._layer_type(depth - 1), keys, seeds, bias=bias, queries=wanted)
        return hidden if self.config.norm == "post" else self.final_norm(hidden)

    def _inputs(
        self, hidden: Array, sequence_ids: Array, positions: Array, dropout_key: DropoutKey, unpacked: bool
    ) -> tuple[TokenPositions, Float[Array, "1 N T T"] | None, tuple[nnx.State, Array | None]]:
        """Returns the keys' positions, all layers' bias, and each layer's own parameters and dropout seeds.

        The bias is the same for each row, since positions in the row are. The others are stacked, [L, ...].
        """
        keys, sites = token_positions(sequence_ids, positions, unpacked), (self.config.layers, SITES)
        # Stacked like the parameters, [L, 3, B, 2]: each layer's slice holds the seeds of its sites.
        seeds = None
        if dropout_key is not None:
            seeds = row_seeds(dropout_key, sites, hidden.shape[0], self.runtime.placement)
        # Distances in the row equal those in a sequence, and no query sees another sequence, so one row stands for all.
        in_row = keys.in_row[:1]
        bias = self.relative_bias(in_row, in_row) if self.config.relative in ATTENTION_BIASES else None
        return keys, bias, (self._split_layers()[2], seeds)

    def _split_layers(self) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
        """Returns the stack's structure, the shared parameters, and each layer's own."""

        def is_shared(path: Any, value: Any) -> bool:
            return path[0] in SHARED_PARTS[self.config.shared_layers]

        parts: Any = nnx.split(self.layers, is_shared, ...)
        return parts

    def _layer(self, own: nnx.State) -> EncoderLayer:
        """Returns one layer's module from its own parameters; sharded ones are gathered first."""
        graph, shared, _ = self._split_layers()
        # Shared parameters are [1, ...], and this layer's own have lost their first axis already.
        state = nnx.merge_state(jax.tree.map(lambda leaf: leaf[0], shared), own)
        return nnx.merge(graph, gathered(state, self.runtime))

    def _layer_type(self, layer: int) -> LayerType:
        return LayerType(
            first=layer == 0 and self.config.norm == "pre_but_first", local=not self.config.is_global(layer)
        )

    def _loop(
        self,
        hidden: Array,
        keys: TokenPositions,
        bias: Array | None,
        stacked: tuple,
        depth: int,
        all_layers: bool,
        attention_maps: bool,
    ) -> tuple[Array, tuple[Array | None, Array | None]]:
        def apply(hidden: Array, layer: tuple, layer_type: LayerType) -> tuple[Array, tuple]:
            state, seeds = layer
            hidden, weights = self._layer(state)(hidden, layer_type, keys, seeds, bias=bias, with_map=attention_maps)
            return hidden, (hidden if all_layers else None, weights)

        types = [self._layer_type(layer) for layer in range(depth)]
        # One function for each type, so that layers of one type are traced as the same function.
        functions = {kind: self.runtime.rematerialized(functools.partial(apply, layer_type=kind)) for kind in types}

        def loop(hidden: Array, stacked: tuple, layers: slice) -> tuple[Array, Any]:
            unrolled = self.runtime.unrolled(self.config.layers)
            # Unrolled, all layers come before the groups, of which there are none.
            groups = LayerGroups(len(types[layers]), 0, 0, 0) if unrolled else repeating_groups(types[layers])
            return apply_layers([functions[layer_type] for layer_type in types[layers]], hidden, stacked, groups)

        hidden, outputs = apply_frozen_first(loop, hidden, stacked, depth, self.runtime.frozen_layers)
        return hidden, outputs or (None, None)


def gathered(state: nnx.State, runtime: Runtime) -> nnx.State:
    """Gathers one layer's parameters if they are sharded over fsdp."""
    if not runtime.placement.gathers:
        return state
    params = runtime.placement.gather(nnx.to_pure_dict(state), "encoder/layers", runtime.dtype)
    state = jax.tree.map(lambda leaf: leaf, state)  # a copy, since replacing changes it in place
    nnx.replace_by_pure_dict(state, params)
    return state
