"""BERT (modeling_bert.py of transformers).

Dense kernels are [out, in]; query, key and value are separate tensors.
"""

from typing import Any

from bert_jax.config import ModelConfig
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

# Defaults of BertConfig.
FIELDS = (
    Field("vocab_size", "vocab_size", None),
    Field("layers", "num_hidden_layers", None),
    Field("width", "hidden_size", None),
    Field("heads", "num_attention_heads", None),
    Field("feed_forward", "intermediate_size", None),
    Field("max_positions", "max_position_embeddings", 512),
    Field("segment_types", "type_vocab_size", 2),
    Field("dropout", "hidden_dropout_prob", 0.1),
    Field("attention_dropout", "attention_probs_dropout_prob", 0.1),
    Field("layer_norm_epsilon", "layer_norm_eps", 1e-12),
    Field("initializer_range", "initializer_range", 0.02),
)
# The same for all models of the family.
ALWAYS = {
    "norm": "post",
    "embedding_norm": True,
    "bias": True,
    "gated": False,
    "positions": "learned",
    "relative": "none",
    "window": 0,
    "causal": False,
    "pooler": "tanh",
}
FIXED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("position_embedding_type", ("absolute", None)),
    ("is_decoder", (False, None)),
    ("add_cross_attention", (False, None)),
    ("pruned_heads", ({}, None)),
)

ENCODER: tuple[Entry, ...] = (
    Entry("embeddings/token/table", ("embeddings.word_embeddings.weight",), VOCABULARY),
    Entry("embeddings/position/table", ("embeddings.position_embeddings.weight",), SAME),
    Entry("embeddings/segment/table", ("embeddings.token_type_embeddings.weight",), SAME),
    *norm("embeddings/norm", "embeddings.LayerNorm"),
    *qkv(*(f"encoder.layer.{{}}.attention.self.{name}" for name in ("query", "key", "value"))),
    *dense(f"{LAYERS}attention/output", "encoder.layer.{}.attention.output.dense", ATTENTION_OUTPUT),
    *norm(f"{LAYERS}attention_norm", "encoder.layer.{}.attention.output.LayerNorm"),
    *dense(f"{LAYERS}feed_forward/input", "encoder.layer.{}.intermediate.dense"),
    *dense(f"{LAYERS}feed_forward/output", "encoder.layer.{}.output.dense"),
    *norm(f"{LAYERS}feed_forward_norm", "encoder.layer.{}.output.LayerNorm"),
)
POOLER: Parts = {"pooler": dense("pooler/dense", "pooler.dense")}
MLM: Parts = mlm_head(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
NEXT_SENTENCE: Parts = {"next_sentence": dense("next_sentence_head/dense", "cls.seq_relationship")}
CLASSES: Parts = {"classes": dense("classifier/dense", "classifier")}
TAGS: Parts = {"tags": dense("tagger/dense", "classifier")}
CHOICES: Parts = {"choices": dense("classifier/dense", "classifier")}  # with a single output
QUESTION: Parts = {"question": dense("question_head/dense", "qa_outputs")}
BASE = ("embeddings.", "encoder.", "pooler.")
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")


def _architecture(*required: Parts) -> Architecture:
    """Returns an architecture that may also hold the pooler and the pretraining heads, as published files often do."""
    return make_architecture(*required, optional=POOLER | MLM | NEXT_SENTENCE)


def write_further(model: ModelConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "type_vocab_size": max(1, model.segment_types),  # the format cannot omit token types
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "classifier_dropout": None,
    }


BERT = Family(
    model_type="bert",
    title="BERT",
    prefix="bert.",
    base=BASE,
    base_class="BertModel",
    encoder=ENCODER,
    architectures={
        "BertModel": _architecture(),
        "BertForPreTraining": _architecture(MLM, NEXT_SENTENCE, POOLER),
        "BertForMaskedLM": _architecture(MLM),
        "BertForNextSentencePrediction": _architecture(NEXT_SENTENCE, POOLER),
        "BertForSequenceClassification": _architecture(POOLER, CLASSES),
        "BertForTokenClassification": _architecture(TAGS),
        "BertForQuestionAnswering": _architecture(QUESTION),
        "BertForMultipleChoice": _architecture(POOLER, CHOICES),
    },
    copies={
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    buffers=BUFFERS,
    fields=FIELDS,
    fixed=FIXED,
    always=ALWAYS,
    write_further=write_further,
)
