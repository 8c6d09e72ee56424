"""A positional encoding of its own: ALiBi, a penalty on attention scores that grows with the distance.

Press et al. 2022, section 3, in its symmetric form for encoders.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from bert_jax.model.embeddings import add_attention_bias


class Alibi(nnx.Module):
    def __init__(self, config, *, key):
        self.slopes = tuple(2.0 ** (-8.0 * np.arange(1, config.heads + 1) / config.heads))

    def __call__(self, query_positions, key_positions):
        distance = jnp.abs(query_positions[:, :, None] - key_positions[:, None, :]).astype(jnp.float32)
        return -jnp.array(self.slopes, jnp.float32)[None, :, None, None] * distance[:, None]


add_attention_bias("alibi", Alibi)
