"""What heads compute from the hidden states of a model: layer selections, then pretraining, then fine-tuning.

Each function takes a bound model (bert_jax.model.bert.bind) and reads the heads that it needs from it. Functions that
drop out take a dropout key, and None in evaluation. B batch, T positions, S sequences of a row, M predicted positions,
D width, V padded vocabulary, K span lengths, C classes, P spans, G the width of a span's vector.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bert_jax.errors import UserError
from bert_jax.model.bert import Bert
from bert_jax.model.heads.basic import pool_sequences
from bert_jax.model.layers import child_key
from bert_jax.model.ops import VocabularyProduct
from bert_jax.model.transformer import Encoded, gather_positions

MIX = "mix"  # the states of all layers, which heads mix by learned weights (model/heads/basic.py)
LAYERS = ("embeddings", "last", "second_to_last", "sum_all", "sum_last_4", "concat_last_4", "mean_last_4")


@dataclass(frozen=True)
class LayerSelection:
    """Hidden states by the names of Devlin et al. 2019, table 7; 0 is the embeddings."""

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
        """Returns whether the selection needs a layer that only encode(all_layers=True) returns."""
        return self.indices not in ((0,), (layers,))

    def of(self, encoded: Encoded, layers: int) -> Float[Array, "B T W"]:
        """Returns the combined vectors of every position, float32."""
        states = {0: encoded.embeddings, layers: encoded.last}
        if encoded.layers is not None:
            states |= {depth + 1: encoded.layers[depth] for depth in range(layers)}
        selected = [states[index].astype(jnp.float32) for index in self.indices]
        if self.combine == "concat":
            return jnp.concatenate(selected, axis=-1)
        total = functools.reduce(jnp.add, selected)
        return total / len(selected) if self.combine == "mean" else total


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
    """Returns a vector for each span of up to heads.spans.length positions."""
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
