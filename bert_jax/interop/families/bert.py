"""BERT (modeling_bert.py of transformers). Dense kernels are [out, in]; query, key and value are separate tensors."""

from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.interop import family
from bert_jax.interop.family import SAME, Entry, Family, Field, Parts
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
# Fields of ModelConfig that config.json cannot change.
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
FIXED: family.Fixed = (
    ("position_embedding_type", ("absolute", None)),
    ("is_decoder", (False, None)),
    ("add_cross_attention", (False, None)),
    ("pruned_heads", ({}, None)),
)

EMBEDDINGS = (
    Entry("embeddings/token/table", ("embeddings.word_embeddings.weight",), family.VOCABULARY),
    Entry("embeddings/position/table", ("embeddings.position_embeddings.weight",), SAME),
    Entry("embeddings/segment/table", ("embeddings.token_type_embeddings.weight",), SAME),
    *family.norm("embeddings/norm", "embeddings.LayerNorm"),
)
ENCODER = (
    *EMBEDDINGS,
    *family.qkv(*(f"encoder.layer.{{}}.attention.self.{name}" for name in ("query", "key", "value"))),
    *family.attention_output("encoder.layer.{}.attention.output.dense"),
    *family.norm("encoder/layers/attention_norm", "encoder.layer.{}.attention.output.LayerNorm"),
    *family.dense("encoder/layers/feed_forward/input", "encoder.layer.{}.intermediate.dense"),
    *family.dense("encoder/layers/feed_forward/output", "encoder.layer.{}.output.dense"),
    *family.norm("encoder/layers/feed_forward_norm", "encoder.layer.{}.output.LayerNorm"),
)
POOLER: Parts = {"pooler": family.dense("pooler/dense", "pooler.dense")}
MLM = family.mlm_head(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
NEXT_SENTENCE: Parts = {"next_sentence": family.dense("next_sentence_head/dense", "cls.seq_relationship")}
CLASSES: Parts = {"classes": family.dense("classifier/dense", "classifier")}
TAGS: Parts = {"tags": family.dense("tagger/dense", "classifier")}
CHOICES: Parts = {"choices": family.dense("classifier/dense", "classifier")}  # with a single output
QUESTION: Parts = {"question": family.dense("question_head/dense", "qa_outputs")}
BASE = ("embeddings.", "encoder.", "pooler.")
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")


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
    classes={
        "BertModel": {},
        "BertForPreTraining": MLM | NEXT_SENTENCE | POOLER,
        "BertForMaskedLM": MLM,
        "BertForNextSentencePrediction": NEXT_SENTENCE | POOLER,
        "BertForSequenceClassification": POOLER | CLASSES,
        "BertForTokenClassification": TAGS,
        "BertForQuestionAnswering": QUESTION,
        "BertForMultipleChoice": POOLER | CHOICES,
    },
    optional=POOLER | MLM | NEXT_SENTENCE,
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
