"""The vectors of a model's layers for encoded rows: what embed and features compute."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int64

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

    With normalize, each vector has length 1.

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
        dtype: str = "float32",
        compute_dtype: str = "float32",
    ) -> None:
        selections = tuple(LayerSelection.parse(name, loaded.model.layers) for name in layers)
        self.widths = {name: one.width(loaded.model.width) for name, one in zip(layers, selections, strict=True)}
        self.dtype = dtype
        self.mesh = partitioning.make_mesh(MeshConfig())
        # Each length is compiled separately, so the layer loop that compiles fast is used.
        runtime = runtime_of(TrainConfig(model=ModelOptions(layer_loop="scan"), compute_dtype=compute_dtype))
        params = device_params(loaded, self.mesh, loaded.params)
        pool = "none" if pool == "words" else pool
        self._compute = functools.partial(
            _selected, loaded.model, loaded.heads, runtime, selections, pool, normalize, dtype, params
        )

    def run(
        self, batches: Iterable[tuple[Int64[np.ndarray, "B"], TaskBatch]]
    ) -> Iterator[tuple[Int64[np.ndarray, "B"], tuple[np.ndarray, ...]]]:
        """For each batch the indices of its rows (-1: a filler) and one array [B, W] or [B, T, W] per name."""
        return run_batches(self._compute, batches, self.mesh)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5, 6))
def _selected(
    config: ModelConfig,
    heads: Heads,
    runtime: Runtime,
    selections: tuple[LayerSelection, ...],
    pool: str,
    normalize: bool,
    dtype: str,
    params: dict[str, Any],
    batch: TaskBatch,
) -> tuple[Float[Array, "B *T _"], ...]:
    inner = any(one.inner(config.layers) for one in selections)
    encoded = bind(config, heads, params, runtime).encode(batch, all_layers=inner)
    found = [one.of(encoded, config.layers) for one in selections]
    if pool != "none":
        found = [pool_rows(pool, hidden, batch.sequence_ids) for hidden in found]
    return tuple((unit_vectors(vectors) if normalize else vectors).astype(dtype) for vectors in found)
