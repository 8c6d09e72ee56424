"""Multi-head self-attention, isolated by sequence."""

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from bert_jax.config import ModelConfig
from bert_jax.model import attention_impl
from bert_jax.model.layers import Dense, Shape, child_key
from bert_jax.model.runtime import Runtime


def visible_keys(sequence_ids: Int[Array, "B T"]) -> Bool[Array, "B 1 T T"]:
    """Which keys (last axis) a query sees: those of its own sequence.

    Padding (id 0) so sees padding alone: no real query sees it, and its own softmax has something to stand on.
    """
    return (sequence_ids[:, :, None] == sequence_ids[:, None, :])[:, None]


class SelfAttention(nnx.Module):
    """Queries, keys and values by one matmul; N heads; an output projection (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape) -> None:
        heads = (config.heads, config.width // config.heads)
        common = {"deviation": config.initializer_range, "runtime": runtime, "stack": stack}
        self.qkv = Dense((config.width,), (3, *heads), key=child_key(key, "qkv"), **common)
        self.output = Dense(heads, (config.width,), key=child_key(key, "output"), **common)
        self.head_width = heads[1]
        self.dropout_rate = config.attention_dropout
        self.runtime = runtime

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        visible: Bool[Array, "B 1 T T"],
        seeds: UInt32[Array, "B 2"] | None,
    ) -> Float[Array, "B T D"]:
        rate = 0.0 if seeds is None else self.dropout_rate
        kernel = attention_impl.choose(
            self.runtime.attention,
            platform=jax.default_backend(),
            compute_dtype=self.runtime.compute_dtype,
            head_width=self.head_width,
            dropout_rate=rate,
        )
        qkv = self.qkv(hidden)
        query, key, value = (qkv[:, :, part] for part in range(3))
        if kernel == "cudnn":
            context = attention_impl.cudnn_attention(query, key, value, visible)
        else:
            context = attention_impl.einsum_attention(
                query,
                key,
                value,
                visible,
                dropout_rate=rate,
                seeds=seeds,
                precision=self.runtime.precision,
            )
        return self.output(context)
