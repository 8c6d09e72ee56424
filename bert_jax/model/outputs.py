"""Heads' outputs on a model's hidden states: layer selections, then pretraining, then fine-tuning.

Each function takes a bound model (bert_jax.model.bert.bind), and a dropout key if it drops out (None in evaluation).
B batch, T positions, S sequences of a row, M predicted positions, D width, V padded vocabulary, K span lengths,
C classes, P spans, G the width of a span's vector.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bert_jax.errors import UserError
from bert_jax.model.bert import Bert, part_key
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.heads.basic import pool_sequences
from bert_jax.model.ops import VocabularyProduct
from bert_jax.model.transformer import Encoded, gather_positions

MIX = "mix"  # all layers, for heads that mix them by learned weights (model/heads/basic.py)
LAYERS = ("embeddings", "last", "second_to_last", "sum_all", "sum_last_4", "concat_last_4", "mean_last_4")


@dataclass(frozen=True)
class LayerSelection:
    """Hidden states by the names of Devlin et al. 2019, table 7; 0 is the embeddings."""

    indices: tuple[int, ...]
    combine: str  # sum, mean or concat

    @staticmethod
    def parse(name: str, layers: int) -> "LayerSelection":
        """Parses a name in LAYERS, a layer number, or mix: [h_0; ...; h_L], the embeddings and all layers.

        Raises:
            UserError: the name is none of these, or needs more layers than the model has.
        """
        every = tuple(range(1, layers + 1))
        if name == MIX:
            return LayerSelection((0, *every), "concat")
        # A single layer, whose sum is the layer itself.
        if name.isdecimal() and int(name) <= layers:
            return LayerSelection((int(name),), "sum")
        if name not in LAYERS:
            raise UserError(
                f"unknown --layers {name!r}; choose from {', '.join(LAYERS)}, or give a number from 0 to {layers}"
            )
        if name.endswith("_last_4") and layers < 4:
            raise UserError(f"--layers is {name}, but the model has {layers} layers. Use last, sum_all or a number")
        # sum_all leaves out the embeddings: Devlin et al. sum the layers only.
        singles = {"embeddings": (0,), "last": (layers,), "second_to_last": (layers - 1,), "sum_all": every}
        combine = name.removesuffix("_last_4") if name.endswith("_last_4") else "sum"
        return LayerSelection(singles.get(name, every[-4:]), combine)

    def width(self, model_width: int) -> int:
        """Returns the combined vectors' width."""
        return model_width * (len(self.indices) if self.combine == "concat" else 1)

    def inner(self, layers: int) -> bool:
        """Whether the selection needs encode(all_layers=True)."""
        return self.indices not in ((0,), (layers,))

    def of(self, encoded: Encoded, layers: int) -> Float[Array, "B T W"]:
        """Combines every position's selected states, in float32."""
        # The embeddings and the last layer are always there, the others only after encode(all_layers=True).
        states = {0: encoded.embeddings, layers: encoded.last}
        if encoded.layers is not None:
            states |= {depth + 1: encoded.layers[depth] for depth in range(layers)}
        selected = [states[index].astype(jnp.float32) for index in self.indices]
        if self.combine == "concat":
            return jnp.concatenate(selected, axis=-1)
        # Added one by one, from the lowest layer up, so that no stack [n, B, T, D] is made.
        total = functools.reduce(jnp.add, selected)
        return total / len(selected) if self.combine == "mean" else total


def vocabulary_logits(model: Bert, vectors: Float[Array, "B M D"]) -> Float[Array, "B M V"]:
    """Returns float32 vocabulary logits for hidden states; -inf for V's padding."""
    return vocabulary_product(model, vectors).logits()


def vocabulary_product(model: Bert, vectors: Float[Array, "B M D"]) -> VocabularyProduct:
    """Returns vocabulary_logits before they are computed, for a loss."""
    # Heads allows only one of the two.
    head = model.head("lm_head" if model.head_config.lm else "mlm_head")
    return head.product(vectors, model.token_table)


def masked_logits(
    model: Bert, hidden: Float[Array, "B T D"], masked_positions: Int[Array, "B M"]
) -> Float[Array, "B M V"]:
    """Returns vocabulary_logits at each row's M positions."""
    return vocabulary_logits(model, gather_positions(hidden, masked_positions))


def generator_logits(
    model: Bert, batch: Any, masked_positions: Int[Array, "B M"], dropout_key: DropoutKey
) -> Float[Array, "B M V"]:
    """Returns the generator's vocabulary_logits at each row's M positions; it shares the model's embeddings."""
    # Streams of its own: the generator drops other elements of the shared embeddings than the model does.
    embedded = model.embedding_vectors(batch, model.dropout_seeds(dropout_key, "generator", len(batch.input_ids)))
    key = part_key(dropout_key, "generator_encoder")
    return model.head("generator")(embedded, batch, masked_positions, model.token_table, key)


def replaced_token_logits(model: Bert, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """Returns float32 logits for each token: it was replaced."""
    return model.head("replaced_tokens_head")(hidden)


def span_boundary_product(
    model: Bert, left: Float[Array, "B M D"], right: Float[Array, "B M D"], offsets: Int[Array, "B M"]
) -> VocabularyProduct:
    """Returns vocabulary logits, before they are computed, from both sides of a span and offsets in it (from 1)."""
    # The output matrix of masked tokens: the token table, or the head's own.
    tied = model.config.tied_output
    table = model.token_table if tied else model.head("mlm_head").output.table[...]
    return model.head("span_boundary_head")(left, right, offsets, table)


def pool_vectors(model: Bert, vectors: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """Returns the pooler's output for [CLS] states."""
    return model.head("pooler")(vectors)


def next_sentence_logits(model: Bert, pooled: Float[Array, "B S D"]) -> Float[Array, "B S 2"]:
    """Returns logits for the two classes "is next" and "random"."""
    return model.head("next_sentence_head")(pooled)


def task_states(model: Bert, encoded: Encoded) -> Float[Array, "B T D"]:
    """Returns the input for the heads below: the last layer, or with heads.layer_mix the mix."""
    if not model.head_config.layer_mix:
        return encoded.last
    assert encoded.layers is not None, "encode(all_layers=heads.layer_mix) comes before"
    # h_0 to h_L, in the order of the mix's scores.
    return model.head("layer_mix")(jnp.concatenate([encoded.embeddings[None], encoded.layers]))


def encode_for_task(model: Bert, batch: Any, dropout_key: DropoutKey = None) -> Float[Array, "B T D"]:
    """Returns task_states for a batch."""
    return task_states(model, model.encode(batch, dropout_key, all_layers=model.head_config.layer_mix))


def sequence_vectors(
    model: Bert, hidden: Float[Array, "B T D"], sequence_ids: Int[Array, "B T"], cls_positions: Int[Array, "B S"]
) -> Float[Array, "B S D"]:
    """Pools each sequence by heads.pooling, and through any pooler, for class_logits and choice_logits."""
    heads = model.head_config
    # Only attention poolings have parameters.
    scores = model.head("pooling")(hidden) if heads.pooling.startswith("attention") else None
    vectors = pool_sequences(heads.pooling, hidden, sequence_ids, cls_positions, scores)
    return pool_vectors(model, vectors) if heads.pooler else vectors


def class_logits(model: Bert, vectors: Float[Array, "B S D"], dropout_key: DropoutKey = None) -> Float[Array, "B S C"]:
    """Returns logits for a sequence's class, or its regression (C = 1)."""
    return _dropping_head(model, "classifier", vectors, dropout_key)


def choice_logits(model: Bert, vectors: Float[Array, "B S D"], dropout_key: DropoutKey = None) -> Float[Array, "B S"]:
    """Returns a score for each sequence; the loss takes the softmax over one question's sequences."""
    return class_logits(model, vectors, dropout_key)[..., 0]


def tag_logits(model: Bert, hidden: Float[Array, "B T D"], dropout_key: DropoutKey = None) -> Float[Array, "B T C"]:
    """Returns logits for every token's tag, or its regression (C = 1)."""
    return _dropping_head(model, "tagger", _token_vectors(model, hidden), dropout_key)


def answer_logits(model: Bert, hidden: Float[Array, "B T D"]) -> Float[Array, "B T 2"]:
    """Returns logits for an answer's first and last position: S.h and E.h (Devlin et al. 2019, section 4.2)."""
    return model.head("question_head")(_token_vectors(model, hidden))


def span_vectors(model: Bert, hidden: Float[Array, "B T D"], dropout_key: DropoutKey = None) -> Float[Array, "B T K G"]:
    """Returns a vector for each span of up to heads.spans.length positions."""
    return _dropping_head(model, "spans", hidden, dropout_key)


def span_logits(
    model: Bert, vectors: Float[Array, "B T K G"], dropout_key: DropoutKey = None
) -> Float[Array, "B T K C"]:
    """Returns logits for each span's class, or whether it is a span at all (C = 1)."""
    return _dropping_head(model, "span_classifier", vectors, dropout_key)


def relation_logits(
    model: Bert, vectors: Float[Array, "B P G"], dropout_key: DropoutKey = None
) -> Float[Array, "B P P C"]:
    """Returns logits for the relations between P spans, from their vectors (structured.take_spans)."""
    return _dropping_head(model, "span_relations", vectors, dropout_key)


def _dropping_head(model: Bert, name: str, vectors: Array, dropout_key: DropoutKey) -> Any:
    return model.head(name)(vectors, model.dropout_seeds(dropout_key, name, vectors.shape[0]))


def _token_vectors(model: Bert, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Returns the input for heads that read single tokens: in ModernBERT the pooler's transform comes first."""
    return pool_vectors(model, hidden) if model.config.pooler == "transform" else hidden
