"""The stack of Transformer encoder layers, post-norm as in BERT, looped by scan or unrolled."""

import jax
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
        common = {"deviation": config.initializer_range, "runtime": runtime, "stack": stack}
        self.input = Dense((config.width,), (config.feed_forward,), key=child_key(key, "input"), **common)
        self.output = Dense((config.feed_forward,), (config.width,), key=child_key(key, "output"), **common)

    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.output(gelu(self.input(hidden)))


class EncoderLayer(nnx.Module):
    """Attention and feed-forward, each added to its input and then normalized (Vaswani et al. 2017, section 3.1)."""

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape) -> None:
        norm = {"epsilon": config.layer_norm_epsilon, "runtime": runtime, "stack": stack}
        self.attention = SelfAttention(config, runtime=runtime, key=child_key(key, "attention"), stack=stack)
        self.attention_norm = LayerNorm(config.width, **norm)
        self.feed_forward = FeedForward(
            config, runtime=runtime, key=child_key(key, "feed_forward"), stack=stack
        )
        self.feed_forward_norm = LayerNorm(config.width, **norm)
        self.dropout_rate = config.dropout

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        visible: Bool[Array, "B 1 T T"],
        seeds: UInt32[Array, "3 B 2"] | None,
    ) -> Float[Array, "B T D"]:
        seed = [None] * SITES if seeds is None else seeds
        attended = self.attention(hidden, visible, seed[ATTENTION_PROBABILITIES])
        attended = dropout(attended, self.dropout_rate, seed[ATTENTION_OUTPUT])
        hidden = self.attention_norm(hidden + attended)
        changed = dropout(self.feed_forward(hidden), self.dropout_rate, seed[FEED_FORWARD_OUTPUT])
        return self.feed_forward_norm(hidden + changed)


class Encoder(nnx.Module):
    """L layers, stored stacked [L, ...] whichever way they are looped."""

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.depth = config.layers
        self.layers = EncoderLayer(
            config, runtime=runtime, key=child_key(key, "layers"), stack=(config.layers,)
        )
        self.runtime = runtime

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        sequence_ids: Int[Array, "B T"],
        dropout_key: PRNGKeyArray | None,
        *,
        all_layers: bool,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "L B T D"] | None]:
        """The last layer's output, and every layer's when asked."""
        visible = visible_keys(sequence_ids)
        graph, stacked = nnx.split(self.layers)
        seeds = None if dropout_key is None else row_seeds(dropout_key, (self.depth, SITES), hidden.shape[0])

        def apply(hidden: Array, layer: tuple) -> tuple[Array, Array | None]:
            state, seeds = layer
            hidden = nnx.merge(graph, state)(hidden, visible, seeds)
            return hidden, hidden if all_layers else None

        if not self.runtime.unrolled(self.depth):
            return jax.lax.scan(apply, hidden, (stacked, seeds))
        outputs = []
        for layer in _unstack((stacked, seeds), self.depth):
            hidden, output = apply(hidden, layer)
            outputs.append(output)
        return hidden, jax.numpy.stack(outputs) if all_layers else None


def _unstack(stacked: tuple, depth: int) -> list[tuple]:
    """Slices of the leading axis. The gradient of lax.split is one concatenation; that of indexing, `depth` sums."""
    leaves, tree = jax.tree.flatten(stacked)
    parts = [jax.lax.split(leaf, (1,) * depth) for leaf in leaves]
    return [jax.tree.unflatten(tree, [part[index][0] for part in parts]) for index in range(depth)]
