"""The outputs of the heads of fine-tuning, from the hidden states of a model; conventions as in head_outputs.

Functions that drop out take a dropout key, and None in evaluation. K span lengths, C classes, P spans, G the width of
a span's vector.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bert_jax.model.bert import Bert, Encoded
from bert_jax.model.head_outputs import pool_vectors
from bert_jax.model.heads.pooling import pool_sequences


def task_states(model: Bert, encoded: Encoded) -> Float[Array, "B T D"]:
    """Returns the input of the heads below: the last layer, or the mix of all where heads.layer_mix is set."""
    if not model.head_config.layer_mix:
        return encoded.last
    assert encoded.layers is not None, "encode(all_layers=heads.layer_mix) comes before"
    return model.head("layer_mix")(jnp.concatenate([encoded.embeddings[None], encoded.layers]))


def encode_for_task(model: Bert, batch: Any, dropout_key: PRNGKeyArray | None = None) -> Float[Array, "B T D"]:
    """Returns task_states of a batch."""
    return task_states(model, model.encode(batch, dropout_key, all_layers=model.head_config.layer_mix))


def sequence_vectors(
    model: Bert, hidden: Float[Array, "B T D"], sequence_ids: Int[Array, "B T"], cls_positions: Int[Array, "B S"]
) -> Float[Array, "B S D"]:
    """Returns the input of class_logits and choice_logits.

    It is one vector of each sequence by heads.pooling, through the pooler where the model has one.
    """
    heads = model.head_config
    scores = model.head("pooling")(hidden) if heads.pooling.startswith("attention") else None
    vectors = pool_sequences(heads.pooling, hidden, sequence_ids, cls_positions, scores)
    return pool_vectors(model, vectors) if heads.pooler else vectors


def class_logits(
    model: Bert, vectors: Float[Array, "B S D"], dropout_key: PRNGKeyArray | None = None
) -> Float[Array, "B S C"]:
    """Returns logits of a sequence's class, or its regression (C = 1)."""
    return model.head("classifier")(vectors, model.dropout_seeds(dropout_key, "classifier", vectors.shape[0]))


def choice_logits(
    model: Bert, vectors: Float[Array, "B S D"], dropout_key: PRNGKeyArray | None = None
) -> Float[Array, "B S"]:
    """Returns a score for each sequence; the loss takes the softmax over the sequences of one question."""
    return class_logits(model, vectors, dropout_key)[..., 0]


def tag_logits(
    model: Bert, hidden: Float[Array, "B T D"], dropout_key: PRNGKeyArray | None = None
) -> Float[Array, "B T C"]:
    """Returns logits of every token's tag, or its regression (C = 1)."""
    seeds = model.dropout_seeds(dropout_key, "tagger", hidden.shape[0])
    return model.head("tagger")(_token_vectors(model, hidden), seeds)


def answer_logits(model: Bert, hidden: Float[Array, "B T D"]) -> Float[Array, "B T 2"]:
    """Returns logits of an answer's first and last position: S.h and E.h (Devlin et al. 2019, section 4.2)."""
    return model.head("question_head")(_token_vectors(model, hidden))


def span_vectors(
    model: Bert, hidden: Float[Array, "B T D"], dropout_key: PRNGKeyArray | None = None
) -> Float[Array, "B T K G"]:
    """Returns a vector for each span of up to heads.spans.length positions (heads/spans.py)."""
    return model.head("spans")(hidden, model.dropout_seeds(dropout_key, "spans", hidden.shape[0]))


def span_logits(
    model: Bert, vectors: Float[Array, "B T K G"], dropout_key: PRNGKeyArray | None = None
) -> Float[Array, "B T K C"]:
    """Returns logits of each span's class, or of whether it is a span at all (C = 1)."""
    seeds = model.dropout_seeds(dropout_key, "span_classifier", vectors.shape[0])
    return model.head("span_classifier")(vectors, seeds)


def relation_logits(
    model: Bert, vectors: Float[Array, "B P G"], dropout_key: PRNGKeyArray | None = None
) -> Float[Array, "B P P C"]:
    """Returns logits of the relation from each of P spans to each other, from their span_vectors (heads.take_spans)."""
    seeds = model.dropout_seeds(dropout_key, "span_relations", vectors.shape[0])
    return model.head("span_relations")(vectors, seeds)


def _token_vectors(model: Bert, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Returns the input of heads over single tokens: in ModernBERT the pooler's transform comes first."""
    return pool_vectors(model, hidden) if model.config.pooler == "transform" else hidden
