"""GPT-2 (modeling_gpt2.py of transformers; Radford et al. 2019).

Dense kernels are [in, out], as in bert_jax; query, key and value are one matrix.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.interop import family
from bert_jax.interop.families import bert
from bert_jax.interop.family import SAME, Entry, Family, Field, Layout, Parts, head_shape
from bert_jax.tokenization.vocabulary import Vocabulary

# Defaults of GPT2Config. embd_pdrop is written as resid_pdrop.
FIELDS = (
    Field("vocab_size", "vocab_size", None),
    Field("layers", "n_layer", None),
    Field("width", "n_embd", None),
    Field("heads", "n_head", None),
    Field("max_positions", "n_positions", 1024),
    Field("dropout", "resid_pdrop", 0.1),
    Field("attention_dropout", "attn_pdrop", 0.1),
    Field("layer_norm_epsilon", "layer_norm_epsilon", 1e-5),
    Field("initializer_range", "initializer_range", 0.02),
)
FEED_FORWARD = Field("feed_forward", "n_inner", None)
ALWAYS = {
    "segment_types": 0,
    "norm": "pre",
    "embedding_norm": False,
    "bias": True,
    "gated": False,
    "positions": "learned",
    "position_offset": 0,
    "relative": "none",
    "window": 0,
    "causal": True,
}
FIXED: family.Fixed = (
    ("scale_attn_weights", (True,)),
    ("scale_attn_by_inverse_layer_idx", (False,)),
    ("add_cross_attention", (False,)),
)

QKV_KERNEL = Layout(
    lambda tensors, c: tensors[0].reshape(c.width, 3, *head_shape(c)),
    lambda param, c: [param.reshape(c.width, 3 * c.width)],
)
ATTENTION_OUTPUT = Layout(
    lambda tensors, c: tensors[0].reshape(*head_shape(c), c.width), lambda param, c: [param.reshape(c.width, c.width)]
)

ENCODER = (
    Entry("embeddings/token/table", ("wte.weight",), family.VOCABULARY),
    Entry("embeddings/position/table", ("wpe.weight",), SAME),
    Entry("encoder/layers/attention/qkv/kernel", ("h.{}.attn.c_attn.weight",), QKV_KERNEL),
    Entry("encoder/layers/attention/qkv/bias", ("h.{}.attn.c_attn.bias",), family.JOINED_QKV_BIAS),
    *family.attention_output("h.{}.attn.c_proj", ATTENTION_OUTPUT),
    *family.norm("encoder/layers/attention_norm", "h.{}.ln_1"),
    *family.dense("encoder/layers/feed_forward/input", "h.{}.mlp.c_fc", SAME),
    *family.dense("encoder/layers/feed_forward/output", "h.{}.mlp.c_proj", SAME),
    *family.norm("encoder/layers/feed_forward_norm", "h.{}.ln_2"),
    *family.norm("encoder/final_norm", "ln_f"),
)
LM: Parts = {"lm": (Entry("lm_head/output/table", ("lm_head.weight",), family.VOCABULARY, tied=False),)}


def _read_further(file: Path, values: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    # Most files omit n_inner.
    inner = values if values.get("n_inner") is not None else {"n_inner": 4 * fields["width"]}
    return family.read_fields(file, inner, (FEED_FORWARD,))


def _write_further(model: ModelConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        FEED_FORWARD.name: model.feed_forward,
        "embd_pdrop": model.dropout,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
        "classifier_dropout": model.dropout,
        "bos_token_id": vocabulary.cls_id,
        "eos_token_id": vocabulary.sep_id,
    }


GPT2 = Family(
    model_type="gpt2",
    title="GPT-2",
    prefix="transformer.",
    base=("wte.", "wpe.", "h.", "ln_f."),
    base_class="GPT2Model",
    encoder=ENCODER,
    classes={
        "GPT2Model": {},
        "GPT2LMHeadModel": LM,
        "GPT2ForTokenClassification": bert.TAGS,
        "GPT2ForQuestionAnswering": bert.QUESTION,
    },
    copies={"lm_head.weight": "wte.weight"},
    # The causal mask, which older files contain.
    buffers=("h.{}.attn.bias", "h.{}.attn.masked_bias"),
    fields=FIELDS,
    activation=("activation_function", "gelu_new"),
    fixed=FIXED,
    always=ALWAYS,
    read_further=_read_further,
    write_further=_write_further,
)
