"""RoBERTa and XLM-R (modeling_roberta.py and modeling_xlm_roberta.py of transformers).

BERT's encoder under the same names. Positions begin behind the padding id, there are no segments, the MLM head has
names of its own, and the classifier of sequences is a pooler and a classifier: its `classifier.dense` is our pooler.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.interop.families import bert
from bert_jax.interop.family import (
    Architecture,
    Family,
    Field,
    Parts,
    check_fixed,
    model_config,
    read_fields,
)
from bert_jax.interop.names import dense, norm, output_entries
from bert_jax.tokenizer import Tokenizer

FIELDS = tuple(field for field in bert.FIELDS if field.ours != "max_positions")
POSITIONS = (Field("rows", "max_position_embeddings", 512), Field("padding", "pad_token_id", 1))
# The MLM head has the exact GELU whatever hidden_act says (RobertaLMHead).
FIXED = (("hidden_act", ("gelu",)), *bert.FIXED)

MLM: Parts = {
    "mlm": (
        *dense("mlm_head/transform", "lm_head.dense"),
        *norm("mlm_head/norm", "lm_head.layer_norm"),
        *output_entries("mlm_head", "lm_head.decoder", "lm_head.bias"),
    )
}
CLASSES: Parts = {
    "pooler": dense("pooler/dense", "classifier.dense"),
    "classes": dense("classifier/dense", "classifier.out_proj"),
}


def _architecture(*required: Parts) -> Architecture:
    """Any file may hold the pooler and the MLM head besides."""
    needed = {name: part for parts in required for name, part in parts.items()}
    return Architecture(needed, {name: part for name, part in (bert.POOLER | MLM).items() if name not in needed})


def _read_model(where: Path, values: Mapping[str, Any]) -> ModelConfig:
    check_fixed(where, values, FIXED)
    rows = read_fields(where, values, POSITIONS)
    offset = rows["padding"] + 1
    if rows["rows"] <= offset:
        raise UserError(
            f"{where}: max_position_embeddings is {rows['rows']}; wanted more than the {offset} rows up to pad_token_id"
        )
    fields = read_fields(where, values, FIELDS) | {
        "max_positions": rows["rows"] - offset,
        "position_offset": offset,
        "tied_output": values.get("tie_word_embeddings") is not False,
    }
    return model_config(where, FIELDS, **fields)


def _write_model(model: ModelConfig, words: Tokenizer) -> dict[str, Any]:
    return bert.write_model(model, words) | {
        "hidden_act": "gelu",
        "max_position_embeddings": model.max_positions + model.position_offset,
        "bos_token_id": words.cls_id,
        "eos_token_id": words.sep_id,
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
        # Published classifiers hold the pooler of the model that they began from.
        unread=("pooler.dense.weight", "pooler.dense.bias"),
        read_model=_read_model,
        write_model=_write_model,
        always=bert.ALWAYS,
        tokenizers=tokenizers,
    )


ROBERTA = _family("roberta", "RoBERTa", "Roberta", ("bpe", "wordpiece"))
XLM_ROBERTA = _family("xlm-roberta", "XLM-RoBERTa", "XLMRoberta", ("unigram", "sentencepiece_bpe"))
