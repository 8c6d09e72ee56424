"""GPT-2 (modeling_gpt2.py of transformers; Radford et al. 2019).

Dense kernels are [in, out], as in bert_jax; query, key and value are one matrix.
"""

from bert_jax.interop import family
from bert_jax.interop.families import bert
from bert_jax.interop.family import SAME, Entry, Family, Field, Layout, Parts, head_shape

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
QKV_KERNEL = Layout(
    lambda tensors, c: tensors[0].reshape(c.width, 3, *head_shape(c)),
    lambda param, c: [param.reshape(c.width, 3 * c.width)],
)
ATTENTION_OUTPUT = Layout(
    lambda tensors, c: tensors[0].reshape(*head_shape(c), c.width), lambda param, c: [param.reshape(c.width, c.width)]
)

LM: Parts = {"lm": (Entry("lm_head/output/table", ("lm_head.weight",), family.VOCABULARY, tied=False),)}


GPT2 = Family(
    model_type="gpt2",
    title="GPT-2",
    prefix="transformer.",
    base=("wte.", "wpe.", "h.", "ln_f."),
    base_class="GPT2Model",
    encoder=(
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
    ),
    classes={
        "GPT2Model": {},
        "GPT2LMHeadModel": LM,
        "GPT2ForTokenClassification": bert.TAGS,
        "GPT2ForQuestionAnswering": bert.QUESTION,
    },
    copies={"lm_head.weight": "wte.weight"},
    # The causal mask, which older files contain.
    buffers=("h.{}.attn.bias", "h.{}.attn.masked_bias"),
    # Defaults of GPT2Config. embd_pdrop is written as resid_pdrop.
    fields=(
        Field("vocab_size", "vocab_size", None),
        Field("layers", "n_layer", None),
        Field("width", "n_embd", None),
        Field("heads", "n_head", None),
        Field("max_positions", "n_positions", 1024),
        Field("dropout", "resid_pdrop", 0.1),
        Field("attention_dropout", "attn_pdrop", 0.1),
        Field("layer_norm_epsilon", "layer_norm_epsilon", 1e-5),
        Field("initializer_range", "initializer_range", 0.02),
    ),
    activation=("activation_function", "gelu_new"),
    fixed=(
        ("scale_attn_weights", (True,)),
        ("scale_attn_by_inverse_layer_idx", (False,)),
        ("add_cross_attention", (False,)),
    ),
    always=ALWAYS,
    # Most files omit n_inner.
    read_further=lambda file, values, fields: family.read_fields(
        file,
        {"n_inner": 4 * fields["width"] if values.get("n_inner") is None else values["n_inner"]},
        (Field("feed_forward", "n_inner", None),),
    ),
    write_further=lambda model, vocabulary: {
        "n_inner": model.feed_forward,
        "embd_pdrop": model.dropout,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
        "classifier_dropout": model.dropout,
        "bos_token_id": vocabulary.cls_id,
        "eos_token_id": vocabulary.sep_id,
    },
)
