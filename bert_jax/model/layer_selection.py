"""Hidden states by the names of Devlin et al. 2019, table 7: one layer, or several made into one."""

import functools
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from bert_jax.command import UserError
from bert_jax.model.bert import Encoded

LAYERS = ("embeddings", "last", "second_to_last", "sum_all", "sum_last_4", "concat_last_4", "mean_last_4")


@dataclass(frozen=True)
class LayerSelection:
    """Which hidden states, 0 being the embeddings, and how they become one."""

    indices: tuple[int, ...]
    combine: str  # sum, mean or concat

    @staticmethod
    def parse(name: str, layers: int) -> "LayerSelection":
        """Of a name of LAYERS or a number, in a model of so many layers. Raises UserError for what is neither."""
        every = tuple(range(1, layers + 1))
        if name.isdecimal() and int(name) <= layers:
            return LayerSelection((int(name),), "sum")
        if name.endswith("_last_4") and name in LAYERS and layers < 4:
            raise UserError(f"--layers is {name}, but the model has {layers} layers. Use last, sum_all or a number")
        table = {
            "embeddings": LayerSelection((0,), "sum"),
            "last": LayerSelection((layers,), "sum"),
            "second_to_last": LayerSelection((layers - 1,), "sum"),
            "sum_all": LayerSelection(every, "sum"),
            "sum_last_4": LayerSelection(every[-4:], "sum"),
            "mean_last_4": LayerSelection(every[-4:], "mean"),
            "concat_last_4": LayerSelection(every[-4:], "concat"),
        }
        if name not in table:
            raise UserError(f"--layers is {name!r}; use one of {', '.join(table)}, or a number from 0 to {layers}")
        return table[name]

    def width(self, model_width: int) -> int:
        """Of the vectors that they make."""
        return model_width * (len(self.indices) if self.combine == "concat" else 1)

    def inner(self, layers: int) -> bool:
        """Whether a layer is among them that encode gives with all_layers only."""
        return self.indices not in ((0,), (layers,))

    def of(self, encoded: Encoded, layers: int) -> Float[Array, "B T W"]:
        """The vectors of every slot, float32."""
        states = {0: encoded.embeddings, layers: encoded.last}
        if encoded.layers is not None:
            states |= {depth + 1: encoded.layers[depth] for depth in range(layers)}
        picked = [states[index].astype(jnp.float32) for index in self.indices]
        if self.combine == "concat":
            return jnp.concatenate(picked, axis=-1)
        total = functools.reduce(jnp.add, picked)
        return total / len(picked) if self.combine == "mean" else total
