"""The vectors of a model's layers for encoded rows: what embed and features compute."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Int64

from bert_jax.config import MeshConfig, ModelConfig, ModelOptions, TrainConfig
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model.bert import bind
from bert_jax.model.heads import Heads
from bert_jax.model.heads.pooling import pool_rows, unit_vectors
from bert_jax.model.layer_selection import LayerSelection
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.device_params import device_params
from bert_jax.tasks.example import TaskBatch
from bert_jax.tasks.inference import run_batches
from bert_jax.train import partitioning
from bert_jax.train.run import runtime_of


class LayerVectors:
    """A model that computes vectors of layers, pooled over each row (none, cls, mean, max or last).

    Vectors are divided by their lengths if normalize is set, then cut to their first truncate_dim dimensions (0: all).
    With cut_first they are cut before, so that they have length 1 in the end.

    widths has the width of the vectors by name of the layers (model/layer_selection.py), in the order of the results.
    Raises UserError for layers that the model does not have.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        layers: Sequence[str],
        *,
        pool: str = "none",
        normalize: bool = False,
        truncate_dim: int = 0,
        cut_first: bool = False,
        dtype: str = "float32",
        compute_dtype: str = "float32",
    ) -> None:
        selections = tuple(LayerSelection.parse(name, loaded.model.layers) for name in layers)
        widths = [one.width(loaded.model.width) for one in selections]
        self.widths = {name: min(width, truncate_dim or width) for name, width in zip(layers, widths, strict=True)}
        self.dtype = dtype
        self.mesh = partitioning.make_mesh(MeshConfig())
        # Each length is compiled separately, so the layer loop that compiles fast is used.
        runtime = runtime_of(TrainConfig(model=ModelOptions(layer_loop="scan"), compute_dtype=compute_dtype))
        params = device_params(loaded, self.mesh, loaded.params)
        pool = "none" if pool == "words" else pool
        finish = Finish(pool, normalize, truncate_dim or None, cut_first, dtype)
        self._compute = functools.partial(_selected, loaded.model, loaded.heads, runtime, selections, finish, params)

    def run(
        self, batches: Iterable[tuple[Int64[np.ndarray, "B"], TaskBatch]]
    ) -> Iterator[tuple[Int64[np.ndarray, "B"], tuple[np.ndarray, ...]]]:
        """For each batch the indices of its rows (-1: a filler) and one array [B, W] or [B, T, W] per name."""
        return run_batches(self._compute, batches, self.mesh)


class Finish(NamedTuple):
    """What is done with the hidden states of layers."""

    pool: str
    normalize: bool
    truncate_dim: int | None
    cut_first: bool
    dtype: str

    def of(self, hidden: Float[Array, "B T W"], sequence_ids: Int[Array, "B T"]) -> Float[Array, "B *T _"]:
        """The vectors of rows or, where nothing is pooled, of tokens."""
        vectors = hidden if self.pool == "none" else pool_rows(self.pool, hidden, sequence_ids)
        if self.cut_first:
            vectors = vectors[..., : self.truncate_dim]
        vectors = unit_vectors(vectors) if self.normalize else vectors
        return vectors[..., : self.truncate_dim].astype(self.dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _selected(
    config: ModelConfig,
    heads: Heads,
    runtime: Runtime,
    selections: tuple[LayerSelection, ...],
    finish: Finish,
    params: dict[str, Any],
    batch: TaskBatch,
) -> tuple[Float[Array, "B *T _"], ...]:
    inner = any(one.inner(config.layers) for one in selections)
    encoded = bind(config, heads, params, runtime).encode(batch, all_layers=inner)
    return tuple(finish.of(one.of(encoded, config.layers), batch.sequence_ids) for one in selections)
