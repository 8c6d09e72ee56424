"""RoBERTa and XLM-R (modeling_roberta.py and modeling_xlm_roberta.py of transformers).

The encoder and its names are BERT's. Positions begin after the padding id, there are no segments, the MLM head has its
own names, and the sequence classifier has its own pooler, `classifier.dense`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.interop import family
from bert_jax.interop.families import bert
from bert_jax.interop.family import Family, Field, Parts
from bert_jax.tokenization.vocabulary import Vocabulary

FIELDS = tuple(field for field in bert.FIELDS if field.field != "max_positions")
# The MLM head uses the exact GELU regardless of hidden_act (RobertaLMHead).
FIXED: family.Fixed = (("hidden_act", ("gelu",)), *bert.FIXED)

MLM = family.mlm_head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
COPIES = {"lm_head.decoder.weight": "embeddings.word_embeddings.weight", "lm_head.decoder.bias": "lm_head.bias"}
CLASSES: Parts = {
    "pooler": family.dense("pooler/dense", "classifier.dense"),
    "classes": family.dense("classifier/dense", "classifier.out_proj"),
}
# Published classifiers contain the pooler of the model they were fine-tuned from.
UNREAD = ("pooler.dense.weight", "pooler.dense.bias")


def read_positions(file: Path, values: Mapping[str, Any], padding: int) -> dict[str, int]:
    """Reads the number of positions; the table's rows up to the padding id hold none."""
    rows = family.read_fields(file, values, (Field("rows", "max_position_embeddings", 512),))["rows"]
    if rows <= padding + 1:
        expected = f"expected more than {padding + 1}, the rows up to the padding id"
        raise UserError(f"{file}: max_position_embeddings is {rows}; {expected}")
    return {"max_positions": rows - padding - 1, "position_offset": padding + 1}


def write_positions(model: ModelConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the inverse of read_positions, and the ids that begin and end a text."""
    return {
        "max_position_embeddings": model.max_positions + model.position_offset,
        "bos_token_id": vocabulary.cls_id,
        "eos_token_id": vocabulary.sep_id,
    }


def _read_further(file: Path, values: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    padding = family.read_fields(file, values, (Field("padding", "pad_token_id", 1),))["padding"]
    return read_positions(file, values, padding)


def _write_further(model: ModelConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    return bert.write_further(model, vocabulary) | write_positions(model, vocabulary) | {"hidden_act": "gelu"}


def _family(model_type: str, title: str, prefix: str, tokenizers: tuple[str, ...]) -> Family:
    return Family(
        model_type=model_type,
        title=title,
        prefix="roberta.",
        base=bert.BASE,
        base_class=f"{prefix}Model",
        encoder=bert.ENCODER,
        classes={
            f"{prefix}Model": {},
            f"{prefix}ForMaskedLM": MLM,
            f"{prefix}ForSequenceClassification": CLASSES,
            f"{prefix}ForTokenClassification": bert.TAGS,
            f"{prefix}ForQuestionAnswering": bert.QUESTION,
            f"{prefix}ForMultipleChoice": bert.POOLER | bert.CHOICES,
        },
        optional=bert.POOLER | MLM,
        copies=COPIES,
        buffers=bert.BUFFERS,
        unread=UNREAD,
        fields=FIELDS,
        fixed=FIXED,
        always=bert.ALWAYS,
        positions_after_padding=True,
        read_further=_read_further,
        write_further=_write_further,
        tokenizers=tokenizers,
    )


ROBERTA = _family("roberta", "RoBERTa", "Roberta", ("bpe", "wordpiece"))
XLM_ROBERTA = _family("xlm-roberta", "XLM-RoBERTa", "XLMRoberta", ("unigram", "sentencepiece_bpe"))
