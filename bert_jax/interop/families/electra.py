"""ELECTRA (modeling_electra.py of transformers; Clark et al. 2020).

The layers and their names are BERT's. Embeddings narrower than the layers are projected. A classifier begins with a
dense layer and GELU. ElectraForPreTraining is a discriminator and ElectraForMaskedLM a generator; in these files they
share no parameter.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError
from bert_jax.interop import family
from bert_jax.interop.families import bert, roberta
from bert_jax.interop.family import Family, Field, Parts

MLM = family.mlm_head(
    "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head", "generator_lm_head.bias"
)
REPLACED_TOKENS: Parts = {
    "replaced_tokens": (
        *family.dense("replaced_tokens_head/dense", "discriminator_predictions.dense"),
        *family.dense("replaced_tokens_head/output", "discriminator_predictions.dense_prediction"),
    )
}
SUMMARY: Parts = {"pooler": family.dense("pooler/dense", "sequence_summary.summary")}


def _read_heads(file: Path, values: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    # The generator's head uses the exact GELU regardless of hidden_act (ElectraGeneratorPredictions).
    if "mlm" in names and values.get("hidden_act", "gelu") != "gelu":
        raise UserError(
            f"{file}: hidden_act is {values['hidden_act']!r}, but the head of masked tokens has gelu in transformers"
        )
    return {}


ELECTRA = Family(
    model_type="electra",
    title="ELECTRA",
    prefix="electra.",
    base=("embeddings.", "embeddings_project.", "encoder."),
    base_class="ElectraModel",
    encoder=(*bert.ENCODER, *family.dense("embeddings/projection", "embeddings_project")),
    classes={
        "ElectraModel": {},
        "ElectraForPreTraining": REPLACED_TOKENS,
        "ElectraForMaskedLM": MLM,
        "ElectraForSequenceClassification": roberta.CLASSES,
        "ElectraForTokenClassification": bert.TAGS,
        "ElectraForQuestionAnswering": bert.QUESTION,
        "ElectraForMultipleChoice": SUMMARY | bert.CHOICES,
    },
    copies={"generator_lm_head.weight": "embeddings.word_embeddings.weight"},
    buffers=bert.BUFFERS,
    fields=(*bert.FIELDS, Field("embedding_width", "embedding_size", 128)),
    # Multiple choice is supported only with a dense layer and GELU over the first token.
    fixed=(
        ("summary_type", ("first",)),
        ("summary_use_proj", (True,)),
        ("summary_activation", ("gelu",)),
        ("is_decoder", (False, None)),
        ("add_cross_attention", (False, None)),
    ),
    always=bert.ALWAYS | {"position_offset": 0, "shared_layers": "none", "pooler": "gelu"},
    # Embeddings as wide as the layers are not projected.
    read_further=lambda file, values, fields: (
        {"embedding_width": 0} if fields["embedding_width"] == fields["width"] else {}
    ),
    read_heads=_read_heads,
    write_further=lambda model, vocabulary: {
        "embedding_size": model.table_width,
        "type_vocab_size": max(1, model.segment_types),  # the format cannot omit token types
        "summary_type": "first",
        "summary_use_proj": True,
        "summary_activation": "gelu",
        "summary_last_dropout": model.dropout,
        "classifier_dropout": None,
    },
)
