"""ALBERT (modeling_albert.py of transformers; Lan et al. 2020).

All layers share one set of parameters, and the embeddings have a width of their own. The head of
sentence order is bert_jax's head of the next sentence.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.interop.families import bert
from bert_jax.interop.family import (
    ATTENTION_OUTPUT,
    LAYERS,
    SAME,
    VOCABULARY,
    Architecture,
    Entry,
    Family,
    Field,
    Parts,
    dense,
    make_architecture,
    mlm_head,
    norm,
    qkv,
)
from bert_jax.tokenization.vocabulary import Vocabulary

# Defaults of AlbertConfig. Its classifier_dropout_prob is not read.
DEFAULTS = {"dropout": 0.0, "attention_dropout": 0.0}
FIELDS = (
    *(Field(field, name, DEFAULTS.get(field, default)) for field, name, default in bert.FIELDS),
    Field("embedding_width", "embedding_size", 128),
)
ALWAYS = bert.ALWAYS | {"position_offset": 0, "shared_layers": "all", "tied_output": True}
FIXED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("num_hidden_groups", (1,)),
    ("inner_group_num", (1,)),
    ("tie_word_embeddings", (True, None)),
)
LAYER = "encoder.albert_layer_groups.0.albert_layers.0"

ENCODER: tuple[Entry, ...] = (
    Entry("embeddings/token/table", ("embeddings.word_embeddings.weight",), VOCABULARY),
    Entry("embeddings/position/table", ("embeddings.position_embeddings.weight",), SAME),
    Entry("embeddings/segment/table", ("embeddings.token_type_embeddings.weight",), SAME),
    *norm("embeddings/norm", "embeddings.LayerNorm"),
    *dense("embeddings/projection", "encoder.embedding_hidden_mapping_in"),
    *qkv(*(f"{LAYER}.attention.{name}" for name in ("query", "key", "value"))),
    *dense(f"{LAYERS}attention/output", f"{LAYER}.attention.dense", ATTENTION_OUTPUT),
    *norm(f"{LAYERS}attention_norm", f"{LAYER}.attention.LayerNorm"),
    *dense(f"{LAYERS}feed_forward/input", f"{LAYER}.ffn"),
    *dense(f"{LAYERS}feed_forward/output", f"{LAYER}.ffn_output"),
    *norm(f"{LAYERS}feed_forward_norm", f"{LAYER}.full_layer_layer_norm"),
)
POOLER: Parts = {"pooler": dense("pooler/dense", "pooler")}
MLM: Parts = mlm_head("predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias")
SENTENCE_ORDER: Parts = {"next_sentence": dense("next_sentence_head/dense", "sop_classifier.classifier")}


def _architecture(*required: Parts) -> Architecture:
    """Returns an architecture that may also hold the pooler and the pretraining heads, as published files often do."""
    return make_architecture(*required, optional=POOLER | MLM | SENTENCE_ORDER)


def _read_further(where: Path, values: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The format always has a projection, which a model without a width of its own for embeddings lacks."""
    return {} if fields["embedding_width"] else {"embedding_width": fields["width"]}


def _write_further(model: ModelConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "num_hidden_groups": 1,
        "inner_group_num": 1,
        "classifier_dropout_prob": model.dropout,
        "type_vocab_size": max(1, model.segment_types),  # the format cannot omit token types
        "bos_token_id": vocabulary.cls_id,
        "eos_token_id": vocabulary.sep_id,
    }


ALBERT = Family(
    model_type="albert",
    title="ALBERT",
    prefix="albert.",
    base=bert.BASE,
    base_class="AlbertModel",
    encoder=ENCODER,
    architectures={
        "AlbertModel": _architecture(),
        "AlbertForPreTraining": _architecture(MLM, SENTENCE_ORDER, POOLER),
        "AlbertForMaskedLM": _architecture(MLM),
        "AlbertForSequenceClassification": _architecture(POOLER, bert.CLASSES),
        "AlbertForTokenClassification": _architecture(bert.TAGS),
        "AlbertForQuestionAnswering": _architecture(bert.QUESTION),
        "AlbertForMultipleChoice": _architecture(POOLER, bert.CHOICES),
    },
    copies={
        "predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    buffers=bert.BUFFERS,
    fields=FIELDS,
    activation=("hidden_act", "gelu_new"),
    fixed=FIXED,
    always=ALWAYS,
    read_further=_read_further,
    write_further=_write_further,
)
