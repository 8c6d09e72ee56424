"""MPNet (modeling_mpnet.py of transformers; Song et al. 2020).

The layers are BERT's, with biases of attention scores by bucketed distance that all layers share.
Learned positions begin after the padding id, there are no segments, and the heads are RoBERTa's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.interop.families import bert, roberta
from bert_jax.interop.family import (
    ATTENTION_OUTPUT,
    LAYERS,
    SAME,
    Architecture,
    Entry,
    Family,
    dense,
    norm,
    qkv,
    read_fields,
)
from bert_jax.model.embeddings import BUCKETS
from bert_jax.tokenization.vocabulary import Vocabulary

PADDING = 1  # MPNetEmbeddings has this padding id, whatever pad_token_id says; positions begin after it
FIELDS = tuple(field for field in bert.FIELDS if field.field not in ("max_positions", "segment_types"))
ROWS = (roberta.POSITIONS[0],)
ALWAYS = bert.ALWAYS | {
    "relative": "buckets",
    "relative_distance": 128,  # the default of relative_position_bucket
    "segment_types": 0,
    "position_offset": PADDING + 1,
    "activation": "gelu",
}
# compute_position_bias looks buckets up as if there were 32, whatever this field says.
# The MLM head uses the exact GELU regardless of hidden_act (MPNetLMHead).
FIXED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hidden_act", ("gelu",)),
    ("relative_attention_num_buckets", (BUCKETS,)),
)

_CHANGED: tuple[Entry, ...] = (
    *qkv(*(f"encoder.layer.{{}}.attention.attn.{name}" for name in "qkv")),
    *dense(f"{LAYERS}attention/output", "encoder.layer.{}.attention.attn.o", ATTENTION_OUTPUT),
    *norm(f"{LAYERS}attention_norm", "encoder.layer.{}.attention.LayerNorm"),
)
ENCODER: tuple[Entry, ...] = (
    *(entry for entry in bert.ENCODER if entry.path not in {changed.path for changed in _CHANGED}),
    *_CHANGED,
    Entry("encoder/relative_bias/table", ("encoder.relative_attention_bias.weight",), SAME),
)


def _read_further(where: Path, values: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    rows = read_fields(where, values, ROWS)["rows"]
    if rows <= PADDING + 1:
        raise UserError(f"{where}: max_position_embeddings is {rows}; expected more than {PADDING + 1}")
    return {"max_positions": rows - PADDING - 1}


def _write_further(model: ModelConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "max_position_embeddings": model.max_positions + model.position_offset,
        "relative_attention_num_buckets": BUCKETS,
        "bos_token_id": vocabulary.cls_id,
        "eos_token_id": vocabulary.sep_id,
    }


MPNET = Family(
    model_type="mpnet",
    title="MPNet",
    prefix="mpnet.",
    base=bert.BASE,
    base_class="MPNetModel",
    encoder=ENCODER,
    architectures={
        "MPNetModel": Architecture({}, bert.POOLER),
        "MPNetForMaskedLM": Architecture(roberta.MLM, bert.POOLER),
        "MPNetForSequenceClassification": Architecture(roberta.CLASSES, {}),
        "MPNetForTokenClassification": Architecture(bert.TAGS, bert.POOLER),
        "MPNetForQuestionAnswering": Architecture(bert.QUESTION, bert.POOLER),
        "MPNetForMultipleChoice": Architecture(bert.POOLER | bert.CHOICES, {}),
    },
    copies={
        "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    buffers=("embeddings.position_ids",),
    # Published classifiers contain the pooler of the model they were fine-tuned from.
    unread=("pooler.dense.weight", "pooler.dense.bias"),
    fields=FIELDS,
    fixed=FIXED,
    always=ALWAYS,
    read_further=_read_further,
    write_further=_write_further,
)
