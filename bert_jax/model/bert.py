"""An encoder, whole: parameters as a nested dict, and the module bound to them inside a jitted function."""

import functools
from typing import Any, NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.model import paths
from bert_jax.model.dropout import row_seeds
from bert_jax.model.embeddings import Embeddings
from bert_jax.model.encoder import Encoder, gather_slots
from bert_jax.model.heads import NEXT_SENTENCE_CLASSES, Classifier, Heads, LanguageModel, MaskedLanguageModel, Pooler
from bert_jax.model.layers import child_key
from bert_jax.model.runtime import Runtime

__all__ = ["Bert", "Encoded", "Heads", "Runtime", "abstract_params", "bind", "init_params"]


class Encoded(NamedTuple):
    """Hidden states: of the last layer, of the embeddings, and of every layer when asked; attention maps when asked.

    An architecture with a norm after the stack (pre-norm) has its output in `last` and in the last of `layers`, as
    transformers has it. Attention maps are probabilities before dropout, by query and key.
    """

    last: Float[Array, "B T D"]
    embeddings: Float[Array, "B T D"]
    layers: Float[Array, "L B T D"] | None
    attention_maps: Float[Array, "L B N T T"] | None = None


class Bert(nnx.Module):
    """The encoder of Devlin et al. 2019, or a relative of it (ModelConfig), and the heads asked for.

    A batch is any object with input_ids, segment_ids, sequence_ids and positions, i32[B,T] (data/example.py).
    A dropout_key of None means evaluation. Each method that drops out derives a stream of its own from the
    key, so one key a step serves all.
    """

    def __init__(self, config: ModelConfig, *, heads: Heads, runtime: Runtime, key: PRNGKeyArray) -> None:
        def part(kind: Any, name: str, *arguments: Any) -> Any:
            return kind(config, *arguments, runtime=runtime, key=child_key(key, name))

        self.embeddings = part(Embeddings, "embeddings")
        self.encoder = part(Encoder, "encoder")
        if heads.pooler:
            self.pooler = part(Pooler, "pooler")
        if heads.mlm:
            self.mlm_head = part(MaskedLanguageModel, "mlm_head")
        if heads.lm:
            self.lm_head = part(LanguageModel, "lm_head")
        if heads.next_sentence:
            self.next_sentence_head = part(Classifier, "next_sentence_head", NEXT_SENTENCE_CLASSES)
        if heads.classes:
            self.classifier = part(Classifier, "classifier", heads.classes)
        if heads.tags:
            self.tagger = part(Classifier, "tagger", heads.tags)
        self.config = config
        self.heads = heads

    def encode(
        self,
        batch: Any,
        dropout_key: PRNGKeyArray | None = None,
        *,
        all_layers: bool = False,
        attention_maps: bool = False,
    ) -> Encoded:
        """Hidden states of a batch. Raises UserError for rows longer than the model's positions."""
        embedded = self._embed(batch, dropout_key)
        key = None if dropout_key is None else child_key(dropout_key, "encoder")
        found = self.encoder(
            embedded,
            batch.sequence_ids,
            batch.positions,
            key,
            all_layers=all_layers,
            attention_maps=attention_maps,
        )
        return Encoded(found.last, embedded, found.layers, found.attention_maps)

    def encode_at(
        self, batch: Any, slots: Int[Array, "B K"], dropout_key: PRNGKeyArray | None = None
    ) -> Float[Array, "B K D"]:
        """encode(batch).last at K slots of each row: the same values without the rest of the last layer.

        A loss that reads few slots (masked ones, [CLS]) so saves most of one layer's work.
        """
        embedded = self._embed(batch, dropout_key)
        key = None if dropout_key is None else child_key(dropout_key, "encoder")
        return self.encoder.at_slots(embedded, batch.sequence_ids, batch.positions, slots, key)

    def vocabulary_logits(self, vectors: Float[Array, "B M D"]) -> Float[Array, "B M V"]:
        """float32 vocabulary logits of hidden states; V is padded, padding logits are -inf."""
        head = self.lm_head if self.heads.lm else self.mlm_head
        return head(vectors, self.embeddings.token.table[...])

    def masked_logits(
        self, hidden: Float[Array, "B T D"], masked_positions: Int[Array, "B M"]
    ) -> Float[Array, "B M V"]:
        """vocabulary_logits at M slots of each row only."""
        return self.vocabulary_logits(gather_slots(hidden, masked_positions))

    def pool(self, vectors: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """The pooled vectors of hidden states, those of [CLS] slots."""
        return self.pooler(vectors)

    def pooled(self, hidden: Float[Array, "B T D"], cls_positions: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """The pooled vector of each sequence of each row."""
        return self.pool(gather_slots(hidden, cls_positions))

    def next_sentence_logits(self, pooled: Float[Array, "B S D"]) -> Float[Array, "B S 2"]:
        """Logits of: is next, random."""
        return self.next_sentence_head(pooled)

    def class_logits(
        self, pooled: Float[Array, "B S D"], dropout_key: PRNGKeyArray | None = None
    ) -> Float[Array, "B S C"]:
        """Logits of a sequence's class (or its regression, C = 1)."""
        return self.classifier(pooled, _seeds(dropout_key, "classifier", pooled.shape[0]))

    def tag_logits(
        self, hidden: Float[Array, "B T D"], dropout_key: PRNGKeyArray | None = None
    ) -> Float[Array, "B T C"]:
        """Logits of every token's tag."""
        if self.config.pooler == "transform":
            hidden = self.pooler(hidden)
        return self.tagger(hidden, _seeds(dropout_key, "tagger", hidden.shape[0]))

    def _embed(self, batch: Any, dropout_key: PRNGKeyArray | None) -> Float[Array, "B T D"]:
        rows, length = batch.input_ids.shape
        if length > self.config.max_positions:
            raise UserError(
                f"rows of {length} slots do not fit the model's {self.config.max_positions} positions; "
                f"use shorter rows, or a model with max_positions of {length} or more"
            )
        seeds = _seeds(dropout_key, "embeddings", rows)
        return self.embeddings(batch.input_ids, batch.segment_ids, batch.positions, seeds)


def init_params(config: ModelConfig, heads: Heads, key: PRNGKeyArray) -> dict[str, Any]:
    """Initial parameters, float32: truncated normal of deviation 0.02, zero biases.

    As google-research/bert, modeling.py. A parameter depends on key and its own path alone.
    """
    _, state = nnx.split(Bert(config, heads=heads, runtime=Runtime(), key=key))
    return nnx.to_pure_dict(state)


def abstract_params(config: ModelConfig, heads: Heads) -> dict[str, Any]:
    """init_params as shapes and dtypes, without any memory."""
    return jax.eval_shape(lambda key: init_params(config, heads, key), jax.random.key(0))


def bind(config: ModelConfig, heads: Heads, params: dict[str, Any], runtime: Runtime) -> Bert:
    """The module over these parameters; call it inside the function that is jitted or differentiated.

    Raises UserError when params are not those of this architecture and heads, naming the first that differs.
    """
    graph, abstract = _structure(config, heads, runtime)
    _check(paths.flatten(params), paths.flatten(nnx.to_pure_dict(abstract)))
    state = jax.tree.map(lambda leaf: leaf, abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def _check(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for path in sorted(got.keys() | wanted.keys()):
        if path not in got or path not in wanted:
            problem = "is missing" if path in wanted else "is not one of this model's"
            raise UserError(f"parameter {path} {problem}; check the model's configuration and heads")
        if got[path].shape != wanted[path].shape:
            shapes = f"{list(got[path].shape)}, the model wants {list(wanted[path].shape)}"
            raise UserError(f"parameter {path} has shape {shapes}; check the model's configuration")


@functools.cache
def _structure(config: ModelConfig, heads: Heads, runtime: Runtime) -> tuple[nnx.GraphDef, nnx.State]:
    return jax.eval_shape(lambda key: nnx.split(Bert(config, heads=heads, runtime=runtime, key=key)), jax.random.key(0))


def _seeds(dropout_key: PRNGKeyArray | None, name: str, rows: int) -> Array | None:
    return None if dropout_key is None else row_seeds(child_key(dropout_key, name), (), rows)
