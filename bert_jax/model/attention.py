"""Multi-head self-attention, isolated by sequence."""

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from bert_jax.config import ModelConfig
from bert_jax.model import attention_impl
from bert_jax.model.layers import Dense, Shape, affine, child_key
from bert_jax.model.runtime import Runtime


def visible_keys(query_sequences: Int[Array, "B Q"], key_sequences: Int[Array, "B T"]) -> Bool[Array, "B 1 Q T"]:
    """Which keys a query sees, by the sequence ids of both: those of its own sequence.

    Padding (id 0) so sees padding alone: no real query sees it, and its own softmax has something to rest on.
    """
    return (query_sequences[:, :, None] == key_sequences[:, None, :])[:, None]


class SelfAttention(nnx.Module):
    """Queries, keys and values by one matmul, N heads, an output projection (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape) -> None:
        heads = (config.heads, config.width // config.heads)

        def dense(name: str, inputs: Shape, outputs: Shape) -> Dense:
            deviation = config.initializer_range
            return Dense(inputs, outputs, deviation=deviation, runtime=runtime, key=child_key(key, name), stack=stack)

        self.qkv = dense("qkv", (config.width,), (3, *heads))
        self.output = dense("output", heads, (config.width,))
        self.head_width = heads[1]
        self.dropout_rate = config.attention_dropout
        self.runtime = runtime

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        visible: Bool[Array, "B 1 Q T"],
        seeds: UInt32[Array, "B 2"] | None,
        queries: Float[Array, "B Q D"] | None = None,
    ) -> Float[Array, "B Q D"]:
        """Attends from every slot of hidden, or from `queries`, vectors of some of its slots."""
        rate = 0.0 if seeds is None else self.dropout_rate
        kernel = attention_impl.choose(
            self.runtime.attention,
            platform=jax.default_backend(),
            compute_dtype=self.runtime.compute_dtype,
            head_width=self.head_width,
            dropout_rate=rate,
        )
        query, key, value = self._project(hidden, queries)
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

    def _project(
        self, hidden: Float[Array, "B T D"], queries: Float[Array, "B Q D"] | None
    ) -> tuple[Float[Array, "B Q N H"], Float[Array, "B T N H"], Float[Array, "B T N H"]]:
        if queries is None:
            query, key, value = _parts(self.qkv(hidden))
            return query, key, value
        kernel, bias = self.qkv.kernel[...], self.qkv.bias[...]
        query = affine(queries, kernel[:, 0], bias[0], 1, self.runtime)
        key, value = _parts(affine(hidden, kernel[:, 1:], bias[1:], 1, self.runtime))
        return query, key, value


def _parts(stacked: Float[Array, "B T K N H"]) -> tuple[Float[Array, "B T N H"], ...]:
    """The K arrays of axis 2. The gradient of lax.split is one concatenation, that of indexing a sum per part."""
    parts = jax.lax.split(stacked, (1,) * stacked.shape[2], axis=2)
    return tuple(part[:, :, 0] for part in parts)
