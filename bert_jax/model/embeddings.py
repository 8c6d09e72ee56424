"""Positions and embeddings: which keys a query sees (TokenPositions, visible_keys); position encodings as vectors,
rotations and attention biases; and the first layer's input (Embeddings)."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int, PRNGKeyArray

from bert_jax.config import ModelConfig
from bert_jax.config.model import RELATIVE
from bert_jax.model.dropout import Seeds
from bert_jax.model.layers import Shape, child_key, dense, norm, truncated_normal
from bert_jax.model.ops import operations
from bert_jax.model.runtime import Runtime
from bert_jax.shapes import padded_vocabulary

BUCKETS = 32  # Raffel et al. 2020, section 2.1
_SINUSOID_BASE = 10_000.0  # Vaswani et al. 2017, section 3.5


@dataclass(frozen=True)
class TokenPositions:
    """Where vectors are: their position in the row, their sequence, and their position in the sequence."""

    in_row: Int[Array, "B K"]
    sequence_ids: Int[Array, "B K"]
    in_sequence: Int[Array, "B K"]
    # Whether rows are known, before the batch is, to hold at most one sequence, from the first position on.
    unpacked: bool = False

    def at(self, positions: Int[Array, "B K"]) -> "TokenPositions":
        """Selects some positions of the row; self covers the whole row."""
        ids, numbers = (jnp.take_along_axis(part, positions, axis=1) for part in (self.sequence_ids, self.in_sequence))
        return dataclasses.replace(self, in_row=positions, sequence_ids=ids, in_sequence=numbers)


def token_positions(
    sequence_ids: Int[Array, "B T"], positions: Int[Array, "B T"], unpacked: bool = False
) -> TokenPositions:
    """Makes whole rows' TokenPositions from a batch's fields."""
    in_row = jax.lax.broadcasted_iota(jnp.int32, sequence_ids.shape, 1)
    return TokenPositions(in_row, sequence_ids, positions, unpacked)


def is_unpacked(batch: Any) -> bool:
    """Returns a batch's `unpacked` (TokenPositions); False if it has none."""
    return getattr(batch, "unpacked", False)


def visible_keys(
    queries: TokenPositions, keys: TokenPositions, *, window: int = 0, causal: bool = False
) -> Bool[Array, "B 1 Q T"]:
    """Returns which keys a query sees, all of them in its own sequence.

    Padding (sequence id 0) sees padding alone: no real query sees it, and its own softmax is over something.

    Args:
        window: the largest distance from a query to a key; 0: any.
        causal: whether a query sees no key after itself.
    """
    visible = queries.sequence_ids[:, :, None] == keys.sequence_ids[:, None, :]
    # Distances are taken in the row. Within one sequence they equal distances in the sequence.
    ahead = keys.in_row[:, None, :] - queries.in_row[:, :, None]
    if window:
        visible &= jnp.abs(ahead) <= window
    if causal:
        visible &= ahead <= 0
    return visible[:, None]


def sequence_lengths(rows: TokenPositions) -> Int[Array, "B"]:
    """Counts the positions of each unpacked row that a query may see, i.e. those before the padding.

    A row with nothing but padding counts 1, so that no softmax is over nothing.
    """
    return jnp.maximum((rows.sequence_ids > 0).sum(axis=1, dtype=jnp.int32), 1)


def sinusoids(length: int, width: int) -> Float32[np.ndarray, "T D"]:
    """Returns sines in the even columns, cosines in the odd ones (Vaswani et al. 2017, section 3.5)."""
    angles = np.arange(length)[:, None] / _SINUSOID_BASE ** (np.arange(0, width, 2) / width)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, width).astype(np.float32)


def rotate(vectors: Float[Array, "B K N H"], positions: Int[Array, "B K"], base: float) -> Float[Array, "B K N H"]:
    """Rotates coordinates i and i + H/2 by an angle that grows with the position (Su et al. 2021, section 3.4.2).

    Halves are paired as in GPT-NeoX and ModernBERT. Computed in float32.
    """
    speeds = rotation_speeds(vectors.shape[-1], base)
    # [B, K, 1, H/2]: all heads rotate alike.
    angles = (positions[:, :, None].astype(jnp.float32) * speeds[None, None])[:, :, None]
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(vectors.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(vectors.dtype)


def rotation_speeds(width: int, base: float) -> Float32[np.ndarray, "K"]:
    """Returns the angles by which pairs of coordinates rotate from one position to the next: base^(-2i/H)."""
    # Rounded to float32 where transformers rounds, after the power and after the division: at position 8,000 the last
    # bit of a speed changes the angle by 3e-4.
    powers = np.power(float(base), np.arange(0, width, 2) / width).astype(np.float32)
    return np.float32(1) / powers


class RelativeTable(nnx.Module):
    """Vectors for distances up to k, whose product with the query is added to the score: table [*stack, 2k+1, H].

    Shaw et al. 2018, section 3.2. For keys only: section 4.3 finds that vectors for values add nothing.
    """

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray, stack: Shape) -> None:
        self.distance = config.relative_distance
        shape = (*stack, 2 * self.distance + 1, config.width // config.heads)
        self.table = nnx.Param(truncated_normal(child_key(key, "table"), shape, config.initializer_range))

    def __call__(
        self,
        query: Float[Array, "B Q N H"],
        query_positions: Int[Array, "#B Q"],
        key_positions: Int[Array, "#B T"],
        precision: jax.lax.Precision,
    ) -> Float[Array, "B N Q T"]:
        """Returns the float32 bias of the scaled scores. Positions that all rows share are given once (B = 1)."""
        # The bias joins scaled scores, so it is scaled like them.
        query = query * (1.0 / math.sqrt(query.shape[-1]))
        table = self.table[...].astype(query.dtype)
        # The query meets 2k + 1 vectors, not T: scores by distance come first and are then put at their keys.
        by_distance = jnp.einsum("bqnh,kh->bnqk", query, table, precision=precision, preferred_element_type=jnp.float32)
        # Distances beyond the limit share the last vector.
        behind = jnp.clip(query_positions[:, :, None] - key_positions[:, None, :], -self.distance, self.distance)
        # A one-hot matmul, for the reason in transformer.gather_positions.
        chosen = jax.nn.one_hot(behind + self.distance, table.shape[0], dtype=jnp.float32)
        pattern, chosen = ("bnqk,qtk->bnqt", chosen[0]) if chosen.shape[0] == 1 else ("bnqk,bqtk->bnqt", chosen)
        return jnp.einsum(pattern, by_distance, chosen, precision=jax.lax.Precision.HIGHEST)


class DistanceBuckets(nnx.Module):
    """A bias for each head and bucket of distances: table [32, N] for all layers (Raffel et al. 2020, section 2.1)."""

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray) -> None:
        shape = (BUCKETS, config.heads)
        self.table = nnx.Param(truncated_normal(child_key(key, "table"), shape, config.initializer_range))
        self.distance = config.relative_distance

    def __call__(self, query_positions: Int[Array, "B Q"], key_positions: Int[Array, "B T"]) -> Float[Array, "B N Q T"]:
        ahead = key_positions[:, None, :] - query_positions[:, :, None]
        # A one-hot matmul, for the reason in transformer.gather_positions.
        chosen = jax.nn.one_hot(distance_bucket(ahead, self.distance), BUCKETS, dtype=jnp.float32)
        return jnp.einsum("bqtk,kn->bnqt", chosen, self.table[...], precision=jax.lax.Precision.HIGHEST)


def distance_bucket(ahead: Int[Array, "*shape"], longest: int) -> Int[Array, "*shape"]:
    """Returns the bucket for a distance, key minus query (Raffel et al. 2020, as mesh-tensorflow computes it)."""
    # Each direction has half of the buckets. Half of those hold single distances, and the others ranges that grow by a
    # constant factor up to `longest`.
    side = BUCKETS // 2
    exact = side // 2
    # A table by distance, computed once in numpy: a logarithm on a device could round a border to the other side.
    distances = np.arange(max(longest, exact) + 1)
    share = np.log(np.maximum(distances, exact).astype(np.float32) / exact) / math.log(max(longest / exact, 2.0))
    growing = exact + (share * (side - exact)).astype(np.int32)
    buckets = jnp.asarray(np.where(distances < exact, distances, np.minimum(growing, side - 1)))
    return buckets[jnp.minimum(jnp.abs(ahead), len(distances) - 1)] + jnp.where(ahead > 0, side, 0)


# The modules of model.relative that add a bias to the scores of every layer; add_attention_bias adds to them.
ATTENTION_BIASES: dict[str, Callable[..., nnx.Module]] = {"buckets": DistanceBuckets}


def add_attention_bias(name: str, module: Callable[..., nnx.Module]) -> None:
    """Makes a bias of attention scores available as model.relative=NAME.

    Attention then runs by einsum, since fused kernels take no bias.

    Args:
        module: module(config, key=...) gives an nnx.Module, which all layers share. It is called with the query
            positions [1, T] and the key positions [1, T] in the row, and returns the finite float32 bias [1, N, T, T]
            of the scaled scores.
    """
    ATTENTION_BIASES[name] = module
    if name not in RELATIVE:
        RELATIVE.append(name)


class Embedding(nnx.Module):
    """A table of vectors, [entries, D], padded with zeros to `padded` rows."""

    def __init__(
        self, config: ModelConfig, entries: int, width: int = 0, *, padded: int = 0, key: PRNGKeyArray
    ) -> None:
        shape = (entries, width or config.table_width)
        # The rows that are padding are never looked up, and logits for them are -inf.
        table = truncated_normal(child_key(key, "table"), shape, config.initializer_range)
        self.table = nnx.Param(jnp.pad(table, ((0, max(padded - entries, 0)), (0, 0))))


def token_table(config: ModelConfig, key: PRNGKeyArray) -> Embedding:
    """Makes the token vectors, [V, E] with V padded, for the input or an untied output."""
    return Embedding(config, config.vocab_size, padded=padded_vocabulary(config.vocab_size), key=key)


class Embeddings(nnx.Module):
    """The first layer's input: token, position and segment embeddings, summed and normalized.

    Devlin et al. 2019, section 3, figure 2. With model.embedding_width a dense layer projects them to the layers' width
    (Lan et al. 2020, section 3.1). An encoder of two directions gets them twice, [x; x] (Peters et al. 2018, section
    3.2).
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.token = token_table(config, child_key(key, "token"))
        if config.positions == "learned":
            entries = config.max_positions + config.position_offset
            self.position = Embedding(config, entries, key=child_key(key, "position"))
        if config.segment_types:
            self.segment = Embedding(config, config.segment_types, key=child_key(key, "segment"))
        if config.embedding_norm:
            self.norm = norm(config, config.table_width, runtime=runtime)
        if config.embedding_width:
            widths = config.embedding_width, config.layer_width
            self.projection = dense(config, *widths, runtime=runtime, key=child_key(key, "projection"))
        self.config = config
        self.runtime = runtime

    def vectors(
        self, input_ids: Int[Array, "B T"], segment_ids: Int[Array, "B T"], positions: Int[Array, "B T"], seeds: Seeds
    ) -> Float[Array, "B T E"]:
        """Returns the normalized sum, in the width of the tables. Positions restart in each sequence."""
        config, length = self.config, input_ids.shape[1]
        forms = operations(self.runtime)
        summed = self.token.table[...][input_ids]
        if config.positions == "learned":
            # Positions restart in each sequence, so none reaches the row's length: a part of the table is enough.
            first = config.position_offset
            summed += forms.look_up(self.position.table[...][first : first + length], positions)
        elif config.positions == "sinusoidal":
            # "In the embedding layers, we multiply those weights by sqrt(d_model)": Vaswani et al. 2017, section 3.4.
            summed *= math.sqrt(config.table_width)
            # Sliced as a traced array, since the length of an exported program is symbolic.
            table = jnp.asarray(sinusoids(config.max_positions, config.table_width))
            summed += forms.look_up(table[:length], positions)
        # A table of one row needs no look-up, so segment ids of other values cannot read past it.
        if config.segment_types == 1:
            summed += self.segment.table[...][None]
        elif config.segment_types:
            summed += forms.look_up(self.segment.table[...], segment_ids)
        if forms.narrows_embeddings:
            summed = summed.astype(self.runtime.dtype)
        embedded = self.norm(summed) if config.embedding_norm else summed.astype(self.runtime.dtype)
        return forms.dropout(embedded, config.dropout, seeds)

    def project(self, vectors: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        """Returns the first layer's input."""
        projected = self.projection(vectors) if self.config.embedding_width else vectors
        if self.config.directions > 1:
            projected = jnp.concatenate([projected] * self.config.directions, axis=-1)
        return self.runtime.placement.constrain("hidden", projected)
