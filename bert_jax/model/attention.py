"""Multi-head self-attention: which keys a query sees, and how the distance between them enters."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.model.layers import Dense, Shape, child_key
from bert_jax.model.ops import attention_kernels, operations
from bert_jax.model.ops.attention_banded import banded_attention, saves
from bert_jax.model.ops.attention_splash import splash_attention
from bert_jax.model.positions import RelativeTable, rotate
from bert_jax.model.runtime import Runtime


class TokenPositions(NamedTuple):
    """Where vectors are in their row: the position in the row, the sequence, and the position in the sequence."""

    in_row: Int[Array, "B K"]
    sequence_ids: Int[Array, "B K"]
    in_sequence: Int[Array, "B K"]

    def at(self, positions: Int[Array, "B K"]) -> "TokenPositions":
        """Returns the entries at some positions of the row, where self covers the whole row."""
        return TokenPositions(positions, *(jnp.take_along_axis(part, positions, axis=1) for part in self[1:]))


def token_positions(sequence_ids: Int[Array, "B T"], positions: Int[Array, "B T"]) -> TokenPositions:
    """Returns the TokenPositions of whole rows, from the fields of a batch."""
    in_row = jax.lax.broadcasted_iota(jnp.int32, sequence_ids.shape, 1)
    return TokenPositions(in_row, sequence_ids, positions)


def visible_keys(
    queries: TokenPositions, keys: TokenPositions, *, window: int = 0, causal: bool = False
) -> Bool[Array, "B 1 Q T"]:
    """Returns which keys a query sees: those of its own sequence, and where causal none after the query.

    Unless `window` is 0, keys are at most so many positions away.
    Padding (sequence id 0) sees padding alone: no real query sees it, and its own softmax is over something.
    """
    visible = queries.sequence_ids[:, :, None] == keys.sequence_ids[:, None, :]
    ahead = keys.in_row[:, None, :] - queries.in_row[:, :, None]
    if window:
        visible &= jnp.abs(ahead) <= window
    if causal:
        visible &= ahead <= 0
    return visible[:, None]


def kernels(config: ModelConfig, runtime: Runtime, length: int) -> list[str]:
    """Returns the attention kernels of the layers of a model in training on rows of that length, each once, in order.

    An encoder without attention has the kernel `none`. Raises UserError for a requested kernel that cannot run
    (attention_kernels.choose).
    """
    if config.encoder != "transformer":
        if runtime.attention != "auto":
            raise UserError(
                f"model.encoder={config.encoder} has no attention, but model.attention is {runtime.attention}. "
                "Use --config.model.attention=auto"
            )
        return ["none"]
    found = (
        _kernel(
            config,
            runtime,
            length,
            local=not config.is_global(layer),
            dropout_rate=config.attention_dropout,
            needs_scores=config.relative != "none",
        )
        for layer in range(config.layers)
    )
    return list(dict.fromkeys(found))


def _kernel(
    config: ModelConfig,
    runtime: Runtime,
    length: int,
    *,
    local: bool,
    dropout_rate: float,
    needs_scores: bool,
    some_queries: bool = False,
) -> str:
    situation = attention_kernels.Situation(
        platform=runtime.platform or jax.default_backend(),
        compute_dtype=runtime.compute_dtype,
        head_width=config.width // config.heads,
        dropout_rate=dropout_rate,
        needs_scores=needs_scores,
        windows=config.window > 0,
        local=local,
        # The symbolic length of an exported program cannot be compared; such programs use einsum.
        narrow=local and runtime.attention == "auto" and saves(config.window, length),
        some_queries=some_queries,
        shardable=jax.device_count() == 1 or runtime.placement.shards_kernels,
    )
    return attention_kernels.choose(runtime.attention, situation)


class SelfAttention(nnx.Module):
    """Queries, keys and values by one matmul, N heads, an output projection (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape) -> None:
        heads, width = (config.heads, config.width // config.heads), (config.width,)
        dense = functools.partial(Dense, runtime=runtime, stack=stack, bias=config.bias)
        self.qkv = dense(width, (3, *heads), deviation=config.initializer_range, key=child_key(key, "qkv"))
        self.output = dense(heads, width, deviation=config.residual_deviation, key=child_key(key, "output"))
        if config.relative == "shaw":
            self.relative = RelativeTable(config, key=child_key(key, "relative"), stack=stack)
        self.config = config
        self.runtime = runtime

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        keys: TokenPositions,
        seeds: UInt32[Array, "B 2"] | None,
        *,
        local: bool = False,
        bias: Float[Array, "#B N Q T"] | None = None,
        queries: tuple[Float[Array, "B Q D"], TokenPositions] | None = None,
        with_map: bool = False,
    ) -> tuple[Float[Array, "B Q D"], Float[Array, "B N Q T"] | None]:
        """Attends from every position of hidden, or from `queries`: vectors of some positions, and where these are.

        local     within the window of the architecture
        bias      added to the scores
        with_map  whether to return the probabilities too, as they are before dropout
        """
        config, rate = self.config, 0.0 if seeds is None else self.config.attention_dropout
        query_positions = keys if queries is None else queries[1]
        query, key, value = operations(self.runtime).project_heads(
            hidden,
            None if queries is None else queries[0],
            self.qkv.kernel[...],
            None if self.qkv.bias is None else self.qkv.bias[...],
        )
        if config.positions == "rotary":
            base = config.rotary_base_local if local else config.rotary_base
            query, key = rotate(query, query_positions.in_sequence, base), rotate(key, keys.in_sequence, base)
        if config.relative == "shaw":
            in_row = keys.in_row[:1]  # the same in each row
            queried = in_row if queries is None else query_positions.in_row
            bias = self.relative(query, queried, in_row, self.runtime.precision)
        kernel = _kernel(
            config,
            self.runtime,
            hidden.shape[1],
            local=local,
            dropout_rate=rate,
            needs_scores=with_map or bias is not None,
            some_queries=queries is not None,
        )
        context, probabilities = self._attend(
            kernel, (query, key, value), query_positions, keys, local, rate, seeds, bias
        )
        context = self.runtime.placement.constrain("heads", context)
        return self.output(context), probabilities if with_map else None

    def _attend(
        self,
        kernel: str,
        heads: tuple[Array, Array, Array],
        queries: TokenPositions,
        keys: TokenPositions,
        local: bool,
        rate: float,
        seeds: UInt32[Array, "B 2"] | None,
        bias: Float[Array, "#B N Q T"] | None,
    ) -> tuple[Float[Array, "B Q N H"], Float[Array, "B N Q T"] | None]:
        """Returns the context by a kernel, and the probabilities where the kernel has them in memory."""
        config, runtime = self.config, self.runtime
        window = config.window if local else 0
        if kernel == "splash":
            context = splash_attention(
                *heads, keys.sequence_ids, window=window, causal=config.causal, placement=runtime.placement
            )
            return context, None
        if kernel == "banded":
            context = banded_attention(
                *heads,
                keys.sequence_ids,
                window=window,
                causal=config.causal,
                dropout_rate=rate,
                seeds=seeds,
                precision=runtime.precision,
            )
            return context, None
        # The kernels above find out by block what is visible; those below read a mask [B, 1, Q, T].
        visible = visible_keys(queries, keys, window=window, causal=config.causal)
        if kernel == "cudnn":
            return attention_kernels.cudnn_attention(*heads, visible), None
        attend: Any = functools.partial(
            attention_kernels.einsum_attention, dropout_rate=rate, precision=runtime.precision
        )
        if runtime.remat == "attention":
            attend = jax.checkpoint(attend)
        return attend(*heads, visible, bias=bias, seeds=seeds)
