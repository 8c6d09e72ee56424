"""Multi-head self-attention: who sees whom, and how far apart they are."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from bert_jax.config import ModelConfig
from bert_jax.model import attention_impl
from bert_jax.model.attention_banded import banded_attention, saves
from bert_jax.model.attention_splash import splash_attention
from bert_jax.model.layers import Dense, Shape, add_bias_by_product, affine, child_key
from bert_jax.model.positions import RelativeTable, rotate
from bert_jax.model.runtime import Runtime


class TokenPositions(NamedTuple):
    """Where vectors stand in their row: the slot, the sequence that it belongs to, the position in that."""

    slots: Int[Array, "B K"]
    sequence_ids: Int[Array, "B K"]
    positions: Int[Array, "B K"]

    def at(self, slots: Int[Array, "B K"]) -> "TokenPositions":
        """Those of some slots, of places that are a whole row's."""
        return TokenPositions(slots, *(jnp.take_along_axis(part, slots, axis=1) for part in self[1:]))


def token_positions(sequence_ids: Int[Array, "B T"], positions: Int[Array, "B T"]) -> TokenPositions:
    """The places of every slot of each row."""
    slots = jax.lax.broadcasted_iota(jnp.int32, sequence_ids.shape, 1)
    return TokenPositions(slots, sequence_ids, positions)


def visible_keys(
    queries: TokenPositions, keys: TokenPositions, *, window: int = 0, causal: bool = False
) -> Bool[Array, "B 1 Q T"]:
    """Which keys a query sees: those of its own sequence, at most `window` slots away unless that is 0, and if causal
    none behind it.

    Padding (sequence id 0) so sees padding alone: no real query sees it, and its own softmax has something to rest on.
    """
    visible = queries.sequence_ids[:, :, None] == keys.sequence_ids[:, None, :]
    ahead = keys.slots[:, None, :] - queries.slots[:, :, None]
    if window:
        visible &= jnp.abs(ahead) <= window
    if causal:
        visible &= ahead <= 0
    return visible[:, None]


def kernels(config: ModelConfig, runtime: Runtime, slots: int) -> list[str]:
    """The kernels that train the layers of a model on rows of so many slots, each once, in the order of the layers.

    Raises UserError for a kernel that is asked for and cannot run (attention_impl.choose).
    """
    found = (
        _kernel(
            config,
            runtime,
            slots,
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
    slots: int,
    *,
    local: bool,
    dropout_rate: float,
    needs_scores: bool,
    some_slots: bool = False,
) -> str:
    return attention_impl.choose(
        runtime.attention,
        platform=runtime.platform or jax.default_backend(),
        compute_dtype=runtime.compute_dtype,
        head_width=config.width // config.heads,
        dropout_rate=dropout_rate,
        needs_scores=needs_scores,
        windows=config.window > 0,
        local=local,
        # Not asked of the symbolic length of an exported program, which is of einsum.
        narrow=local and runtime.attention == "auto" and saves(config.window, slots),
        some_slots=some_slots,
        cut_by_hand=jax.device_count() == 1 or runtime.placement.cuts_kernels,
    )


class SelfAttention(nnx.Module):
    """Queries, keys and values by one matmul, N heads, an output projection (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape) -> None:
        heads = (config.heads, config.width // config.heads)

        def dense(name: str, inputs: Shape, outputs: Shape, deviation: float) -> Dense:
            return Dense(
                inputs,
                outputs,
                deviation=deviation,
                runtime=runtime,
                key=child_key(key, name),
                stack=stack,
                bias=config.bias,
            )

        self.qkv = dense("qkv", (config.width,), (3, *heads), config.initializer_range)
        self.output = dense("output", heads, (config.width,), config.residual_deviation)
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
        """Attends from every slot of hidden, or from `queries`, vectors of some of its slots and where they stand.

        local     within the window of the architecture
        bias      added to the scores
        with_map  whether to give the probabilities, too, as they are before dropout
        """
        config = self.config
        query, key, value = self._project(hidden, None if queries is None else queries[0])
        standing = keys if queries is None else queries[1]
        if config.positions == "rotary":
            base = config.rotary_base_local if local else config.rotary_base
            query, key = rotate(query, standing.positions, base), rotate(key, keys.positions, base)
        if config.relative == "shaw":
            slots = keys.slots[:1]  # the same in each row
            asked = slots if queries is None else standing.slots
            bias = self.relative(query, asked, slots, self.runtime.precision)
        rate = 0.0 if seeds is None else config.attention_dropout
        window = config.window if local else 0
        kernel = _kernel(
            config,
            self.runtime,
            hidden.shape[1],
            local=local,
            dropout_rate=rate,
            needs_scores=with_map or bias is not None,
            some_slots=queries is not None,
        )
        probabilities = None
        heads = (query, key, value)
        if kernel == "splash":
            context = splash_attention(
                *heads,
                keys.sequence_ids,
                window=window,
                causal=config.causal,
                placement=self.runtime.placement,
            )
        elif kernel == "banded":
            context = banded_attention(
                *heads,
                keys.sequence_ids,
                window=window,
                causal=config.causal,
                dropout_rate=rate,
                seeds=seeds,
                precision=self.runtime.precision,
            )
        else:
            visible = visible_keys(standing, keys, window=window, causal=config.causal)
            if kernel == "cudnn":
                context = attention_impl.cudnn_attention(*heads, visible)
            else:
                attend: Any = functools.partial(
                    attention_impl.einsum_attention, dropout_rate=rate, precision=self.runtime.precision
                )
                if self.runtime.remat == "attention":
                    attend = jax.checkpoint(attend)
                context, probabilities = attend(*heads, visible, bias=bias, seeds=seeds)
        context = self.runtime.placement.constrain("heads", context)
        return self.output(context), probabilities if with_map else None

    def _project(
        self, hidden: Float[Array, "B T D"], queries: Float[Array, "B Q D"] | None
    ) -> tuple[Float[Array, "B Q N H"], Float[Array, "B T N H"], Float[Array, "B T N H"]]:
        kernel = self.qkv.kernel[...]
        if self.runtime.on_tpu:
            asked = hidden if queries is None else queries
            query, key, value = (self._one(place, part) for place, part in enumerate((asked, hidden, hidden)))
            return query, key, value
        if queries is None:
            query, key, value = self._parts(self.qkv(hidden))
            return query, key, value
        first, others = (None, None) if self.qkv.bias is None else (self.qkv.bias[...][0], self.qkv.bias[...][1:])
        query = affine(queries, kernel[:, 0], first, 1, self.runtime)
        key, value = self._parts(affine(hidden, kernel[:, 1:], others, 1, self.runtime))
        return self.runtime.placement.constrain("heads", query), key, value

    def _one(self, place: int, vectors: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        """Queries (0), keys or values by their own product: on a TPU, parting one of all three is a pass over it."""
        found = affine(vectors, self.qkv.kernel[...][:, place], None, 1, self.runtime)
        if self.qkv.bias is not None:
            found = add_bias_by_product(found, self.qkv.bias[...][place], 8)
        return self.runtime.placement.constrain("heads", found)

    def _parts(self, stacked: Float[Array, "B T K N H"]) -> tuple[Float[Array, "B T N H"], ...]:
        """The K arrays of axis 2. The gradient of lax.split is one concatenation, that of indexing a sum per part."""
        stacked = self.runtime.placement.constrain("heads", stacked)
        parts = jax.lax.split(stacked, (1,) * stacked.shape[2], axis=2)
        return tuple(part[:, :, 0] for part in parts)
