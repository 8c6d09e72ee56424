"""The stack of Transformer encoder layers, looped by scan or unrolled."""

import functools
from typing import Any, NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bert_jax.config import ModelConfig
from bert_jax.model.dropout import row_seeds
from bert_jax.model.layer import SHARED_PARTS, SITES, EncoderLayer, LayerType, gather_positions
from bert_jax.model.layer_groups import (
    apply_frozen_first,
    apply_layers,
    repeating_groups,
    split_layers,
    unrolled_groups,
)
from bert_jax.model.layers import LayerNorm, child_key
from bert_jax.model.positions import ATTENTION_BIASES
from bert_jax.model.runtime import Runtime
from bert_jax.model.token_positions import TokenPositions, token_positions

__all__ = ["Encoded", "Encoder", "gather_positions"]


class Encoded(NamedTuple):
    """Hidden states of the last layer and of the embeddings; and, when asked for, of every layer, and attention maps.

    Where a norm follows the stack (pre-norm), `last` and the last of `layers` are taken after it, as in transformers.
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
            epsilon = config.layer_norm_epsilon
            self.final_norm = LayerNorm(config.width, epsilon=epsilon, runtime=runtime, bias=config.bias)
        if config.relative in ATTENTION_BIASES:
            self.relative_bias = ATTENTION_BIASES[config.relative](config, key=child_key(key, "relative_bias"))
        self.config = config
        self.runtime = runtime

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        sequence_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        dropout_key: PRNGKeyArray | None,
        *,
        unpacked: bool = False,
        all_layers: bool = False,
        attention_maps: bool = False,
    ) -> Encoded:
        """Returns the hidden states of the stack on these embeddings.

        unpacked   whether each row holds one sequence at most, from the first position on
        """
        keys = token_positions(sequence_ids, positions, unpacked)
        stacked, bias = self._stacked(hidden.shape[0], dropout_key), self._bias(keys)
        last, (layers, maps) = self._loop(hidden, keys, bias, stacked, self.config.layers, all_layers, attention_maps)
        if self.config.norm != "post":
            last = self.final_norm(last)
            layers = None if layers is None else layers.at[-1].set(last)
        return Encoded(last, hidden, layers, maps)

    def at_positions(
        self,
        hidden: Float[Array, "B T D"],
        sequence_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        wanted: Int[Array, "B K"],
        dropout_key: PRNGKeyArray | None,
        *,
        unpacked: bool = False,
    ) -> Float[Array, "B K D"]:
        """Returns the last layer's output at the K wanted positions of each row.

        The rest of that layer is not computed.
        """
        keys, depth = token_positions(sequence_ids, positions, unpacked), self.config.layers
        below, last = split_layers(self._stacked(hidden.shape[0], dropout_key), (depth - 1, 1))
        bias = self._bias(keys)
        hidden, _ = self._loop(hidden, keys, bias, below, depth - 1, False, False)
        state, seeds = jax.tree.map(lambda leaf: leaf[0], last)
        hidden, _ = self._layer(state)(hidden, self._layer_type(depth - 1), keys, seeds, bias=bias, queries=wanted)
        return hidden if self.config.norm == "post" else self.final_norm(hidden)

    def _stacked(self, rows: int, dropout_key: PRNGKeyArray | None) -> tuple:
        """Returns what differs by layer, [L, ...]: the parameters that are not shared, and the dropout seeds."""
        sites = (self.config.layers, SITES)
        seeds = None if dropout_key is None else row_seeds(dropout_key, sites, rows, self.runtime.placement)
        return self._split_layers()[2], seeds

    def _split_layers(self) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
        """Returns the structure of the stack, the parameters that all layers share, and those that each layer has."""

        def is_shared(path: Any, value: Any) -> bool:
            return path[0] in SHARED_PARTS[self.config.shared_layers]

        parts: Any = nnx.split(self.layers, is_shared, ...)
        return parts

    def _layer(self, own: nnx.State) -> EncoderLayer:
        """Returns the module of one layer, from the parameters that it does not share with the others.

        All are gathered first where they are sharded over fsdp.
        """
        graph, shared, _ = self._split_layers()
        state = nnx.merge_state(jax.tree.map(lambda leaf: leaf[0], shared), own)
        return nnx.merge(graph, gathered(state, self.runtime))

    def _layer_type(self, layer: int) -> LayerType:
        return LayerType(
            first=layer == 0 and self.config.norm == "pre_but_first", local=not self.config.is_global(layer)
        )

    def _bias(self, keys: TokenPositions) -> Float[Array, "1 N T T"] | None:
        """Returns the bias that every layer adds to its scores, by query and key.

        It is the same for each row, since positions in the row are.
        """
        in_row = keys.in_row[:1]
        return self.relative_bias(in_row, in_row) if self.config.relative in ATTENTION_BIASES else None

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
        def apply(
            hidden: Array, layer: tuple, layer_type: LayerType
        ) -> tuple[Array, tuple[Array | None, Array | None]]:
            state, seeds = layer
            hidden, found = self._layer(state)(hidden, layer_type, keys, seeds, bias=bias, with_map=attention_maps)
            return hidden, (hidden if all_layers else None, found)

        types = [self._layer_type(layer) for layer in range(depth)]
        of_type = {each: self.runtime.rematerialized(functools.partial(apply, layer_type=each)) for each in types}

        def loop(hidden: Array, stacked: tuple, layers: slice) -> tuple[Array, Any]:
            if self.runtime.unrolled(self.config.layers):
                groups = unrolled_groups(len(types[layers]))
            else:
                groups = repeating_groups(types[layers])
            return apply_layers([of_type[each] for each in types[layers]], hidden, stacked, groups)

        hidden, outputs = apply_frozen_first(loop, hidden, stacked, depth, self.runtime.frozen_layers)
        return hidden, outputs or (None, None)


def gathered(state: nnx.State, runtime: Runtime) -> nnx.State:
    """Returns the parameters of one layer of a stack, gathered where they are sharded over fsdp."""
    if not runtime.placement.gathers:
        return state
    params = runtime.placement.gather(nnx.to_pure_dict(state), "encoder/layers", runtime.dtype)
    state = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(state, params)
    return state
