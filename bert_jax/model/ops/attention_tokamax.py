"""Attention by tokamax's fused kernels for NVIDIA GPUs, which take the range of keys of each query."""

import importlib.util

import jax.numpy as jnp
from absl import flags
from jaxtyping import Array, Float, Int

from bert_jax.model.placement import Placement

PACKAGE = "tokamax"
HEAD_MULTIPLE = 8
BLOCK = 128  # queries that the kernel for Hopper takes together; with a range for each, it takes whole blocks only
GENERATIONS = ("9", "10")  # compute capabilities: Hopper, Blackwell. Its backward pass has no kernel for others.


def is_installed() -> bool:
    """Returns whether the package can be imported, without importing it."""
    return importlib.util.find_spec(PACKAGE) is not None


def tokamax_attention(
    query: Float[Array, "B Q N H"],
    key: Float[Array, "B T N H"],
    value: Float[Array, "B T N H"],
    start: Int[Array, "B Q"],
    end: Int[Array, "B Q"],
    *,
    placement: Placement,
    implementation: str = "mosaic_gpu",
) -> Float[Array, "B Q N H"]:
    """Computes einsum_attention without dropout, where each query sees the keys from `start` up to before `end`.

    Neither pass has an array of T x T. `implementation` is a key of tokamax's table: mosaic_gpu, which needs Hopper or
    Blackwell, or xla for comparisons. (Its triton makes a mask in the backward pass.) The table and Mask are not part
    of tokamax's public interface, whose function takes lengths and windows only; 0.0.12 and 0.0.13 have both.

    XLA cannot partition the kernel, so the placement gives each device its shard of the rows and heads.
    """
    # Imported here, since the package is optional.
    from tokamax._src.ops.attention import api, base

    # tokamax defines flags of absl, and parses sys.argv for them, which has the flags of a command of bert_jax.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()

    def attend(query: Array, key: Array, value: Array, start: Array, end: Array) -> Array:
        count = query.shape[1]
        added = ((0, 0), (0, -count % BLOCK))  # these queries see all keys, and their results are dropped
        query = jnp.pad(query, (*added, (0, 0), (0, 0)))
        start, end = jnp.pad(start, added), jnp.pad(end, added, constant_values=key.shape[1])
        ranges = base.Mask(k_start=start[:, None], k_end=end[:, None])
        return api.IMPLEMENTATIONS[implementation](query, key, value, mask=ranges)[:, :count]

    names = ("heads", "heads", "heads", "sequence_ids", "sequence_ids")
    return placement.shard_kernel(attend, names)(query, key, value, start, end)
