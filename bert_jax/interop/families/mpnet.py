"""MPNet (modeling_mpnet.py of transformers; Song et al. 2020).

The layers are BERT's, and attention scores also get biases by bucketed distance that all layers share. Learned
positions begin after the padding id, there are no segments, and the heads are RoBERTa's.
"""

from bert_jax.interop import family
from bert_jax.interop.families import bert, roberta
from bert_jax.interop.family import Entry, Family
from bert_jax.model.embeddings import BUCKETS

PADDING = 1  # MPNetEmbeddings has this padding id, whatever pad_token_id says; positions begin after it
_CHANGED = (
    *family.qkv(*(f"encoder.layer.{{}}.attention.attn.{name}" for name in "qkv")),
    *family.attention_output("encoder.layer.{}.attention.attn.o"),
    *family.norm("encoder/layers/attention_norm", "encoder.layer.{}.attention.LayerNorm"),
)

MPNET = Family(
    model_type="mpnet",
    title="MPNet",
    prefix="mpnet.",
    base=bert.BASE,
    base_class="MPNetModel",
    encoder=(
        *(entry for entry in bert.ENCODER if entry.path not in {changed.path for changed in _CHANGED}),
        *_CHANGED,
        Entry("encoder/relative_bias/table", ("encoder.relative_attention_bias.weight",), family.SAME),
    ),
    classes={
        "MPNetModel": {},
        "MPNetForMaskedLM": roberta.MLM,
        "MPNetForSequenceClassification": roberta.CLASSES,
        "MPNetForTokenClassification": bert.TAGS,
        "MPNetForQuestionAnswering": bert.QUESTION,
        "MPNetForMultipleChoice": bert.POOLER | bert.CHOICES,
    },
    optional=bert.POOLER,
    copies=roberta.COPIES,
    buffers=("embeddings.position_ids",),
    unread=roberta.UNREAD,
    fields=tuple(field for field in bert.FIELDS if field.field not in ("max_positions", "segment_types")),
    # compute_position_bias looks buckets up as if there were 32, whatever this field says.
    # The MLM head uses the exact GELU regardless of hidden_act (MPNetLMHead).
    fixed=(("hidden_act", ("gelu",)), ("relative_attention_num_buckets", (BUCKETS,))),
    always=bert.ALWAYS
    | {
        "relative": "buckets",
        "relative_distance": 128,  # the default of relative_position_bucket
        "segment_types": 0,
        "position_offset": PADDING + 1,
        "activation": "gelu",
    },
    read_further=lambda file, values, fields: roberta.read_positions(file, values, PADDING),
    write_further=lambda model, vocabulary: (
        roberta.write_positions(model, vocabulary) | {"relative_attention_num_buckets": BUCKETS}
    ),
)
