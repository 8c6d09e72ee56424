"""A model: an encoder and its heads, as a nested dict of parameters and as a module bound to them under jit."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.model import layers
from bert_jax.model.dropout import DropoutKey, Seeds, row_seeds
from bert_jax.model.embeddings import Embeddings, is_unpacked
from bert_jax.model.heads import chosen_heads
from bert_jax.model.heads.config import Heads
from bert_jax.model.layers import child_key
from bert_jax.model.runtime import Runtime
from bert_jax.model.transformer import Encoded, Encoder

__all__ = ["Bert", "Encoded", "Heads", "Runtime", "abstract_params", "bind", "init_params"]


class Bert(nnx.Module):
    """The encoder of Devlin et al. 2019, or a relative of it (ModelConfig), and its heads.

    A batch is any object with input_ids, segment_ids, sequence_ids and positions, i32[B,T] (data/example.py), and
    optionally `unpacked`: whether each row holds one sequence at most, which some attention kernels use. A dropout_key
    of None means evaluation. Each part that drops out derives its own stream from the key, so one key a step serves
    all. The encoder knows no head: outputs.py has their results.
    """

    def __init__(self, config: ModelConfig, *, heads: Heads, runtime: Runtime, key: PRNGKeyArray) -> None:
        def part(module: Any, name: str, *arguments: Any) -> Any:
            return module(config, *arguments, runtime=runtime, key=child_key(key, name))

        self.embeddings = part(Embeddings, "embeddings")
        # Only a kind of encoder other than the Transformer has a module of its own.
        self.encoder = part(config.encoder.module or Encoder, "encoder")
        # Heads are attributes, so that a parameter's path begins with its head's name.
        for name, (module, arguments) in chosen_heads(heads, config).items():
            setattr(self, name, part(module, name, *arguments))
        self.config = config
        self.head_config = heads
        self.runtime = runtime
        self._observe: Callable[[Any, Encoded], None] | None = None

    def head(self, name: str) -> Any:
        """Returns the head with that name.

        Raises:
            UserError: the model has no such head.
        """
        names = chosen_heads(self.head_config, self.config)
        if name not in names:
            raise UserError(f"the model has no head {name}; its heads are: {', '.join(names) or 'none'}")
        return getattr(self, name)

    @property
    def token_table(self) -> Float[Array, "V E"]:
        """The token embeddings, which are also the output matrix if model.tied_output is set."""
        return self.embeddings.token.table[...]

    def watch(self, observe: Callable[[Any, Encoded], None]) -> None:
        """Makes every later `encode` compute all layers, and pass its batch and its result to a function.

        A distillation loss reads hidden states this way from an objective that encodes for itself.
        """
        self._observe = observe

    def encode(
        self, batch: Any, dropout_key: DropoutKey = None, *, all_layers: bool = False, attention_maps: bool = False
    ) -> Encoded:
        """Returns a batch's hidden states.

        Args:
            all_layers: keep every layer's output, not only the last one's.
            attention_maps: keep the attention probabilities.

        Raises:
            UserError: rows are longer than model.max_positions.
        """
        embedded, key = self._embed(batch, dropout_key)
        # An observer may read any layer, whatever the caller asked for.
        every = all_layers or self._observe is not None
        options = {"unpacked": is_unpacked(batch), "all_layers": every, "attention_maps": attention_maps}
        encoded = self.encoder(embedded, batch.sequence_ids, batch.positions, key, **options)
        if self._observe is not None:
            self._observe(batch, encoded)
        return encoded

    def encode_at(
        self, batch: Any, positions: Int[Array, "B K"], dropout_key: DropoutKey = None
    ) -> Float[Array, "B K D"]:
        """Returns encode(batch).last at K positions per row, without computing the last layer at the others.

        A loss that reads few positions (masked ones, [CLS]) saves most of one layer's work this way.
        """
        embedded, key = self._embed(batch, dropout_key)
        return self.encoder.at_positions(
            embedded, batch.sequence_ids, batch.positions, positions, key, unpacked=is_unpacked(batch)
        )

    def dropout_seeds(self, dropout_key: DropoutKey, name: str, rows: int) -> Seeds:
        """Returns a part's dropout seeds for these rows (dropout.row_seeds); None in evaluation."""
        key = part_key(dropout_key, name)
        # No further axes: a part outside of the layers drops out in one place.
        return None if key is None else row_seeds(key, (), rows, self.runtime.placement)

    def embedding_vectors(self, batch: Any, seeds: Seeds) -> Float[Array, "B T E"]:
        """Embeds a batch, without the projection to the layers' width (model.embedding_width).

        Raises:
            UserError: rows are longer than model.max_positions.
        """
        # jax reports no index past the end of a table: its vectors would just be wrong.
        length = batch.input_ids.shape[1]
        if length > self.config.max_positions:
            raise UserError(
                f"rows of {length} positions do not fit a model with max_positions={self.config.max_positions}; "
                f"use shorter rows, or a model with max_positions of {length} or more"
            )
        return self.embeddings.vectors(batch.input_ids, batch.segment_ids, batch.positions, seeds)

    def _embed(self, batch: Any, dropout_key: DropoutKey) -> tuple[Float[Array, "B T D"], DropoutKey]:
        """Returns the encoder's input and dropout key."""
        seeds = self.dropout_seeds(dropout_key, "embeddings", batch.input_ids.shape[0])
        return self.embeddings.project(self.embedding_vectors(batch, seeds)), part_key(dropout_key, "encoder")


def part_key(dropout_key: DropoutKey, name: str) -> DropoutKey:
    """Derives a part's dropout key; None in evaluation."""
    return None if dropout_key is None else child_key(dropout_key, name)


def init_params(config: ModelConfig, heads: Heads, key: PRNGKeyArray) -> dict[str, Any]:
    """Initializes float32 parameters as google-research/bert, modeling.py, each by the key and its own path.

    They are truncated normal of deviation 0.02, and zero for biases.
    """
    # Any runtime would do, since none changes a parameter.
    _, state = nnx.split(Bert(config, heads=heads, runtime=Runtime(), key=key))
    return nnx.to_pure_dict(state)


def abstract_params(config: ModelConfig, heads: Heads) -> dict[str, Any]:
    """Returns init_params' shapes and dtypes."""
    return jax.eval_shape(lambda key: init_params(config, heads, key), jax.random.key(0))


def bind(config: ModelConfig, heads: Heads, params: dict[str, Any], runtime: Runtime) -> Bert:
    """Returns the module over these parameters, for use inside a jitted or differentiated function.

    Args:
        params: nested by module, as init_params returns them; under shard_map one device's shards.

    Raises:
        UserError: a parameter is missing, unknown or of another shape; the message names the first.
    """
    graph, abstract = _structure(config, heads, runtime)
    got, wanted = layers.flatten(params), layers.flatten(nnx.to_pure_dict(abstract))
    # Sorted, so that the first problem is the same in all processes.
    for path in sorted(got.keys() | wanted.keys()):
        if path not in got or path not in wanted:
            problem = "is missing" if path in wanted else "does not belong to this model"
            raise UserError(f"parameter {path} {problem}; check the model's configuration and heads")
        # Under shard_map the arrays are one device's shards, so the gathered shape is compared.
        shape = runtime.placement.whole_shape(path, got[path])
        if shape != wanted[path].shape:
            shapes = f"{list(shape)}, but the model expects {list(wanted[path].shape)}"
            raise UserError(f"parameter {path} has shape {shapes}; check the model's configuration")
    state = jax.tree.map(lambda leaf: leaf, abstract)  # a copy, since the cached one is replaced in place
    # Parameters outside of the layers are gathered here. A layer gathers its own when it is computed
    # (transformer.gathered).
    nnx.replace_by_pure_dict(state, runtime.placement.gather(params))
    return nnx.merge(graph, state)


# Cached, since each trace of the same model would otherwise build the whole module again.
@functools.cache
def _structure(config: ModelConfig, heads: Heads, runtime: Runtime) -> tuple[nnx.GraphDef, nnx.State]:
    return jax.eval_shape(lambda key: nnx.split(Bert(config, heads=heads, runtime=runtime, key=key)), jax.random.key(0))
