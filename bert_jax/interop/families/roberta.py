"""RoBERTa and XLM-R (modeling_roberta.py and modeling_xlm_roberta.py of transformers).

The encoder and its names are BERT's. Positions begin after the padding id, there are no segments, the
MLM head has its own names, and the sequence classifier holds a pooler: its `classifier.dense`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.interop.families import bert
from bert_jax.interop.family import Architecture, Family, Field, Parts, dense, make_architecture, mlm_head, read_fields
from bert_jax.tokenization.vocabulary import Vocabulary

FIELDS = tuple(field for field in bert.FIELDS if field.field != "max_positions")
POSITIONS = (Field("rows", "max_position_embeddings", 512), Field("padding", "pad_token_id", 1))
# The MLM head uses the exact GELU regardless of hidden_act (RobertaLMHead).
FIXED = (("hidden_act", ("gelu",)), *bert.FIXED)

MLM: Parts = mlm_head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
CLASSES: Parts = {
    "pooler": dense("pooler/dense", "classifier.dense"),
    "classes": dense("classifier/dense", "classifier.out_proj"),
}


def _architecture(*required: Parts) -> Architecture:
    """Returns an architecture that may also hold the pooler and the MLM head."""
    return make_architecture(*required, optional=bert.POOLER | MLM)


def _read_further(where: Path, values: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    rows = read_fields(where, values, POSITIONS)
    offset = rows["padding"] + 1
    if rows["rows"] <= offset:
        raise UserError(
            f"{where}: max_position_embeddings is {rows['rows']}; "
            f"expected more than {offset}, the rows up to pad_token_id"
        )
    return {"max_positions": rows["rows"] - offset, "position_offset": offset}


def _write_further(model: ModelConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    return bert.write_further(model, vocabulary) | {
        "hidden_act": "gelu",
        "max_position_embeddings": model.max_positions + model.position_offset,
        "bos_token_id": vocabulary.cls_id,
        "eos_token_id": vocabulary.sep_id,
    }


def _family(model_type: str, title: str, prefix: str, tokenizers: tuple[str, ...]) -> Family:
    return Family(
        model_type=model_type,
        title=title,
        prefix="roberta.",
        base=bert.BASE,
        base_class=f"{prefix}Model",
        encoder=bert.ENCODER,
        architectures={
            f"{prefix}Model": _architecture(),
            f"{prefix}ForMaskedLM": _architecture(MLM),
            f"{prefix}ForSequenceClassification": _architecture(CLASSES),
            f"{prefix}ForTokenClassification": _architecture(bert.TAGS),
            f"{prefix}ForQuestionAnswering": _architecture(bert.QUESTION),
            f"{prefix}ForMultipleChoice": _architecture(bert.POOLER, bert.CHOICES),
        },
        copies={
            "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        buffers=bert.BUFFERS,
        # Published classifiers contain the pooler of the model they were fine-tuned from.
        unread=("pooler.dense.weight", "pooler.dense.bias"),
        fields=FIELDS,
        fixed=FIXED,
        always=bert.ALWAYS,
        read_further=_read_further,
        write_further=_write_further,
        tokenizers=tokenizers,
    )


ROBERTA = _family("roberta", "RoBERTa", "Roberta", ("bpe", "wordpiece"))
XLM_ROBERTA = _family("xlm-roberta", "XLM-RoBERTa", "XLMRoberta", ("unigram", "sentencepiece_bpe"))
