"""Random heads of packed rows, and the comparison of an attention kernel with einsum_attention."""

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.model.attention.kernels import KernelOptions, einsum_attention
from bert_jax.model.embeddings import token_positions, visible_keys

HIGHEST = jax.lax.Precision.HIGHEST
PLAIN = KernelOptions(precision=HIGHEST, interpret=True)


def rows(slots: int, width: int = 8) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Queries, keys and values, and sequence ids of a packed row with padding and of a full one."""
    heads = tuple(jax.random.normal(jax.random.key(part), (2, slots, 3, width)) for part in range(3))
    third = slots // 3
    packed = np.repeat([1, 2, 0], [third, slots - third - 3, 3])
    return heads, jnp.asarray(np.stack([packed, np.ones(slots, int)]), jnp.int32)


def assert_equals_einsum(kernel, heads, sequence_ids, options: KernelOptions, seeds=None) -> None:
    """Compares a loss over the positions that are not padding, and its gradients."""
    places = token_positions(sequence_ids, sequence_ids)
    visible = visible_keys(places, places, window=options.window, causal=options.causal)
    real = (sequence_ids > 0)[:, :, None, None]

    def plain(heads):
        return einsum_attention(heads, visible, seeds, options)[0]

    def loss(attend):
        return lambda *heads: jnp.where(real, jnp.sin(attend(heads)), 0).sum()

    wanted = jax.jit(jax.value_and_grad(loss(plain), (0, 1, 2)))(*heads)
    got = jax.jit(jax.value_and_grad(loss(kernel), (0, 1, 2)))(*heads)
    # A sum of many float32 numbers, whose order decides its last digits.
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-6, atol=1e-4)
    for ours, theirs in zip(got[1], wanted[1], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
