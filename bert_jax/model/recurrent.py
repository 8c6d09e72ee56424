"""Stacks of recurrent layers: Elman's network and the LSTM, by a scan over the positions of a row."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.model.dropout import dropout, row_seeds
from bert_jax.model.encoder import Encoded, gathered
from bert_jax.model.layer import gather_positions
from bert_jax.model.layers import Dense, child_key
from bert_jax.model.runtime import Runtime

State = tuple[Array, ...]  # float32 [B, D] each; the first is the output


class Cell(NamedTuple):
    """A recurrent cell: the number of its gates, of the vectors of its state, and a step of it."""

    gates: int
    states: int
    step: Callable[[Float[Array, "B G D"], State], State]


def elman(gates: Float[Array, "B 1 D"], state: State) -> State:
    """h = tanh(W x + U h' + b), as torch.nn.RNN (Elman 1990; his own units are sigmoid)."""
    return (jnp.tanh(gates[:, 0]),)


def lstm(gates: Float[Array, "B 4 D"], state: State) -> State:
    """An LSTM with forget gates and no peepholes: gates i, f, g, o as in torch.nn.LSTM (Gers et al. 2000)."""
    keep_in, keep, new, out = (gates[:, gate] for gate in range(4))
    cell = jax.nn.sigmoid(keep) * state[1] + jax.nn.sigmoid(keep_in) * jnp.tanh(new)
    return jax.nn.sigmoid(out) * jnp.tanh(cell), cell


CELLS = {"rnn": Cell(1, 1, elman), "lstm": Cell(4, 2, lstm)}


class RecurrentLayer(nnx.Module):
    """One layer: input/kernel [*stack, D, G, D], input/bias [*stack, G, D], recurrent/kernel [*stack, D, G, D].

    torch has a second bias, which is added to the first. The state and the gates are float32, the matmuls have the
    compute dtype.
    """

    def __init__(
        self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray, stack: tuple[int, ...] = ()
    ) -> None:
        self.cell = CELLS[config.encoder]

        def dense(name: str, bias: bool) -> Dense:
            return Dense(
                (config.width,),
                (self.cell.gates, config.width),
                deviation=config.initializer_range,
                runtime=runtime,
                key=child_key(key, name),
                stack=stack,
                bias=bias,
            )

        self.input, self.recurrent = dense("input", config.bias), dense("recurrent", False)
        self.bptt = config.bptt

    def __call__(self, hidden: Float[Array, "B T D"], starts: Bool[Array, "B T"]) -> Float[Array, "B T D"]:
        """Returns the output at each position. The state is zero before a position where `starts` is true.

        No gradient reaches the state before positions 0, K, 2K, ... of the row, where K is model.bptt.
        """
        rows, length, width = hidden.shape
        cut = jnp.arange(length) % self.bptt == 0 if self.bptt else jnp.zeros(length, bool)

        def step(state: State, at: tuple[Array, Array, Array]) -> tuple[State, Array]:
            projected, start, cut = at
            if self.bptt:
                state = jax.tree.map(lambda value: jnp.where(cut, jax.lax.stop_gradient(value), value), state)
            state = jax.tree.map(lambda value: jnp.where(start[:, None], 0.0, value), state)
            state = self.cell.step(projected + self.recurrent(state[0], jnp.float32), state)
            return state, state[0].astype(hidden.dtype)

        projected = self.input(hidden, jnp.float32).swapaxes(0, 1)  # one matmul for all positions
        first = (jnp.zeros((rows, width), jnp.float32),) * self.cell.states
        return jax.lax.scan(step, first, (projected, starts.T, cut))[1].swapaxes(0, 1)


class RecurrentEncoder(nnx.Module):
    """A stack of L recurrent layers, each on the outputs of the one below, stored as one layer [L, ...].

    Each sequence of a row begins with a zero state, so packed rows equal padded ones. Dropout applies to the outputs
    of every layer but the last, as in torch.nn.LSTM; that of the embeddings is in Embeddings. It has the interface of
    Encoder (encoder.py), but no attention maps.
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.layers = RecurrentLayer(config, runtime=runtime, key=child_key(key, "layers"), stack=(config.layers,))
        self.config = config
        self.runtime = runtime

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        sequence_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        dropout_key: PRNGKeyArray | None,
        *,
        all_layers: bool = False,
        attention_maps: bool = False,
    ) -> Encoded:
        """Returns the hidden states of the stack on these embeddings. Raises UserError where maps are asked for."""
        if attention_maps:
            raise UserError(f"a model with model.encoder={self.config.encoder} has no attention maps")
        starts = jnp.pad(sequence_ids[:, 1:] != sequence_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        depth, placement = self.config.layers, self.runtime.placement
        seeds = None if dropout_key is None else row_seeds(dropout_key, (depth,), hidden.shape[0], placement)
        graph, params = nnx.split(self.layers)

        def apply(below: Array, part: tuple[Any, ...]) -> tuple[Array, Array | None]:
            own, seeds, lowest = part
            dropped = jnp.where(lowest, below, dropout(below, self.config.dropout, seeds))
            above = nnx.merge(graph, gathered(own, self.runtime))(dropped, starts)
            return above, above if all_layers else None

        last, layers = self._loop(self.runtime.rematerialized(apply), hidden, (params, seeds, jnp.arange(depth) == 0))
        return Encoded(last, hidden, layers)

    def at_positions(
        self,
        hidden: Float[Array, "B T D"],
        sequence_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        wanted: Int[Array, "B K"],
        dropout_key: PRNGKeyArray | None,
    ) -> Float[Array, "B K D"]:
        """Returns the last layer's output at the K wanted positions of each row. All positions are computed."""
        return gather_positions(self(hidden, sequence_ids, positions, dropout_key).last, wanted)

    def _loop(self, layer: Callable[..., Any], hidden: Array, stacked: tuple[Any, ...]) -> tuple[Array, Array | None]:
        if not self.runtime.unrolled(self.config.layers):
            return jax.lax.scan(layer, hidden, stacked)
        outputs = []
        for index in range(self.config.layers):
            hidden, output = layer(hidden, jax.tree.map(lambda leaf, index=index: leaf[index], stacked))
            outputs.append(output)
        return hidden, None if outputs[0] is None else jnp.stack(outputs)
