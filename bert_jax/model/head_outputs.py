"""The outputs of the heads of a model, from its hidden states.

Each function takes a bound model (bert_jax.model.bert.bind) and reads the heads that it needs from it. Functions
that drop out take a dropout key, and None in evaluation. B batch, T positions, S sequences of a row, M predicted
positions, K span lengths, C classes, D width, V padded vocabulary.
"""

from jaxtyping import Array, Float, Int, PRNGKeyArray

from bert_jax.model.bert import Bert
from bert_jax.model.heads.pooling import pool_sequences
from bert_jax.model.layer import gather_positions


def vocabulary_logits(model: Bert, vectors: Float[Array, "B M D"]) -> Float[Array, "B M V"]:
    """float32 vocabulary logits of hidden states; V is padded, and the padding's logits are -inf."""
    head = model.head("lm_head" if model.head_config.lm else "mlm_head")
    return head(vectors, model.token_table)


def masked_logits(
    model: Bert, hidden: Float[Array, "B T D"], masked_positions: Int[Array, "B M"]
) -> Float[Array, "B M V"]:
    """vocabulary_logits at M positions of each row only."""
    return vocabulary_logits(model, gather_positions(hidden, masked_positions))


def span_boundary_logits(
    model: Bert, left: Float[Array, "B M D"], right: Float[Array, "B M D"], offsets: Int[Array, "B M"]
) -> Float[Array, "B M V"]:
    """Vocabulary logits from the hidden states on both sides of a span and the offset of each token in it."""
    tied = model.config.tied_output
    table = model.token_table if tied else model.head("mlm_head").output.table[...]
    return model.head("span_boundary_head")(left, right, offsets, table)


def pool_vectors(model: Bert, vectors: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """The pooler's output for hidden states of [CLS] positions."""
    return model.head("pooler")(vectors)


def sequence_vectors(
    model: Bert, hidden: Float[Array, "B T D"], sequence_ids: Int[Array, "B T"], cls_positions: Int[Array, "B S"]
) -> Float[Array, "B S D"]:
    """The input of class_logits and choice_logits: one vector of each sequence by heads.pooling, then the pooler
    where the model has one."""
    heads = model.head_config
    scores = model.head("pooling")(hidden) if heads.pooling.startswith("attention") else None
    vectors = pool_sequences(heads.pooling, hidden, sequence_ids, cls_positions, scores)
    return pool_vectors(model, vectors) if heads.pooler else vectors


def next_sentence_logits(model: Bert, pooled: Float[Array, "B S D"]) -> Float[Array, "B S 2"]:
    """Logits of the two classes "is next" and "random"."""
    return model.head("next_sentence_head")(pooled)


def class_logits(
    model: Bert, vectors: Float[Array, "B S D"], dropout_key: PRNGKeyArray | None = None
) -> Float[Array, "B S C"]:
    """Logits of a sequence's class, or its regression (C = 1)."""
    return model.head("classifier")(vectors, model.dropout_seeds(dropout_key, "classifier", vectors.shape[0]))


def choice_logits(
    model: Bert, vectors: Float[Array, "B S D"], dropout_key: PRNGKeyArray | None = None
) -> Float[Array, "B S"]:
    """A score for each sequence; the loss takes the softmax over the sequences of one question."""
    return class_logits(model, vectors, dropout_key)[..., 0]


def tag_logits(
    model: Bert, hidden: Float[Array, "B T D"], dropout_key: PRNGKeyArray | None = None
) -> Float[Array, "B T C"]:
    """Logits of every token's tag, or its regression (C = 1)."""
    seeds = model.dropout_seeds(dropout_key, "tagger", hidden.shape[0])
    return model.head("tagger")(_token_vectors(model, hidden), seeds)


def answer_logits(model: Bert, hidden: Float[Array, "B T D"]) -> Float[Array, "B T 2"]:
    """Logits of an answer's first and last position: S.h and E.h (Devlin et al. 2019, section 4.2)."""
    return model.head("question_head")(_token_vectors(model, hidden))


def span_vectors(
    model: Bert, hidden: Float[Array, "B T D"], dropout_key: PRNGKeyArray | None = None
) -> Float[Array, "B T K G"]:
    """A vector for each span of up to heads.spans.length positions (heads/spans.py)."""
    return model.head("spans")(hidden, model.dropout_seeds(dropout_key, "spans", hidden.shape[0]))


def span_logits(
    model: Bert, vectors: Float[Array, "B T K G"], dropout_key: PRNGKeyArray | None = None
) -> Float[Array, "B T K C"]:
    """Logits of each span's class, or of whether it is a span at all (C = 1)."""
    seeds = model.dropout_seeds(dropout_key, "span_classifier", vectors.shape[0])
    return model.head("span_classifier")(vectors, seeds)


def relation_logits(
    model: Bert, vectors: Float[Array, "B P G"], dropout_key: PRNGKeyArray | None = None
) -> Float[Array, "B P P C"]:
    """Logits of the relation from each of P spans to each other, from their span_vectors (heads.take_spans)."""
    seeds = model.dropout_seeds(dropout_key, "span_relations", vectors.shape[0])
    return model.head("span_relations")(vectors, seeds)


def _token_vectors(model: Bert, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The input of heads over single tokens: in ModernBERT the pooler's transform comes first."""
    return pool_vectors(model, hidden) if model.config.pooler == "transform" else hidden
