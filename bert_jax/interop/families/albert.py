"""ALBERT (modeling_albert.py of transformers; Lan et al. 2020).

All layers share one set of parameters, and embeddings have their own width. The sentence order head is bert_jax's
next sentence head.
"""

from bert_jax.interop import family
from bert_jax.interop.families import bert
from bert_jax.interop.family import Family, Field, Parts

# Defaults of AlbertConfig. Its classifier_dropout_prob is not read.
DEFAULTS = {"dropout": 0.0, "attention_dropout": 0.0}
LAYER = "encoder.albert_layer_groups.0.albert_layers.0"

POOLER: Parts = {"pooler": family.dense("pooler/dense", "pooler")}
MLM = family.mlm_head("predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias")
SENTENCE_ORDER: Parts = {"next_sentence": family.dense("next_sentence_head/dense", "sop_classifier.classifier")}

ALBERT = Family(
    model_type="albert",
    title="ALBERT",
    prefix="albert.",
    base=bert.BASE,
    base_class="AlbertModel",
    encoder=(
        *bert.EMBEDDINGS,
        *family.dense("embeddings/projection", "encoder.embedding_hidden_mapping_in"),
        *family.qkv(*(f"{LAYER}.attention.{name}" for name in ("query", "key", "value"))),
        *family.attention_output(f"{LAYER}.attention.dense"),
        *family.norm("encoder/layers/attention_norm", f"{LAYER}.attention.LayerNorm"),
        *family.dense("encoder/layers/feed_forward/input", f"{LAYER}.ffn"),
        *family.dense("encoder/layers/feed_forward/output", f"{LAYER}.ffn_output"),
        *family.norm("encoder/layers/feed_forward_norm", f"{LAYER}.full_layer_layer_norm"),
    ),
    classes={
        "AlbertModel": {},
        "AlbertForPreTraining": MLM | SENTENCE_ORDER | POOLER,
        "AlbertForMaskedLM": MLM,
        "AlbertForSequenceClassification": POOLER | bert.CLASSES,
        "AlbertForTokenClassification": bert.TAGS,
        "AlbertForQuestionAnswering": bert.QUESTION,
        "AlbertForMultipleChoice": POOLER | bert.CHOICES,
    },
    optional=POOLER | MLM | SENTENCE_ORDER,
    copies={
        "predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    buffers=bert.BUFFERS,
    fields=(
        *(Field(field, name, DEFAULTS.get(field, default)) for field, name, default in bert.FIELDS),
        Field("embedding_width", "embedding_size", 128),
    ),
    activation=("hidden_act", "gelu_new"),
    fixed=(
        ("num_hidden_groups", (1,)),
        ("inner_group_num", (1,)),
        ("tie_word_embeddings", (True, None)),
    ),
    always=bert.ALWAYS | {"position_offset": 0, "shared_layers": "all", "tied_output": True},
    # The format always has a projection. A model without a separate embedding width has none.
    read_further=lambda file, values, fields: {"embedding_width": fields["embedding_width"] or fields["width"]},
    write_further=lambda model, vocabulary: {
        "num_hidden_groups": 1,
        "inner_group_num": 1,
        "classifier_dropout_prob": model.dropout,
        "type_vocab_size": max(1, model.segment_types),  # the format cannot omit token types
        "bos_token_id": vocabulary.cls_id,
        "eos_token_id": vocabulary.sep_id,
    },
)
