"""The stack of Transformer encoder layers, post-norm as in BERT, looped by scan or unrolled."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from bert_jax.config import ModelConfig
from bert_jax.model.attention import SelfAttention, visible_keys
from bert_jax.model.dropout import dropout, row_seeds
from bert_jax.model.layers import Dense, LayerNorm, Shape, child_key, gelu
from bert_jax.model.runtime import Runtime

ATTENTION_PROBABILITIES, ATTENTION_OUTPUT, FEED_FORWARD_OUTPUT = range(3)  # where a layer drops out
SITES = 3


class FeedForward(nnx.Module):
    """Two matmuls with a GELU between (Devlin et al. 2019, section 3)."""

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape) -> None:
        def dense(name: str, inputs: int, outputs: int) -> Dense:
            return Dense(
                (inputs,),
                (outputs,),
                deviation=config.initializer_range,
                runtime=runtime,
                key=child_key(key, name),
                stack=stack,
            )

        self.input = dense("input", config.width, config.feed_forward)
        self.output = dense("output", config.feed_forward, config.width)

    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.output(gelu(self.input(hidden)))


class EncoderLayer(nnx.Module):
    """Attention and feed-forward, each added to its input and then normalized (Vaswani et al. 2017, 3.1)."""

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape) -> None:
        def norm() -> LayerNorm:
            return LayerNorm(config.width, epsilon=config.layer_norm_epsilon, runtime=runtime, stack=stack)

        self.attention = SelfAttention(config, runtime=runtime, key=child_key(key, "attention"), stack=stack)
        self.attention_norm = norm()
        self.feed_forward = FeedForward(config, runtime=runtime, key=child_key(key, "feed_forward"), stack=stack)
        self.feed_forward_norm = norm()
        self.dropout_rate = config.dropout

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        visible: Bool[Array, "B 1 Q T"],
        seeds: UInt32[Array, "3 B 2"] | None,
        slots: Int[Array, "B Q"] | None = None,
    ) -> Float[Array, "B Q D"]:
        """Every slot's next hidden state, or only those of `slots`, which `visible` then speaks of."""
        seed = [None] * SITES if seeds is None else seeds
        queries = None if slots is None else gather_slots(hidden, slots)
        attended = self.attention(hidden, visible, seed[ATTENTION_PROBABILITIES], queries)
        attended = dropout(attended, self.dropout_rate, seed[ATTENTION_OUTPUT])
        hidden = self.attention_norm((hidden if queries is None else queries) + attended)
        changed = dropout(self.feed_forward(hidden), self.dropout_rate, seed[FEED_FORWARD_OUTPUT])
        return self.feed_forward_norm(hidden + changed)


class Encoder(nnx.Module):
    """L layers, stored stacked [L, ...] whichever way they are looped."""

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.depth = config.layers
        self.layers = EncoderLayer(config, runtime=runtime, key=child_key(key, "layers"), stack=(config.layers,))
        self.runtime = runtime

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        sequence_ids: Int[Array, "B T"],
        dropout_key: PRNGKeyArray | None,
        *,
        all_layers: bool = False,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "L B T D"] | None]:
        """The last layer's output, and every layer's when asked."""
        stacked = self._stacked(hidden.shape[0], dropout_key)
        return self._loop(hidden, sequence_ids, stacked, self.depth, all_layers)

    def at_slots(
        self,
        hidden: Float[Array, "B T D"],
        sequence_ids: Int[Array, "B T"],
        slots: Int[Array, "B K"],
        dropout_key: PRNGKeyArray | None,
    ) -> Float[Array, "B K D"]:
        """The last layer's output at K slots of each row, the rest of that layer left out."""
        stacked = self._stacked(hidden.shape[0], dropout_key)
        below, last = _split(stacked, (self.depth - 1, 1))
        hidden, _ = self._loop(hidden, sequence_ids, below, self.depth - 1, False)
        state, seeds = jax.tree.map(lambda leaf: leaf[0], last)
        visible = visible_keys(jnp.take_along_axis(sequence_ids, slots, axis=1), sequence_ids)
        return self._layer(state)(hidden, visible, seeds, slots)

    def _stacked(self, rows: int, dropout_key: PRNGKeyArray | None) -> tuple:
        """What a layer needs, stacked: its parameters and its dropout seeds."""
        seeds = None if dropout_key is None else row_seeds(dropout_key, (self.depth, SITES), rows)
        return nnx.split(self.layers)[1], seeds

    def _layer(self, state: nnx.State) -> EncoderLayer:
        return nnx.merge(nnx.split(self.layers)[0], state)

    def _loop(
        self, hidden: Array, sequence_ids: Array, stacked: tuple, depth: int, all_layers: bool
    ) -> tuple[Array, Array | None]:
        visible = visible_keys(sequence_ids, sequence_ids)

        def apply(hidden: Array, layer: tuple) -> tuple[Array, Array | None]:
            state, seeds = layer
            hidden = self._layer(state)(hidden, visible, seeds)
            return hidden, hidden if all_layers else None

        if not self.runtime.unrolled(self.depth):
            return jax.lax.scan(apply, hidden, stacked)
        outputs: list[Any] = []
        for part in _split(stacked, (1,) * depth):
            hidden, output = apply(hidden, jax.tree.map(lambda leaf: leaf[0], part))
            outputs.append(output)
        return hidden, jnp.stack(outputs) if all_layers else None


def gather_slots(hidden: Float[Array, "B T D"], slots: Int[Array, "B K"]) -> Float[Array, "B K D"]:
    """The vectors at K slots of each row, exactly.

    By a matmul, whose gradient is a matmul: a gather's is a scatter, serial on a CPU and in no fixed order on a GPU.
    """
    chosen = jax.nn.one_hot(slots, hidden.shape[1], dtype=hidden.dtype)
    return jnp.einsum("bkt,btd->bkd", chosen, hidden, precision=jax.lax.Precision.HIGHEST)


def _split(stacked: tuple, sizes: tuple[int, ...]) -> list[tuple]:
    """Consecutive parts of the leading axis. lax.split's gradient is one concatenation, indexing's a sum per part."""
    leaves, tree = jax.tree.flatten(stacked)
    parts = [jax.lax.split(leaf, sizes) for leaf in leaves]
    return [jax.tree.unflatten(tree, [part[index] for part in parts]) for index in range(len(sizes))]
