"""DistilBERT (modeling_distilbert.py of transformers; Sanh et al. 2019).

The layers are BERT's. There are no segments, no pooler of the base model, and every norm has epsilon
1e-12. The sequence classifier and multiple choice begin with `pre_classifier`, a dense layer and ReLU.
"""

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
    mlm_head,
    norm,
    qkv,
)

# Defaults of DistilBertConfig. Its qa_dropout and seq_classif_dropout are not read.
FIELDS = (
    Field("vocab_size", "vocab_size", None),
    Field("layers", "n_layers", 6),
    Field("width", "dim", 768),
    Field("heads", "n_heads", 12),
    Field("feed_forward", "hidden_dim", 3072),
    Field("max_positions", "max_position_embeddings", 512),
    Field("dropout", "dropout", 0.1),
    Field("attention_dropout", "attention_dropout", 0.1),
    Field("initializer_range", "initializer_range", 0.02),
)
ALWAYS = bert.ALWAYS | {
    "segment_types": 0,
    "position_offset": 0,
    "layer_norm_epsilon": 1e-12,
    "pooler": "relu",
}

ENCODER: tuple[Entry, ...] = (
    Entry("embeddings/token/table", ("embeddings.word_embeddings.weight",), VOCABULARY),
    Entry("embeddings/position/table", ("embeddings.position_embeddings.weight",), SAME),
    *norm("embeddings/norm", "embeddings.LayerNorm"),
    *qkv(*(f"transformer.layer.{{}}.attention.{name}_lin" for name in "qkv")),
    *dense(f"{LAYERS}attention/output", "transformer.layer.{}.attention.out_lin", ATTENTION_OUTPUT),
    *norm(f"{LAYERS}attention_norm", "transformer.layer.{}.sa_layer_norm"),
    *dense(f"{LAYERS}feed_forward/input", "transformer.layer.{}.ffn.lin1"),
    *dense(f"{LAYERS}feed_forward/output", "transformer.layer.{}.ffn.lin2"),
    *norm(f"{LAYERS}feed_forward_norm", "transformer.layer.{}.output_layer_norm"),
)
MLM: Parts = mlm_head("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias")
POOLER: Parts = {"pooler": dense("pooler/dense", "pre_classifier")}


DISTILBERT = Family(
    model_type="distilbert",
    title="DistilBERT",
    prefix="distilbert.",
    base=("embeddings.", "transformer."),
    base_class="DistilBertModel",
    encoder=ENCODER,
    architectures={
        "DistilBertModel": Architecture({}, {}),
        "DistilBertForMaskedLM": Architecture(MLM, {}),
        "DistilBertForSequenceClassification": Architecture(POOLER | bert.CLASSES, {}),
        "DistilBertForTokenClassification": Architecture(bert.TAGS, {}),
        "DistilBertForQuestionAnswering": Architecture(bert.QUESTION, {}),
        "DistilBertForMultipleChoice": Architecture(POOLER | bert.CHOICES, {}),
    },
    copies={"vocab_projector.weight": "embeddings.word_embeddings.weight"},
    buffers=("embeddings.position_ids",),
    fields=FIELDS,
    activation=("activation", "gelu"),
    always=ALWAYS,
    # A stored table of sinusoids is read as learned positions.
    write_further=lambda model, vocabulary: {"sinusoidal_pos_embds": False},
)
