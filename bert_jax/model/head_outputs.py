"""The outputs of the heads of pretraining, from the hidden states of a model; task_outputs has those of fine-tuning.

Each function takes a bound model (bert_jax.model.bert.bind) and reads the heads that it needs from it. B batch, T
positions, S sequences of a row, M predicted positions, D width, V padded vocabulary.
"""

from typing import Any

from jaxtyping import Array, Float, Int, PRNGKeyArray

from bert_jax.model.bert import Bert
from bert_jax.model.layer import gather_positions
from bert_jax.model.layers import child_key
from bert_jax.model.vocabulary_product import VocabularyProduct


def vocabulary_logits(model: Bert, vectors: Float[Array, "B M D"]) -> Float[Array, "B M V"]:
    """Returns float32 vocabulary logits of hidden states; V is padded, and the padding's logits are -inf."""
    return vocabulary_product(model, vectors).logits()


def vocabulary_product(model: Bert, vectors: Float[Array, "B M D"]) -> VocabularyProduct:
    """Returns vocabulary_logits before they are computed, for a loss."""
    head = model.head("lm_head" if model.head_config.lm else "mlm_head")
    return head.product(vectors, model.token_table)


def generator_logits(
    model: Bert, batch: Any, masked_positions: Int[Array, "B M"], dropout_key: PRNGKeyArray | None
) -> Float[Array, "B M V"]:
    """vocabulary_logits of the generator at M positions of each row; it shares the embeddings of the model."""
    embedded = model.embedding_vectors(batch, model.dropout_seeds(dropout_key, "generator", len(batch.input_ids)))
    key = None if dropout_key is None else child_key(dropout_key, "generator_encoder")
    return model.head("generator")(embedded, batch, masked_positions, model.token_table, key)


def replaced_token_logits(model: Bert, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """float32 logits of the probability that each token is not the original one."""
    return model.head("replaced_tokens_head")(hidden)


def masked_logits(
    model: Bert, hidden: Float[Array, "B T D"], masked_positions: Int[Array, "B M"]
) -> Float[Array, "B M V"]:
    """Returns vocabulary_logits at M positions of each row only."""
    return vocabulary_logits(model, gather_positions(hidden, masked_positions))


def span_boundary_product(
    model: Bert, left: Float[Array, "B M D"], right: Float[Array, "B M D"], offsets: Int[Array, "B M"]
) -> VocabularyProduct:
    """Returns vocabulary logits, before they are computed, from the hidden states on both sides of a span and the
    offset of each token in it."""
    tied = model.config.tied_output
    table = model.token_table if tied else model.head("mlm_head").output.table[...]
    return model.head("span_boundary_head")(left, right, offsets, table)


def pool_vectors(model: Bert, vectors: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """Returns the pooler's output for hidden states of [CLS] positions."""
    return model.head("pooler")(vectors)


def next_sentence_logits(model: Bert, pooled: Float[Array, "B S D"]) -> Float[Array, "B S 2"]:
    """Returns logits of the two classes "is next" and "random"."""
    return model.head("next_sentence_head")(pooled)
