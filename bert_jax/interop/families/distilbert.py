"""DistilBERT (modeling_distilbert.py of transformers; Sanh et al. 2019).

The layers are BERT's. There are no segments, the base model has no pooler, and every norm has epsilon 1e-12. The
sequence classifier and multiple choice begin with `pre_classifier`, a dense layer and ReLU.
"""

from bert_jax.interop import family
from bert_jax.interop.families import bert
from bert_jax.interop.family import Family, Field, Parts

MLM = family.mlm_head("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias")
POOLER: Parts = {"pooler": family.dense("pooler/dense", "pre_classifier")}


DISTILBERT = Family(
    model_type="distilbert",
    title="DistilBERT",
    prefix="distilbert.",
    base=("embeddings.", "transformer."),
    base_class="DistilBertModel",
    encoder=(
        *(entry for entry in bert.EMBEDDINGS if entry.path != "embeddings/segment/table"),
        *family.qkv(*(f"transformer.layer.{{}}.attention.{name}_lin" for name in "qkv")),
        *family.attention_output("transformer.layer.{}.attention.out_lin"),
        *family.norm("encoder/layers/attention_norm", "transformer.layer.{}.sa_layer_norm"),
        *family.dense("encoder/layers/feed_forward/input", "transformer.layer.{}.ffn.lin1"),
        *family.dense("encoder/layers/feed_forward/output", "transformer.layer.{}.ffn.lin2"),
        *family.norm("encoder/layers/feed_forward_norm", "transformer.layer.{}.output_layer_norm"),
    ),
    classes={
        "DistilBertModel": {},
        "DistilBertForMaskedLM": MLM,
        "DistilBertForSequenceClassification": POOLER | bert.CLASSES,
        "DistilBertForTokenClassification": bert.TAGS,
        "DistilBertForQuestionAnswering": bert.QUESTION,
        "DistilBertForMultipleChoice": POOLER | bert.CHOICES,
    },
    copies={"vocab_projector.weight": "embeddings.word_embeddings.weight"},
    buffers=("embeddings.position_ids",),
    # Defaults of DistilBertConfig. Its qa_dropout and seq_classif_dropout are not read.
    fields=(
        Field("vocab_size", "vocab_size", None),
        Field("layers", "n_layers", 6),
        Field("width", "dim", 768),
        Field("heads", "n_heads", 12),
        Field("feed_forward", "hidden_dim", 3072),
        Field("max_positions", "max_position_embeddings", 512),
        Field("dropout", "dropout", 0.1),
        Field("attention_dropout", "attention_dropout", 0.1),
        Field("initializer_range", "initializer_range", 0.02),
    ),
    activation=("activation", "gelu"),
    always=bert.ALWAYS | {"segment_types": 0, "position_offset": 0, "layer_norm_epsilon": 1e-12, "pooler": "relu"},
    # A stored table of sinusoids is read as learned positions.
    write_further=lambda model, vocabulary: {"sinusoidal_pos_embds": False},
)
