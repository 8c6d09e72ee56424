"""Encoders without attention: recurrent layers, by a scan over positions, and the feed-forward language model."""

import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from bert_jax.config import EncoderConfig, ModelConfig
from bert_jax.config.options import at_least, option
from bert_jax.errors import UserError
from bert_jax.model.dropout import dropout, row_seeds
from bert_jax.model.layers import Dense, Shape, child_key
from bert_jax.model.runtime import Runtime
from bert_jax.model.transformer import Encoded, apply_frozen_first, gather_positions, gathered

State = tuple[Array, ...]  # float32 [B, D] or [B, C] each; the first is the output


class Cell(NamedTuple):
    """A recurrent cell: how many gates and state vectors it has, and its step."""

    gates: int
    states: int
    step: Callable[[Float[Array, "B G C"], State], State]


def lstm(gates: Float[Array, "B 4 C"], state: State) -> State:
    """An LSTM with forget gates and no peepholes: gates i, f, g, o as in torch.nn.LSTM (Gers et al. 2000)."""
    keep_in, keep, new, out = (gates[:, gate] for gate in range(4))
    cell = jax.nn.sigmoid(keep) * state[1] + jax.nn.sigmoid(keep_in) * jnp.tanh(new)
    return jax.nn.sigmoid(out) * jnp.tanh(cell), cell


# Elman's cell is h = tanh(W x + U h' + b), as torch.nn.RNN (Elman 1990; his own units are sigmoid).
ELMAN = Cell(1, 1, lambda gates, state: (jnp.tanh(gates[:, 0]),))
LONG_SHORT_TERM = Cell(4, 2, lstm)


class RecurrentLayer(nnx.Module):
    """One layer in one direction, of width D and with C cells: C is D unless encoder.cell_width is set.

    input/kernel [*stack, D, G, C], input/bias [*stack, G, C], recurrent/kernel [*stack, D, G, C], and with
    encoder.cell_width also projection/kernel [*stack, C, D], which maps the cells' output to the output and state (Sak
    et al. 2014, section 2, without the non-recurrent projection; proj_size of torch.nn.LSTM).

    torch's second bias is added to the first. State and gates are float32, matmuls have the compute dtype.
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape = ()) -> None:
        encoder: Any = config.encoder
        self.cell: Cell = encoder.cell
        width, cells = config.layer_width, encoder.cell_width or config.layer_width

        def dense(name: str, inputs: int, outputs: Shape, bias: bool = False) -> Dense:
            return Dense(
                (inputs,),
                outputs,
                deviation=config.initializer_range,
                runtime=runtime,
                key=child_key(key, name),
                stack=stack,
                bias=bias,
            )

        gates = (self.cell.gates, cells)
        self.input, self.recurrent = dense("input", width, gates, config.bias), dense("recurrent", width, gates)
        self.projection = dense("projection", cells, (width,)) if encoder.cell_width else None
        self.sizes = (width, *(cells,) * (self.cell.states - 1))  # of the state's vectors
        self.bptt = encoder.bptt

    def __call__(
        self, hidden: Float[Array, "B T D"], starts: Bool[Array, "B T"], reverse: bool = False
    ) -> Float[Array, "B T D"]:
        """Returns the output at each position. The state is zero before a position where `starts` is true.

        With `reverse`, positions are read from the last to the first. With encoder.bptt = K, no gradient of the state
        crosses the borders before positions K, 2K, ... of the row, in either direction.
        """
        rows, length, _ = hidden.shape
        # In reverse, the border before position K is crossed on the way to position K - 1.
        cut = (jnp.arange(length) + reverse) % self.bptt == 0 if self.bptt else jnp.zeros(length, bool)

        def step(state: State, at: tuple[Array, Array, Array]) -> tuple[State, Array]:
            projected, start, cut = at
            if self.bptt:
                state = jax.tree.map(lambda value: jnp.where(cut, jax.lax.stop_gradient(value), value), state)
            state = jax.tree.map(lambda value: jnp.where(start[:, None], 0.0, value), state)
            state = self.cell.step(projected + self.recurrent(state[0], jnp.float32), state)
            if self.projection is not None:
                state = (self.projection(state[0], jnp.float32), *state[1:])
            return state, state[0].astype(hidden.dtype)

        projected = self.input(hidden, jnp.float32).swapaxes(0, 1)  # one matmul for all positions
        first = tuple(jnp.zeros((rows, size), jnp.float32) for size in self.sizes)
        return jax.lax.scan(step, first, (projected, starts.T, cut), reverse=reverse)[1].swapaxes(0, 1)


class BidirectionalLayer(nnx.Module):
    """A layer in each of ELMo's two language models, which do not see each other (Peters et al. 2018, section 3.1).

    Hidden states are [forward; backward], and a direction reads its own half of the layer below. In a stacked
    bidirectional LSTM both would read all of it, and the next token with it.
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape = ()) -> None:
        self.forward, self.backward = (
            RecurrentLayer(config, runtime=runtime, key=child_key(key, name), stack=stack)
            for name in ("forward", "backward")
        )

    def __call__(self, hidden: Float[Array, "B T D"], starts: Bool[Array, "B T"]) -> Float[Array, "B T D"]:
        """As RecurrentLayer. The backward state is zero after the last position of a sequence."""
        forward, backward = by_direction(hidden)
        # Read backward, a sequence begins at its last position, before the start of the next one.
        ends = jnp.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=True)
        return jnp.concatenate([self.forward(forward, starts), self.backward(backward, ends, reverse=True)], axis=-1)


def by_direction(hidden: Float[Array, "B T D"]) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"]]:
    """Splits hidden states into their forward and backward halves."""
    forward, backward = jnp.split(hidden, 2, axis=-1)
    return forward, backward


class Encoder(nnx.Module):
    """The base class of these encoders: the interface of model/transformer.py's Encoder, but without attention maps.

    A sequence begins with a state of zeros, so packed rows equal padded ones.
    """

    config: ModelConfig
    runtime: Runtime

    @abc.abstractmethod
    def stack(self, hidden: Float[Array, "B T D"], sequence_ids: Int[Array, "B T"], key: Any, every: bool) -> Encoded:
        """Returns the last layer's hidden states on these embeddings; with `every`, all layers' states, too."""

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        sequence_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        dropout_key: PRNGKeyArray | None,
        *,
        unpacked: bool = False,  # for attention alone
        all_layers: bool = False,
        attention_maps: bool = False,
    ) -> Encoded:
        """Returns the hidden states on these embeddings.

        Raises:
            UserError: attention maps are requested.
        """
        if attention_maps:
            raise UserError(f"a model with model.encoder={self.config.encoder.kind} has no attention maps")
        return self.stack(hidden, sequence_ids, dropout_key, all_layers)

    def at_positions(
        self,
        hidden: Float[Array, "B T D"],
        sequence_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        wanted: Int[Array, "B K"],
        dropout_key: PRNGKeyArray | None,
        *,
        unpacked: bool = False,
    ) -> Float[Array, "B K D"]:
        """Returns the output at the K wanted positions of each row. All positions are computed."""
        return gather_positions(self(hidden, sequence_ids, positions, dropout_key).last, wanted)


class RecurrentEncoder(Encoder):
    """A stack of L recurrent layers, stored as one layer [L, ...].

    Dropout applies to the outputs of every layer but the last, as in torch.nn.LSTM; Embeddings has its own. With
    encoder.residual, every layer but the lowest adds its input, after dropout, to its output (Peters et al.
    2018, section 3.4, and bilm/training.py of allenai/bilm-tf).
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        layer = BidirectionalLayer if config.directions > 1 else RecurrentLayer
        self.layers = layer(config, runtime=runtime, key=child_key(key, "layers"), stack=(config.layers,))
        self.config = config
        self.runtime = runtime

    def stack(self, hidden: Float[Array, "B T D"], sequence_ids: Int[Array, "B T"], key: Any, every: bool) -> Encoded:
        # The first position of a row always starts a sequence, or padding.
        starts = jnp.pad(sequence_ids[:, 1:] != sequence_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        depth, placement = self.config.layers, self.runtime.placement
        encoder: Any = self.config.encoder
        seeds = None if key is None else row_seeds(key, (depth,), hidden.shape[0], placement)
        graph, params = nnx.split(self.layers)

        def apply(below: Array, part: tuple[Any, ...]) -> tuple[Array, Array | None]:
            own, seeds, lowest = part
            # The embeddings below the lowest layer had their dropout already.
            # `lowest` is an array, because a scan runs one program for all layers.
            dropped = jnp.where(lowest, below, dropout(below, self.config.dropout, seeds))
            above = nnx.merge(graph, gathered(own, self.runtime))(dropped, starts)
            if encoder.residual:
                above = jnp.where(lowest, above, above + dropped)
            return above, above if every else None

        layer = self.runtime.rematerialized(apply)

        def loop(hidden: Array, stacked: tuple[Any, ...], layers: slice) -> tuple[Array, Array | None]:
            return self._loop(layer, hidden, stacked, layers.stop - layers.start)

        stacked = (params, seeds, jnp.arange(depth) == 0)
        last, layers = apply_frozen_first(loop, hidden, stacked, depth, self.runtime.frozen_layers)
        return Encoded(last, hidden, layers)

    def _loop(
        self, layer: Callable[..., Any], hidden: Array, stacked: tuple[Any, ...], depth: int
    ) -> tuple[Array, Array | None]:
        if not self.runtime.unrolled(self.config.layers):
            return jax.lax.scan(layer, hidden, stacked)
        outputs = []
        for index in range(depth):
            hidden, output = layer(hidden, jax.tree.map(lambda leaf, index=index: leaf[index], stacked))
            outputs.append(output)
        return hidden, None if outputs[0] is None else jnp.stack(outputs)


class WindowLayer(nnx.Module):
    """tanh(H x + d) over the vectors of the last n positions, oldest first: window/kernel [*stack, n, D, D], bias."""

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape) -> None:
        self.window = Dense(
            (config.encoder.window, config.width),  # type: ignore[attr-defined]
            (config.width,),
            deviation=config.initializer_range,
            runtime=runtime,
            key=child_key(key, "window"),
            stack=stack,
            bias=config.bias,
        )

    def __call__(self, vectors: Float[Array, "B T n D"]) -> Float[Array, "B T D"]:
        return jnp.tanh(self.window(vectors))


class FeedForwardEncoder(Encoder):
    """One hidden layer over the embeddings of a position and the n - 1 before it, n = encoder.window.

    As in Bengio et al. 2003, section 2, without direct connections from the embeddings to the output. Positions before
    the start of a sequence count as vectors of zeros.
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.layers = WindowLayer(config, runtime=runtime, key=child_key(key, "layers"), stack=(1,))
        self.config = config
        self.runtime = runtime

    def stack(self, hidden: Float[Array, "B T D"], sequence_ids: Int[Array, "B T"], key: Any, every: bool) -> Encoded:
        length, vectors = hidden.shape[1], []
        encoder: Any = self.config.encoder
        for back in reversed(range(encoder.window)):
            earlier = jnp.pad(hidden, ((0, 0), (back, 0), (0, 0)))[:, :length]
            # -1 is the id of no sequence, so positions before the row never match.
            ids = jnp.pad(sequence_ids, ((0, 0), (back, 0)), constant_values=-1)[:, :length]
            vectors.append(jnp.where((ids == sequence_ids)[..., None], earlier, 0))  # zeros for another sequence
        graph, stacked = nnx.split(self.layers)
        # The stack has one layer, whose parameters are gathered if they are sharded over fsdp.
        layer = nnx.merge(graph, gathered(jax.tree.map(lambda leaf: leaf[0], stacked), self.runtime))
        last = self.runtime.rematerialized(layer)(jnp.stack(vectors, axis=2))
        return Encoded(last, hidden, last[None] if every else None)


# The values of fields for attention, norms and positions in a model without them.
WITHOUT_ATTENTION: dict[str, Any] = {
    "causal": True,
    "positions": "none",
    "relative": "none",
    "norm": "post",
    "shared_layers": "none",
    "gated": False,
    "window": 0,
}


@dataclass(frozen=True)
class RecurrentConfig(EncoderConfig):
    """The options of all recurrent encoders."""

    module = RecurrentEncoder
    required = WITHOUT_ATTENTION
    cell: ClassVar[Cell]
    cell_width: ClassVar[int] = 0

    bptt: int = option(
        0, "no gradient of the state crosses a multiple of so many positions; 0: all cross", valid=at_least(0)
    )
    residual: bool = option(False, "all layers but the lowest add their input")

    def check(self, model: ModelConfig) -> None:
        if self.bptt > model.max_positions:
            raise UserError(
                f"model.encoder.bptt is {self.bptt}, longer than any row. Use at most model.max_positions, "
                f"{model.max_positions}"
            )

    def check_rows(self, length: int, name: str) -> None:
        if self.bptt > length:
            raise UserError(
                f"model.encoder.bptt is {self.bptt}, longer than the rows of {name}, {length}; use at most "
                f"--config.model.encoder.bptt={length}, or 0 for gradients through whole sequences"
            )

    def computes_as(self, other: EncoderConfig) -> bool:
        # bptt changes gradients, not outputs.
        return isinstance(other, type(self)) and self == replace(other, bptt=self.bptt)

    def layer_flops(self, model: ModelConfig) -> int:
        """Each gate has a matmul with the input and one with the state."""
        # A multiply-add is two FLOPs. The last term is the projection, which exists only with cell_width.
        width, cells = model.layer_width, self.cell_width
        return model.layers * (4 * self.cell.gates * width * (cells or width) + 2 * cells * width)


@dataclass(frozen=True)
class RNN(RecurrentConfig, kind="rnn"):
    """Elman's network."""

    cell = ELMAN


@dataclass(frozen=True)
class LSTM(RecurrentConfig, kind="lstm"):
    """The LSTM, from left to right."""

    cell = LONG_SHORT_TERM
    cell_width: int = option(  # type: ignore[misc]
        0, "cells, whose output is projected to the layers' width; 0: that width", valid=at_least(0)
    )


@dataclass(frozen=True)
class BiLSTM(LSTM, kind="bilstm"):
    """ELMo's two LSTMs, one in each direction."""

    required = WITHOUT_ATTENTION | {"causal": False}
    directions = 2
    logits = ("forward_lm_logits", "backward_lm_logits")
    objective = "bidirectional_lm"


@dataclass(frozen=True)
class FeedForward(EncoderConfig, kind="feed_forward"):
    """One tanh layer over the last few tokens."""

    module = FeedForwardEncoder
    required = WITHOUT_ATTENTION | {"layers": 1}

    window: int = option(4, "tokens that each position sees, itself included", valid=at_least(1))

    def layer_flops(self, model: ModelConfig) -> int:
        return 2 * self.window * model.width**2
