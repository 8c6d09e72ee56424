"""The feed-forward language model: one tanh layer over the embeddings of the last few tokens."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.model.layers import Dense, Shape, child_key
from bert_jax.model.runtime import Runtime
from bert_jax.model.transformer import Encoded, gather_positions, gathered


class WindowLayer(nnx.Module):
    """tanh(H x + d) of the vectors of the last n positions, oldest first: window/kernel [*stack, n, D, D], bias."""

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape) -> None:
        self.window = Dense(
            (config.window, config.width),
            (config.width,),
            deviation=config.initializer_range,
            runtime=runtime,
            key=child_key(key, "window"),
            stack=stack,
            bias=config.bias,
        )

    def __call__(self, vectors: Float[Array, "B T n D"]) -> Float[Array, "B T D"]:
        return jnp.tanh(self.window(vectors))


class FeedForwardEncoder(nnx.Module):
    """One hidden layer over the embeddings of a position and of the n - 1 before it, n = model.window.

    As Bengio et al. 2003, section 2, without direct connections from the embeddings to the output. A position before
    the start of its sequence counts as a vector of zeros, so packed rows equal padded ones. It has the interface of
    Encoder (encoder.py), but no attention maps.
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.layers = WindowLayer(config, runtime=runtime, key=child_key(key, "layers"), stack=(1,))
        self.config = config
        self.runtime = runtime

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        sequence_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        dropout_key: PRNGKeyArray | None,
        *,
        unpacked: bool = False,  # for attention alone
        all_layers: bool = False,
        attention_maps: bool = False,
    ) -> Encoded:
        """Returns the embeddings and the hidden layer. Raises UserError where maps are asked for."""
        if attention_maps:
            raise UserError(f"a model with model.encoder={self.config.encoder} has no attention maps")
        last = self.runtime.rematerialized(self._layer())(_windows(hidden, sequence_ids, self.config.window))
        return Encoded(last, hidden, last[None] if all_layers else None)

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
        """Returns the output at the K wanted positions of each row. All positions are computed."""
        return gather_positions(self(hidden, sequence_ids, positions, dropout_key).last, wanted)

    def _layer(self) -> WindowLayer:
        """Returns the module of the layer, its parameters gathered where they are sharded over fsdp."""
        graph, stacked = nnx.split(self.layers)
        return nnx.merge(graph, gathered(jax.tree.map(lambda leaf: leaf[0], stacked), self.runtime))


def _windows(hidden: Float[Array, "B T D"], sequence_ids: Int[Array, "B T"], window: int) -> Float[Array, "B T n D"]:
    """Returns the vectors of the last `window` positions of the same sequence, oldest first; zeros before its start."""
    length, found = hidden.shape[1], []
    for back in reversed(range(window)):
        earlier = jnp.pad(hidden, ((0, 0), (back, 0), (0, 0)))[:, :length]
        ids = jnp.pad(sequence_ids, ((0, 0), (back, 0)), constant_values=-1)[:, :length]
        found.append(jnp.where((ids == sequence_ids)[..., None], earlier, 0))
    return jnp.stack(found, axis=2)
