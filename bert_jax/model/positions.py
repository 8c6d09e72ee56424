"""Encodings of positions: sinusoids, rotations, and biases of attention scores by distance."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray

from bert_jax.config import MODEL_CHOICES, ModelConfig
from bert_jax.model.layers import Shape, child_key, truncated_normal

BUCKETS = 32  # Raffel et al. 2020, section 2.1
_SINUSOID_BASE = 10_000.0  # Vaswani et al. 2017, section 3.5


def sinusoids(length: int, width: int) -> Float32[np.ndarray, "T D"]:
    """Returns sines in the even columns, cosines in the odd ones (Vaswani et al. 2017, section 3.5)."""
    angles = np.arange(length)[:, None] / _SINUSOID_BASE ** (np.arange(0, width, 2) / width)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, width).astype(np.float32)


def rotate(vectors: Float[Array, "B K N H"], positions: Int[Array, "B K"], base: float) -> Float[Array, "B K N H"]:
    """Rotates coordinates i and i + H/2 by an angle that grows with the position (Su et al. 2021, section 3.4.2).

    The pairing of halves is that of GPT-NeoX and ModernBERT. Computed in float32.
    """
    speeds = rotation_speeds(vectors.shape[-1], base)
    angles = (positions[:, :, None].astype(jnp.float32) * speeds[None, None])[:, :, None]
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(vectors.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(vectors.dtype)


def rotation_speeds(width: int, base: float) -> Float32[np.ndarray, "K"]:
    """Returns the angle by which each pair of coordinates rotates from one position to the next: base^(-2i/H).

    Rounded to float32 where transformers rounds, after the power and after the division: at position 8,000 the last
    bit of a speed changes the angle by 3e-4.
    """
    powers = np.power(float(base), np.arange(0, width, 2) / width).astype(np.float32)
    return np.float32(1) / powers


class RelativeTable(nnx.Module):
    """A vector for each distance up to k, whose product with the query is added to the score (Shaw et al. 2018,
    section 3.2): table [*stack, 2k+1, H]. For keys only: section 4.3 finds that vectors for values add nothing."""

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
        """Returns the float32 bias of the scaled scores.

        Positions that are the same in each row are given once (B = 1).
        """
        query = query * (1.0 / math.sqrt(query.shape[-1]))
        table = self.table[...].astype(query.dtype)
        by_distance = jnp.einsum("bqnh,kh->bnqk", query, table, precision=precision, preferred_element_type=jnp.float32)
        behind = jnp.clip(query_positions[:, :, None] - key_positions[:, None, :], -self.distance, self.distance)
        # A one-hot matmul, for the reason in layer.gather_positions.
        chosen = jax.nn.one_hot(behind + self.distance, table.shape[0], dtype=jnp.float32)
        if chosen.shape[0] == 1:
            return jnp.einsum("bnqk,qtk->bnqt", by_distance, chosen[0], precision=jax.lax.Precision.HIGHEST)
        return jnp.einsum("bnqk,bqtk->bnqt", by_distance, chosen, precision=jax.lax.Precision.HIGHEST)


class DistanceBuckets(nnx.Module):
    """A bias for each head and bucket of distances, shared by all layers (Raffel et al. 2020, section 2.1): table
    [32, N]."""

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray) -> None:
        shape = (BUCKETS, config.heads)
        self.table = nnx.Param(truncated_normal(child_key(key, "table"), shape, config.initializer_range))
        self.distance = config.relative_distance

    def __call__(self, query_positions: Int[Array, "B Q"], key_positions: Int[Array, "B T"]) -> Float[Array, "B N Q T"]:
        """Returns the float32 bias of the scores."""
        ahead = key_positions[:, None, :] - query_positions[:, :, None]
        # A one-hot matmul, for the reason in layer.gather_positions.
        chosen = jax.nn.one_hot(distance_bucket(ahead, self.distance), BUCKETS, dtype=jnp.float32)
        return jnp.einsum("bqtk,kn->bnqt", chosen, self.table[...], precision=jax.lax.Precision.HIGHEST)


def distance_bucket(ahead: Int[Array, "*shape"], longest: int) -> Int[Array, "*shape"]:
    """Returns the bucket of a distance, key minus query (Raffel et al. 2020, as in the code of mesh-tensorflow).

    Each direction has half of the buckets. Half of those hold single distances, and the others ranges that grow by a
    constant factor up to `longest`.
    """
    side = BUCKETS // 2
    exact = side // 2
    distances = np.arange(max(longest, exact) + 1)
    share = np.log(np.maximum(distances, exact).astype(np.float32) / exact) / math.log(max(longest / exact, 2.0))
    growing = exact + (share * (side - exact)).astype(np.int32)
    buckets = jnp.asarray(np.where(distances < exact, distances, np.minimum(growing, side - 1)))
    return buckets[jnp.minimum(jnp.abs(ahead), len(distances) - 1)] + jnp.where(ahead > 0, side, 0)


# By model.relative, the modules that add a bias to the scores of every layer; add_attention_bias adds to them.
ATTENTION_BIASES: dict[str, Callable[..., nnx.Module]] = {"buckets": DistanceBuckets}


def add_attention_bias(name: str, module: Callable[..., nnx.Module]) -> None:
    """Makes a bias of attention scores available as model.relative=NAME.

    module(config, key=...) gives an nnx.Module, which all layers share. It is called with the query positions [1, T]
    and the key positions [1, T] in the row, which are the same in each row, and returns the finite float32 bias
    [1, N, T, T] that is added to the scaled scores. Attention then runs by einsum, since fused kernels take no bias.
    """
    ATTENTION_BIASES[name] = module
    if name not in MODEL_CHOICES["relative"]:
        MODEL_CHOICES["relative"] += (name,)
