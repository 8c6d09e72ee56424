"""A model: an encoder and its heads, as a nested dict of parameters and as a module bound to them under jit."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from bert_jax.config import ENCODERS, ModelConfig
from bert_jax.errors import UserError
from bert_jax.model import layers
from bert_jax.model.dropout import row_seeds
from bert_jax.model.embeddings import Embeddings, is_unpacked
from bert_jax.model.heads import chosen_heads
from bert_jax.model.heads.config import Heads
from bert_jax.model.layers import child_key
from bert_jax.model.runtime import Placement, Runtime
from bert_jax.model.transformer import Encoded, Encoder

__all__ = ["Bert", "Encoded", "Heads", "Runtime", "abstract_params", "bind", "init_params"]


class Bert(nnx.Module):
    """The encoder of Devlin et al. 2019, or a relative of it (ModelConfig), and the heads on it.

    A batch is any object with input_ids, segment_ids, sequence_ids and positions, i32[B,T] (data/example.py). It may
    also have `unpacked`: whether each row holds one sequence at most, which some attention kernels use. A dropout_key
    of None means evaluation. Each part that drops out derives a stream of its own from the key, so one key a step
    serves all. The encoder knows no head: outputs.py has what the heads compute.
    """

    def __init__(self, config: ModelConfig, *, heads: Heads, runtime: Runtime, key: PRNGKeyArray) -> None:
        def part(module: Any, name: str, *arguments: Any) -> Any:
            return module(config, *arguments, runtime=runtime, key=child_key(key, name))

        self.embeddings = part(Embeddings, "embeddings")
        self.encoder = part(ENCODERS[config.encoder].module or Encoder, "encoder")
        # Heads are attributes, so that a parameter's path begins with its head's name.
        for name, (module, arguments) in chosen_heads(heads, config).items():
            setattr(self, name, part(module, name, *arguments))
        self.config = config
        self.head_config = heads
        self.runtime = runtime
        self._observe: Callable[[Any, Encoded], None] | None = None

    def head(self, name: str) -> Any:
        """Returns the head of that name. Raises UserError where the model lacks it."""
        names = chosen_heads(self.head_config, self.config)
        if name not in names:
            raise UserError(f"the model has no head {name}; its heads are: {', '.join(names) or 'none'}")
        return getattr(self, name)

    @property
    def token_table(self) -> Float[Array, "V E"]:
        """The token embeddings, which are also the output matrix where model.tied_output is set."""
        return self.embeddings.token.table[...]

    def watch(self, observe: Callable[[Any, Encoded], None]) -> None:
        """Has every later `encode` compute all layers, and pass its batch and its result to a function.

        A loss on hidden states reads them this way from an objective that encodes for itself (distillation).
        """
        self._observe = observe

    def encode(
        self,
        batch: Any,
        dropout_key: PRNGKeyArray | None = None,
        *,
        all_layers: bool = False,
        attention_maps: bool = False,
    ) -> Encoded:
        """Returns the hidden states of a batch. Raises UserError for rows longer than model.max_positions."""
        embedded = self._embed(batch, dropout_key)
        key = None if dropout_key is None else child_key(dropout_key, "encoder")
        every = all_layers or self._observe is not None
        options = {"unpacked": is_unpacked(batch), "all_layers": every, "attention_maps": attention_maps}
        encoded = self.encoder(embedded, batch.sequence_ids, batch.positions, key, **options)
        if self._observe is not None:
            self._observe(batch, encoded)
        return encoded

    def encode_at(
        self, batch: Any, positions: Int[Array, "B K"], dropout_key: PRNGKeyArray | None = None
    ) -> Float[Array, "B K D"]:
        """Returns encode(batch).last at K positions of each row: the same values without the rest of the last layer.

        A loss that reads few positions (masked ones, [CLS]) saves most of one layer's work this way.
        """
        embedded = self._embed(batch, dropout_key)
        key = None if dropout_key is None else child_key(dropout_key, "encoder")
        return self.encoder.at_positions(
            embedded, batch.sequence_ids, batch.positions, positions, key, unpacked=is_unpacked(batch)
        )

    def dropout_seeds(self, dropout_key: PRNGKeyArray | None, name: str, rows: int) -> UInt32[Array, "B 2"] | None:
        """Returns the dropout seeds of the rows for the part of that name (dropout.row_seeds); None in evaluation."""
        if dropout_key is None:
            return None
        return row_seeds(child_key(dropout_key, name), (), rows, self.runtime.placement)

    def embedding_vectors(self, batch: Any, seeds: UInt32[Array, "B 2"] | None) -> Float[Array, "B T E"]:
        """The embeddings of a batch before they are projected to the width of the layers (model.embedding_width).

        Raises UserError for rows longer than model.max_positions.
        """
        length = batch.input_ids.shape[1]
        if length > self.config.max_positions:
            raise UserError(
                f"rows of {length} positions do not fit a model with max_positions={self.config.max_positions}; "
                f"use shorter rows, or a model with max_positions of {length} or more"
            )
        return self.embeddings.vectors(batch.input_ids, batch.segment_ids, batch.positions, seeds)

    def _embed(self, batch: Any, dropout_key: PRNGKeyArray | None) -> Float[Array, "B T D"]:
        seeds = self.dropout_seeds(dropout_key, "embeddings", batch.input_ids.shape[0])
        return self.embeddings.project(self.embedding_vectors(batch, seeds))


def init_params(config: ModelConfig, heads: Heads, key: PRNGKeyArray) -> dict[str, Any]:
    """Returns initial parameters, float32, as in modeling.py of google-research/bert.

    They are truncated normal of deviation 0.02, and zero for biases.
    A parameter depends on the key and on its own path only.
    """
    _, state = nnx.split(Bert(config, heads=heads, runtime=Runtime(), key=key))
    return nnx.to_pure_dict(state)


def abstract_params(config: ModelConfig, heads: Heads) -> dict[str, Any]:
    """Returns init_params as shapes and dtypes, without memory."""
    return jax.eval_shape(lambda key: init_params(config, heads, key), jax.random.key(0))


def bind(config: ModelConfig, heads: Heads, params: dict[str, Any], runtime: Runtime) -> Bert:
    """Returns the module over these parameters, for use inside a function that is jitted or differentiated.

    Raises UserError when params are not those of this architecture and heads, naming the first that differs.
    """
    graph, abstract = _structure(config, heads, runtime)
    _check(layers.flatten(params), layers.flatten(nnx.to_pure_dict(abstract)), runtime.placement)
    state = jax.tree.map(lambda leaf: leaf, abstract)
    nnx.replace_by_pure_dict(state, runtime.placement.gather(params))
    return nnx.merge(graph, state)


def _check(got: dict[str, Any], wanted: dict[str, Any], placement: Placement) -> None:
    for path in sorted(got.keys() | wanted.keys()):
        if path not in got or path not in wanted:
            problem = "is missing" if path in wanted else "does not belong to this model"
            raise UserError(f"parameter {path} {problem}; check the model's configuration and heads")
        shape = placement.whole_shape(path, got[path])
        if shape != wanted[path].shape:
            shapes = f"{list(shape)}, but the model expects {list(wanted[path].shape)}"
            raise UserError(f"parameter {path} has shape {shapes}; check the model's configuration")


@functools.cache
def _structure(config: ModelConfig, heads: Heads, runtime: Runtime) -> tuple[nnx.GraphDef, nnx.State]:
    return jax.eval_shape(lambda key: nnx.split(Bert(config, heads=heads, runtime=runtime, key=key)), jax.random.key(0))
