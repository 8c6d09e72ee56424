"""Token, position and segment embeddings, summed and normalized (Devlin et al. 2019, section 3, figure 2)."""

import math

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from bert_jax.config import ModelConfig
from bert_jax.model.layers import Dense, LayerNorm, child_key, truncated_normal
from bert_jax.model.ops import operations
from bert_jax.model.positions import sinusoids
from bert_jax.model.runtime import Runtime
from bert_jax.shapes import padded_vocabulary


class Embedding(nnx.Module):
    """A table of vectors: table [entries, D]. Entries past `used` are padding and zero."""

    def __init__(self, entries: int, width: int, *, used: int, deviation: float, key: PRNGKeyArray) -> None:
        table = truncated_normal(child_key(key, "table"), (used, width), deviation)
        self.table = nnx.Param(jnp.pad(table, ((0, entries - used), (0, 0))))


def token_table(config: ModelConfig, key: PRNGKeyArray) -> Embedding:
    """Returns a vector for each token: table [V, E], V padded.

    It serves the input, or the output where that is not tied.
    """
    used, entries = config.vocab_size, padded_vocabulary(config.vocab_size)
    return Embedding(entries, config.table_width, used=used, deviation=config.initializer_range, key=key)


class Embeddings(nnx.Module):
    """The input of the first layer: token, position and segment embeddings, summed and normalized.

    Where model.embedding_width is set, a dense layer projects them to the width of the layers (Lan et al. 2020,
    section 3.1). An encoder of two directions gets them twice, [x; x] (Peters et al. 2018, section 3.2).
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        def embedding(name: str, entries: int) -> Embedding:
            deviation = config.initializer_range
            return Embedding(entries, config.table_width, used=entries, deviation=deviation, key=child_key(key, name))

        self.token = token_table(config, child_key(key, "token"))
        if config.positions == "learned":
            entries = config.max_positions + config.position_offset
            self.position = embedding("position", entries)
        if config.segment_types:
            self.segment = embedding("segment", config.segment_types)
        if config.embedding_norm:
            epsilon = config.layer_norm_epsilon
            self.norm = LayerNorm(config.table_width, epsilon=epsilon, runtime=runtime, bias=config.bias)
        if config.embedding_width:
            self.projection = Dense(
                (config.embedding_width,),
                (config.layer_width,),
                deviation=config.initializer_range,
                runtime=runtime,
                key=child_key(key, "projection"),
                bias=config.bias,
            )
        self.config = config
        self.runtime = runtime

    def vectors(
        self,
        input_ids: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        seeds: UInt32[Array, "B 2"] | None,
    ) -> Float[Array, "B T E"]:
        """The normalized sum, in the width of the tables. Positions are below T: they restart in each sequence of a
        row."""
        config, length = self.config, input_ids.shape[1]
        forms = operations(self.runtime)
        summed = self.token.table[...][input_ids]
        if config.positions == "learned":
            first = config.position_offset
            summed += forms.look_up(self.position.table[...][first : first + length], positions)
        elif config.positions == "sinusoidal":
            # "In the embedding layers, we multiply those weights by sqrt(d_model)": Vaswani et al. 2017, section 3.4.
            summed *= math.sqrt(config.table_width)
            # Sliced as a traced array, since the length of an exported program is symbolic.
            table = jnp.asarray(sinusoids(config.max_positions, config.table_width))
            summed += forms.look_up(table[:length], positions)
        if config.segment_types == 1:
            summed += self.segment.table[...][None]
        elif config.segment_types:
            summed += forms.look_up(self.segment.table[...], segment_ids)
        summed = forms.stored(summed)
        embedded = self.norm(summed) if config.embedding_norm else summed.astype(self.runtime.dtype)
        return forms.dropout(embedded, config.dropout, seeds)

    def project(self, vectors: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        """The input of the first layer."""
        projected = self.projection(vectors) if self.config.embedding_width else vectors
        if self.config.directions > 1:
            projected = jnp.concatenate([projected] * self.config.directions, axis=-1)
        return self.runtime.placement.constrain("hidden", projected)
