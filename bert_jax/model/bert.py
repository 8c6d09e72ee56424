"""An encoder, whole: parameters as a nested dict, and the module bound to them inside a jitted function."""

import functools
from typing import Any, NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.model import paths
from bert_jax.model.dropout import row_seeds
from bert_jax.model.embeddings import Embeddings
from bert_jax.model.encoder import Encoder, gather_slots
from bert_jax.model.heads import (
    ANSWER_ENDS,
    NEXT_SENTENCE_CLASSES,
    AttentionPooling,
    Classifier,
    Heads,
    LanguageModel,
    LinearChain,
    MaskedLanguageModel,
    Pooler,
    SpanBoundary,
    SpanClassifier,
    SpanPairs,
    SpanVectors,
    pool_sequences,
)
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
        # ModernBERT's transform stands before the heads that read tokens, too.
        self.transforms_tokens = config.pooler == "transform"
        if heads.pooler or (self.transforms_tokens and (heads.tags or heads.question)):
            self.pooler = part(Pooler, "pooler")
        if heads.pooling.startswith("attention"):
            self.pooling = part(AttentionPooling, "pooling", heads.pooling)
        if heads.mlm:
            self.mlm_head = part(MaskedLanguageModel, "mlm_head")
        if heads.lm:
            self.lm_head = part(LanguageModel, "lm_head")
        if heads.span_boundary:
            self.span_boundary_head = part(SpanBoundary, "span_boundary_head")
        if heads.next_sentence:
            self.next_sentence_head = part(Classifier, "next_sentence_head", NEXT_SENTENCE_CLASSES)
        if heads.classes or heads.choices:
            self.classifier = part(Classifier, "classifier", heads.classes or 1)
        if heads.tags:
            self.tagger = part(Classifier, "tagger", heads.tags)
        if heads.crf:
            self.crf = part(LinearChain, "crf", heads.tags)
        if heads.question:
            self.question_head = part(Classifier, "question_head", ANSWER_ENDS)
        if heads.spans.length:
            self.spans = part(SpanVectors, "spans", heads.spans)
        if heads.spans.classes:
            self.span_classifier = part(SpanClassifier, "span_classifier", heads.spans.classes)
        if heads.spans.relations:
            self.span_relations = part(SpanPairs, "span_relations", heads.spans.relations)
        self.config = config
        self.heads = heads
        self.runtime = runtime

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

    def span_boundary_logits(
        self, left: Float[Array, "B M D"], right: Float[Array, "B M D"], offsets: Int[Array, "B M"]
    ) -> Float[Array, "B M V"]:
        """vocabulary_logits from the hidden states of the slots before and behind spans, and the places in them."""
        return self.span_boundary_head(left, right, offsets, self._output_table())

    def pool(self, vectors: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """The pooled vectors of hidden states, those of [CLS] slots."""
        return self.pooler(vectors)

    def pooled(self, hidden: Float[Array, "B T D"], cls_positions: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """The pooled vector of each sequence of each row, from its [CLS]."""
        return self.pool(gather_slots(hidden, cls_positions))

    def sequence_vectors(
        self, hidden: Float[Array, "B T D"], sequence_ids: Int[Array, "B T"], cls_positions: Int[Array, "B S"]
    ) -> Float[Array, "B S D"]:
        """What class_logits and choice_logits read: each sequence by heads.pooling, through the pooler if there is
        one."""
        scores = self.pooling(hidden) if self.heads.pooling.startswith("attention") else None
        vectors = pool_sequences(self.heads.pooling, hidden, sequence_ids, cls_positions, scores)
        return self.pooler(vectors) if self.heads.pooler else vectors

    def next_sentence_logits(self, pooled: Float[Array, "B S D"]) -> Float[Array, "B S 2"]:
        """Logits of: is next, random."""
        return self.next_sentence_head(pooled)

    def class_logits(
        self, vectors: Float[Array, "B S D"], dropout_key: PRNGKeyArray | None = None
    ) -> Float[Array, "B S C"]:
        """Logits of a sequence's class (or its regression, C = 1)."""
        return self.classifier(vectors, self._seeds(dropout_key, "classifier", vectors.shape[0]))

    def choice_logits(
        self, vectors: Float[Array, "B S D"], dropout_key: PRNGKeyArray | None = None
    ) -> Float[Array, "B S"]:
        """A score for each sequence; the softmax over those of one question is for the loss."""
        return self.class_logits(vectors, dropout_key)[..., 0]

    def tag_logits(
        self, hidden: Float[Array, "B T D"], dropout_key: PRNGKeyArray | None = None
    ) -> Float[Array, "B T C"]:
        """Logits of every token's tag (or its regression, C = 1)."""
        return self.tagger(self._token_vectors(hidden), self._seeds(dropout_key, "tagger", hidden.shape[0]))

    def answer_logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T 2"]:
        """Logits of an answer's first slot and of its last: S.h and E.h (Devlin et al. 2019, section 4.2)."""
        return self.question_head(self._token_vectors(hidden))

    def span_vectors(
        self, hidden: Float[Array, "B T D"], dropout_key: PRNGKeyArray | None = None
    ) -> Float[Array, "B T K G"]:
        """A vector for each span of up to heads.spans.length slots (heads/spans.py)."""
        return self.spans(hidden, self._seeds(dropout_key, "spans", hidden.shape[0]))

    def span_logits(
        self, vectors: Float[Array, "B T K G"], dropout_key: PRNGKeyArray | None = None
    ) -> Float[Array, "B T K C"]:
        """Logits of each span's class, or of its being one at all (C = 1)."""
        return self.span_classifier(vectors, self._seeds(dropout_key, "span_classifier", vectors.shape[0]))

    def relation_logits(
        self, vectors: Float[Array, "B P G"], dropout_key: PRNGKeyArray | None = None
    ) -> Float[Array, "B P P C"]:
        """Logits of how each of P spans relates to each, from their span_vectors (heads.take_spans)."""
        return self.span_relations(vectors, self._seeds(dropout_key, "span_relations", vectors.shape[0]))

    def _token_vectors(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.pooler(hidden) if self.transforms_tokens else hidden

    def _output_table(self) -> Float[Array, "V D"]:
        """The matrix of the MLM head."""
        return (self.embeddings.token if self.config.tied_output else self.mlm_head.output).table[...]

    def _embed(self, batch: Any, dropout_key: PRNGKeyArray | None) -> Float[Array, "B T D"]:
        rows, length = batch.input_ids.shape
        if length > self.config.max_positions:
            raise UserError(
                f"rows of {length} slots do not fit the model's {self.config.max_positions} positions; "
                f"use shorter rows, or a model with max_positions of {length} or more"
            )
        seeds = self._seeds(dropout_key, "embeddings", rows)
        return self.embeddings(batch.input_ids, batch.segment_ids, batch.positions, seeds)

    def _seeds(self, dropout_key: PRNGKeyArray | None, name: str, rows: int) -> UInt32[Array, "B 2"] | None:
        if dropout_key is None:
            return None
        return row_seeds(child_key(dropout_key, name), (), rows, self.runtime.placement)


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
    nnx.replace_by_pure_dict(state, runtime.placement.gather(params))
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
