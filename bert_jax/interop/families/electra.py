"""ELECTRA (modeling_electra.py of transformers; Clark et al. 2020).

The layers and their names are BERT's. Embeddings narrower than the layers are projected. A classifier
begins with a dense layer and GELU. ElectraForPreTraining is a discriminator, and ElectraForMaskedLM a
generator, which shares no parameter with it in these files.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.interop.families import bert
from bert_jax.interop.family import Architecture, Entry, Family, Field, Parts, dense, mlm_head
from bert_jax.tokenization.vocabulary import Vocabulary

FIELDS = (*bert.FIELDS, Field("embedding_width", "embedding_size", 128))
ALWAYS = bert.ALWAYS | {"position_offset": 0, "shared_layers": "none", "pooler": "gelu"}
# A summary for multiple choice other than a dense layer and GELU over the first token.
FIXED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("summary_type", ("first",)),
    ("summary_use_proj", (True,)),
    ("summary_activation", ("gelu",)),
    ("is_decoder", (False, None)),
    ("add_cross_attention", (False, None)),
)

ENCODER: tuple[Entry, ...] = (*bert.ENCODER, *dense("embeddings/projection", "embeddings_project"))
MLM: Parts = mlm_head(
    "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head", "generator_lm_head.bias"
)
REPLACED_TOKENS: Parts = {
    "replaced_tokens": (
        *dense("replaced_tokens_head/dense", "discriminator_predictions.dense"),
        *dense("replaced_tokens_head/output", "discriminator_predictions.dense_prediction"),
    )
}
CLASSES: Parts = {
    "pooler": dense("pooler/dense", "classifier.dense"),
    "classes": dense("classifier/dense", "classifier.out_proj"),
}
SUMMARY: Parts = {"pooler": dense("pooler/dense", "sequence_summary.summary")}


def _read_further(where: Path, values: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Embeddings as wide as the layers are not projected."""
    return {"embedding_width": 0} if fields["embedding_width"] == fields["width"] else {}


def _read_heads(where: Path, values: Mapping[str, Any], parts: frozenset[str]) -> dict[str, Any]:
    """The generator's head uses the exact GELU regardless of hidden_act (ElectraGeneratorPredictions)."""
    if "mlm" in parts and values.get("hidden_act", "gelu") != "gelu":
        raise UserError(
            f"{where}: hidden_act is {values['hidden_act']!r}, but the head of masked tokens has gelu in transformers"
        )
    return {}


def _write_further(model: ModelConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "embedding_size": model.table_width,
        "type_vocab_size": max(1, model.segment_types),  # the format cannot omit token types
        "summary_type": "first",
        "summary_use_proj": True,
        "summary_activation": "gelu",
        "summary_last_dropout": model.dropout,
        "classifier_dropout": None,
    }


ELECTRA = Family(
    model_type="electra",
    title="ELECTRA",
    prefix="electra.",
    base=("embeddings.", "embeddings_project.", "encoder."),
    base_class="ElectraModel",
    encoder=ENCODER,
    architectures={
        "ElectraModel": Architecture({}, {}),
        "ElectraForPreTraining": Architecture(REPLACED_TOKENS, {}),
        "ElectraForMaskedLM": Architecture(MLM, {}),
        "ElectraForSequenceClassification": Architecture(CLASSES, {}),
        "ElectraForTokenClassification": Architecture(bert.TAGS, {}),
        "ElectraForQuestionAnswering": Architecture(bert.QUESTION, {}),
        "ElectraForMultipleChoice": Architecture(SUMMARY | bert.CHOICES, {}),
    },
    copies={"generator_lm_head.weight": "embeddings.word_embeddings.weight"},
    buffers=bert.BUFFERS,
    fields=FIELDS,
    fixed=FIXED,
    always=ALWAYS,
    read_further=_read_further,
    read_heads=_read_heads,
    write_further=_write_further,
)
