"""One layer of the encoder: attention and feed-forward on residual paths, with a norm before or after each."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from bert_jax.config import ModelConfig
from bert_jax.model.activations import activation
from bert_jax.model.attention import SelfAttention
from bert_jax.model.layers import Dense, LayerNorm, Shape, child_key
from bert_jax.model.lora import adapted, add_adapters
from bert_jax.model.ops import operations
from bert_jax.model.runtime import Runtime
from bert_jax.model.token_positions import TokenPositions

ATTENTION_PROBABILITIES, ATTENTION_OUTPUT, FEED_FORWARD_OUTPUT = range(3)  # the places where a layer drops out
SITES = 3

ATTENTION_PARTS = ("attention", "attention_norm")
FEED_FORWARD_PARTS = ("feed_forward", "feed_forward_norm")
# By model.shared_layers, the parts of a layer whose parameters all layers share.
SHARED_PARTS = {
    "none": (),
    "all": ATTENTION_PARTS + FEED_FORWARD_PARTS,
    "attention": ATTENTION_PARTS,
    "feed_forward": FEED_FORWARD_PARTS,
}


class LayerType(NamedTuple):
    """The properties in which layers of one stack may differ."""

    first: bool  # the first layer of a stack whose first layer has no norm before attention
    local: bool  # attends within the window only


class FeedForward(nnx.Module):
    """Two matmuls with an activation between (Vaswani et al. 2017, section 3.3), which may be gated (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape) -> None:
        width, inner = (config.width,), (config.feed_forward,)
        through = (2, *inner) if config.gated else inner
        dense = functools.partial(Dense, runtime=runtime, stack=stack, bias=config.bias)
        self.input = dense(width, through, deviation=config.initializer_range, key=child_key(key, "input"))
        self.output = dense(inner, width, deviation=config.residual_deviation, key=child_key(key, "output"))
        shapes = {"input": (width, through), "output": (inner, width)}
        add_adapters(self, "encoder/layers/feed_forward", config, shapes, runtime=runtime, key=key, stack=stack)
        self.gated = config.gated
        self.placement = runtime.placement
        self.runtime, self.unrolled = runtime, runtime.unrolled(config.layers)
        self.activation = activation(config.activation, again=operations(runtime).recomputes_activation)

    def __call__(
        self, hidden: Float[Array, "B T D"], seeds: UInt32[Array, "B 2"] | None = None
    ) -> Float[Array, "B T D"]:
        """Maps hidden states to those of the same positions; seeds are for the dropout of adapters."""
        inner = self.placement.constrain("inner", adapted(self, "input", self.input(hidden), hidden, seeds))
        output = functools.partial(self._output, seeds=seeds)
        return operations(self.runtime).feed_forward_output(output, inner, self.unrolled)

    def _output(self, inner: Float[Array, "B T *inner"], seeds: UInt32[Array, "B 2"] | None) -> Float[Array, "B T D"]:
        if self.gated:
            through, gate = jax.lax.split(inner, (1, 1), axis=2)
            active = self.activation(through[:, :, 0]) * gate[:, :, 0]
        else:
            active = self.activation(inner)
        return adapted(self, "output", self.output(active), active, seeds)


class EncoderLayer(nnx.Module):
    """Attention, then feed-forward, each with a residual connection.

    model.norm is post (a norm after each sum; Vaswani et al. 2017, section 3.1), pre (a norm before attention and
    before feed-forward; Xiong et al. 2020) or pre_but_first (pre without the first layer's norm before attention).
    Parameters have the leading shape `stack`, or (1,) in the parts that model.shared_layers shares.
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape) -> None:
        norm = functools.partial(
            LayerNorm, config.width, epsilon=config.layer_norm_epsilon, runtime=runtime, bias=config.bias
        )
        shared = SHARED_PARTS[config.shared_layers]
        stacks = {name: (1,) if name in shared else stack for name in SHARED_PARTS["all"]}

        def part(name: str, module: Any) -> Any:
            return module(config, runtime=runtime, key=child_key(key, name), stack=stacks[name])

        self.attention = part("attention", SelfAttention)
        self.attention_norm = norm(stack=stacks["attention_norm"])
        self.feed_forward = part("feed_forward", FeedForward)
        self.feed_forward_norm = norm(stack=stacks["feed_forward_norm"])
        self.config = config
        self.runtime, self.placement = runtime, runtime.placement

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        layer_type: LayerType,
        keys: TokenPositions,
        seeds: UInt32[Array, "3 B 2"] | None,
        *,
        bias: Float[Array, "1 N T T"] | None = None,
        queries: Int[Array, "B Q"] | None = None,
        with_map: bool = False,
    ) -> tuple[Float[Array, "B Q D"], Float[Array, "B N Q T"] | None]:
        """Returns the next hidden state of every position, or of `queries` only; and the attention map if asked for.

        bias   added to the scores of all positions in each row
        """
        config, rate = self.config, self.config.dropout
        seed = [None] * SITES if seeds is None else seeds
        seen = hidden if config.norm == "post" else self._before_attention(hidden, layer_type)
        # The residual path holds all positions, or only those that have queries.
        residual, selected = hidden, None
        if queries is not None:
            residual, positions = gather_positions(hidden, queries), keys.at(queries)
            selected = (residual if config.norm == "post" else gather_positions(seen, queries)), positions
            bias = None if bias is None else gather_queries(bias, queries)
        attended, attention_map = self.attention(
            seen,
            keys,
            seed[ATTENTION_PROBABILITIES],
            local=layer_type.local,
            bias=bias,
            queries=selected,
            with_map=with_map,
        )
        drop = operations(self.runtime).dropout
        attended = drop(attended, rate, seed[ATTENTION_OUTPUT])
        if config.norm == "post":
            hidden = self._placed(self.attention_norm(residual + attended))
            changed = drop(self.feed_forward(hidden, seed[FEED_FORWARD_OUTPUT]), rate, seed[FEED_FORWARD_OUTPUT])
            return self._placed(self.feed_forward_norm(hidden + changed)), attention_map
        hidden = self._placed(residual + attended)
        changed = self.feed_forward(self.feed_forward_norm(hidden), seed[FEED_FORWARD_OUTPUT])
        return self._placed(hidden + drop(changed, rate, seed[FEED_FORWARD_OUTPUT])), attention_map

    def _placed(self, hidden: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        return self.placement.constrain("hidden", hidden)

    def _before_attention(self, hidden: Float[Array, "B T D"], layer_type: LayerType) -> Float[Array, "B T D"]:
        return hidden if layer_type.first else self.attention_norm(hidden)


def gather_positions(hidden: Float[Array, "B T D"], positions: Int[Array, "B K"]) -> Float[Array, "B K D"]:
    """Returns the vectors at K positions of each row, exactly.

    A one-hot matmul, because its gradient is a matmul too. The gradient of a gather is a scatter, which is serial on
    a CPU and has no fixed order on a GPU.
    """
    chosen = jax.nn.one_hot(positions, hidden.shape[1], dtype=hidden.dtype)
    return jnp.einsum("bkt,btd->bkd", chosen, hidden, precision=jax.lax.Precision.HIGHEST)


def gather_queries(bias: Float[Array, "1 N T T"], positions: Int[Array, "B Q"]) -> Float[Array, "B N Q T"]:
    """Returns the bias of the queries at Q positions of each row, exactly, from that of all queries of any row.

    A one-hot matmul, for the reason in gather_positions.
    """
    chosen = jax.nn.one_hot(positions, bias.shape[2], dtype=bias.dtype)
    return jnp.einsum("bqs,nst->bnqt", chosen, bias[0], precision=jax.lax.Precision.HIGHEST)
