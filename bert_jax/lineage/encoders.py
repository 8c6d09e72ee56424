"""Encoders without attention: recurrent layers, by a scan over positions, and the feed-forward language model."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from bert_jax.config import ModelConfig
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


# By model.encoder. rnn is h = tanh(W x + U h' + b), as torch.nn.RNN (Elman 1990; his own units are sigmoid).
CELLS = {
    "rnn": Cell(1, 1, lambda gates, state: (jnp.tanh(gates[:, 0]),)),
    "lstm": Cell(4, 2, lstm),
    "bilstm": Cell(4, 2, lstm),
}


class RecurrentLayer(nnx.Module):
    """One layer in one direction, of width D and with C cells: C is D unless model.cell_width is set.

    input/kernel [*stack, D, G, C], input/bias [*stack, G, C], recurrent/kernel [*stack, D, G, C], and with
    model.cell_width also projection/kernel [*stack, C, D], which maps the cells' output to the output and state (Sak et
    al. 2014, section 2, without the non-recurrent projection; proj_size of torch.nn.LSTM).

    torch's second bias is added to the first. State and gates are float32, matmuls have the compute dtype.
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: Shape = ()) -> None:
        self.cell = CELLS[config.encoder]
        width, cells = config.layer_width, config.cell_width or config.layer_width

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
        self.projection = dense("projection", cells, (width,)) if config.cell_width else None
        self.sizes = (width, *(cells,) * (self.cell.states - 1))  # of the state's vectors
        self.bptt = config.bptt

    def __call__(
        self, hidden: Float[Array, "B T D"], starts: Bool[Array, "B T"], reverse: bool = False
    ) -> Float[Array, "B T D"]:
        """Returns the output at each position. The state is zero before a position where `starts` is true.

        With `reverse`, positions are read from the last to the first. With model.bptt = K, no gradient of the state
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
        """Returns the hidden states on these embeddings. Raises UserError if attention maps are requested."""
        if attention_maps:
            raise UserError(f"a model with model.encoder={self.config.encoder} has no attention maps")
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
    model.recurrent_residual, every layer but the lowest adds its input, after dropout, to its output (Peters et al.
    2018, section 3.4, and bilm/training.py of allenai/bilm-tf).
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        layer = BidirectionalLayer if config.directions > 1 else RecurrentLayer
        self.layers = layer(config, runtime=runtime, key=child_key(key, "layers"), stack=(config.layers,))
        self.config = config
        self.runtime = runtime

    def stack(self, hidden: Float[Array, "B T D"], sequence_ids: Int[Array, "B T"], key: Any, every: bool) -> Encoded:
        starts = jnp.pad(sequence_ids[:, 1:] != sequence_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        depth, placement = self.config.layers, self.runtime.placement
        seeds = None if key is None else row_seeds(key, (depth,), hidden.shape[0], placement)
        graph, params = nnx.split(self.layers)

        def apply(below: Array, part: tuple[Any, ...]) -> tuple[Array, Array | None]:
            own, seeds, lowest = part
            # The embeddings below the lowest layer had their dropout already.
            dropped = jnp.where(lowest, below, dropout(below, self.config.dropout, seeds))
            above = nnx.merge(graph, gathered(own, self.runtime))(dropped, starts)
            if self.config.recurrent_residual:
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
            (config.window, config.width),
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
    """One hidden layer over the embeddings of a position and the n - 1 before it, n = model.window.

    As in Bengio et al. 2003, section 2, without direct connections from the embeddings to the output. Positions before
    the start of a sequence count as vectors of zeros.
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.layers = WindowLayer(config, runtime=runtime, key=child_key(key, "layers"), stack=(1,))
        self.config = config
        self.runtime = runtime

    def stack(self, hidden: Float[Array, "B T D"], sequence_ids: Int[Array, "B T"], key: Any, every: bool) -> Encoded:
        length, vectors = hidden.shape[1], []
        for back in reversed(range(self.config.window)):
            earlier = jnp.pad(hidden, ((0, 0), (back, 0), (0, 0)))[:, :length]
            ids = jnp.pad(sequence_ids, ((0, 0), (back, 0)), constant_values=-1)[:, :length]
            vectors.append(jnp.where((ids == sequence_ids)[..., None], earlier, 0))  # zeros for another sequence
        graph, stacked = nnx.split(self.layers)
        # Parameters that are sharded over fsdp are gathered.
        layer = nnx.merge(graph, gathered(jax.tree.map(lambda leaf: leaf[0], stacked), self.runtime))
        last = self.runtime.rematerialized(layer)(jnp.stack(vectors, axis=2))
        return Encoded(last, hidden, last[None] if every else None)
