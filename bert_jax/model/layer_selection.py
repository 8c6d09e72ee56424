"""Hidden states by the names of Devlin et al. 2019, table 7: those of one layer, or a combination of several."""

import functools
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from bert_jax.command import UserError
from bert_jax.model.bert import Encoded

MIX = "mix"  # the states of all layers, which heads mix by learned weights (model/heads/layer_mix.py)
LAYERS = ("embeddings", "last", "second_to_last", "sum_all", "sum_last_4", "concat_last_4", "mean_last_4")


@dataclass(frozen=True)
class LayerSelection:
    """The selected hidden states, where 0 is the embeddings, and how they are combined."""

    indices: tuple[int, ...]
    combine: str  # sum, mean or concat

    @staticmethod
    def parse(name: str, layers: int) -> "LayerSelection":
        """Returns the selection for a name in LAYERS, a layer number or mix. Raises UserError for anything else.

        That of mix is [h_0; ...; h_L], the embeddings and all layers.
        """
        every = tuple(range(1, layers + 1))
        if name == MIX:
            return LayerSelection((0, *every), "concat")
        if name.isdecimal() and int(name) <= layers:
            return LayerSelection((int(name),), "sum")
        if name not in LAYERS:
            raise UserError(
                f"unknown --layers {name!r}; choose from {', '.join(LAYERS)}, or give a number from 0 to {layers}"
            )
        if name.endswith("_last_4") and layers < 4:
            raise UserError(f"--layers is {name}, but the model has {layers} layers. Use last, sum_all or a number")
        singles = {"embeddings": (0,), "last": (layers,), "second_to_last": (layers - 1,), "sum_all": every}
        combine = name.removesuffix("_last_4") if name.endswith("_last_4") else "sum"
        return LayerSelection(singles.get(name, every[-4:]), combine)

    def width(self, model_width: int) -> int:
        """Returns the width of the combined vectors."""
        return model_width * (len(self.indices) if self.combine == "concat" else 1)

    def inner(self, layers: int) -> bool:
        """Returns whether the selection needs a layer that encode returns with all_layers only."""
        return self.indices not in ((0,), (layers,))

    def of(self, encoded: Encoded, layers: int) -> Float[Array, "B T W"]:
        """Returns the combined vectors of every position, float32."""
        states = {0: encoded.embeddings, layers: encoded.last}
        if encoded.layers is not None:
            states |= {depth + 1: encoded.layers[depth] for depth in range(layers)}
        picked = [states[index].astype(jnp.float32) for index in self.indices]
        if self.combine == "concat":
            return jnp.concatenate(picked, axis=-1)
        total = functools.reduce(jnp.add, picked)
        return total / len(picked) if self.combine == "mean" else total
