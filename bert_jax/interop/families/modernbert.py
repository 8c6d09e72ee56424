"""ModernBERT (modular_modernbert.py of transformers; Warner et al. 2024).

Query, key and value are one matrix, and so are the two inputs of the gated feed-forward layer. Layer 0 has no norm
before its attention. Every head follows one more dense layer and norm, `head`: mlm_head/transform in a masked language
model, the pooler otherwise.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.interop import family
from bert_jax.interop.families import bert
from bert_jax.interop.family import SAME, VOCABULARY, Entry, Family, Field, Layout, Parts, head_shape
from bert_jax.tokenization.vocabulary import Vocabulary

EVERY = Field("every", "global_attn_every_n_layers", 3)
LOCAL_ATTENTION = Field("window", "local_attention", 128)  # positions on both sides together
POOLINGS = ("cls", "mean")
ALWAYS = {
    "segment_types": 0,
    "norm": "pre_but_first",
    "embedding_norm": True,
    "gated": True,
    "positions": "rotary",
    "position_offset": 0,
    "relative": "none",
    "causal": False,
    "pooler": "transform",
}
BIASES = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")
GLOBAL, LOCAL = "full_attention", "sliding_attention"
# The field of each layer type's rotary base before rope_parameters existed, and its default.
OLD_BASES = {GLOBAL: ("global_rope_theta", 160_000.0), LOCAL: ("local_rope_theta", 10_000.0)}

QKV_KERNEL = Layout(
    lambda tensors, c: tensors[0].T.reshape(c.width, 3, *head_shape(c)),
    lambda param, c: [param.reshape(c.width, 3 * c.width).T],
)
GATED_KERNEL = Layout(
    lambda tensors, c: tensors[0].T.reshape(c.width, 2, c.feed_forward),
    lambda param, c: [param.reshape(c.width, 2 * c.feed_forward).T],
)
GATED_BIAS = Layout(lambda tensors, c: tensors[0].reshape(2, c.feed_forward), lambda param, _: [param.reshape(-1)])

MLM: Parts = {
    "mlm": (
        *family.dense("mlm_head/transform", "head.dense"),
        *family.norm("mlm_head/norm", "head.norm"),
        Entry("mlm_head/bias", ("decoder.bias",), VOCABULARY),
        Entry("mlm_head/output/table", ("decoder.weight",), VOCABULARY, tied=False),
    )
}
POOLER: Parts = {"pooler": (*family.dense("pooler/dense", "head.dense"), *family.norm("pooler/norm", "head.norm"))}
# Heads over tokens contain the pooler's layer (model/bert.py).
TAGS: Parts = {"tags": bert.TAGS["tags"] + POOLER["pooler"]}
QUESTION: Parts = {"question": family.dense("question_head/dense", "classifier") + POOLER["pooler"]}


def _read_further(file: Path, values: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    biases = {name: bool(values.get(name)) for name in BIASES}
    for name in BIASES:
        if biases[name] != biases[BIASES[0]]:
            raise UserError(f"{file}: {name} is {biases[name]}, but {BIASES[0]} is not; all biases must be equal")
    activation = values.get("classifier_activation", "gelu")
    if family.choose(file, "classifier_activation", activation, family.ACTIVATIONS) != fields["activation"]:
        raise UserError(f"{file}: classifier_activation differs from hidden_activation; they must be equal")
    every = _read_global_every(file, values, fields["layers"])
    window = family.read_fields(file, values, (LOCAL_ATTENTION,))["window"]
    if window < 2 and every < fields["layers"]:  # half of it would be 0, which means no window
        raise UserError(f"{file}: {LOCAL_ATTENTION.name} is {window}; expected 2 or more")
    bases = _read_rotary_bases(file, values)
    return {
        "bias": biases[BIASES[0]],
        "rotary_base": bases[GLOBAL],
        "rotary_base_local": bases[LOCAL],
        "window": 0 if every == 1 else window // 2,
        "global_every": every,
    }


def _read_global_every(file: Path, values: Mapping[str, Any], layers: int) -> int:
    """Returns n if exactly the layers 0, n, 2n, ... have global attention."""
    every = family.read_fields(file, values, (EVERY,))["every"]
    if every < 1:
        raise UserError(f"{file}: {EVERY.name} is {every}; expected 1 or more")
    # transformers 5 writes every layer's type; earlier versions wrote n. If a file has both, the types take precedence.
    types = values.get("layer_types")
    if types is None:
        return every
    if isinstance(types, list):
        others = [layer for layer, kind in enumerate(types) if layer and kind == GLOBAL]
        for candidate in (every, *others[:1], layers):
            if types == _layer_types(layers, candidate):
                return candidate
    raise UserError(
        f"{file}: layer_types is {types!r}; expected the type of each of the {layers} layers, with only {GLOBAL!r} in "
        f"the layers 0, n, 2n ... and {LOCAL!r} in all others"
    )


def _layer_types(layers: int, every: int) -> list[str]:
    return [LOCAL if layer % every else GLOBAL for layer in range(layers)]


def _read_rotary_bases(file: Path, values: Mapping[str, Any]) -> dict[str, float]:
    """Reads each layer type's rotary base from rope_parameters or the fields that preceded it."""
    parameters = values.get("rope_parameters") or {}
    if not isinstance(parameters, dict) or not all(
        kind in OLD_BASES and isinstance(parameters[kind] or {}, dict) for kind in parameters
    ):
        raise UserError(f"{file}: rope_parameters is {parameters!r}; expected those of {GLOBAL!r} and of {LOCAL!r}")
    bases: dict[str, float] = {}
    for kind, (old, default) in OLD_BASES.items():
        rope = parameters.get(kind) or {}
        if (rotation := rope.get("rope_type", "default")) != "default":
            raise UserError(f"{file}: rope_parameters has the rope_type {rotation!r}; only 'default' is supported")
        base = rope.get("rope_theta", values.get(old, default))
        if base is None and kind == LOCAL:  # as versions before 5 read it
            base = bases[GLOBAL]
        if not isinstance(base, int | float) or isinstance(base, bool) or not base > 1:
            raise UserError(
                f"{file}: the rotary base ({old}, or rope_theta of {kind}) is {base!r}; expected more than 1"
            )
        bases[kind] = float(base)
    return bases


def _write_further(model: ModelConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the fields for transformers 5 and for earlier versions."""
    bases = {GLOBAL: model.rotary_base, LOCAL: model.rotary_base_local}
    return {
        **dict.fromkeys(BIASES, model.bias),
        **{old: bases[kind] for kind, (old, _) in OLD_BASES.items()},
        "layer_types": _layer_types(model.layers, model.global_every if model.window else 1),
        EVERY.name: model.global_every,
        # Without a window all layers are global, and the field has no effect.
        LOCAL_ATTENTION.name: 2 * model.window or LOCAL_ATTENTION.default,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        "classifier_activation": family.WRITTEN_ACTIVATIONS[model.activation],
        "decoder_bias": True,
        "embedding_dropout": model.dropout,
        "classifier_dropout": model.dropout,
        "cls_token_id": vocabulary.cls_id,
        "bos_token_id": vocabulary.cls_id,
        "sep_token_id": vocabulary.sep_id,
        "eos_token_id": vocabulary.sep_id,
    }


MODERNBERT = Family(
    model_type="modernbert",
    title="ModernBERT",
    prefix="model.",
    base=("embeddings.", "layers.", "final_norm."),
    base_class="ModernBertModel",
    encoder=(
        Entry("embeddings/token/table", ("embeddings.tok_embeddings.weight",), VOCABULARY),
        *family.norm("embeddings/norm", "embeddings.norm"),
        Entry("encoder/layers/attention/qkv/kernel", ("layers.{}.attn.Wqkv.weight",), QKV_KERNEL),
        Entry("encoder/layers/attention/qkv/bias", ("layers.{}.attn.Wqkv.bias",), family.JOINED_QKV_BIAS),
        *family.attention_output("layers.{}.attn.Wo"),
        Entry("encoder/layers/attention_norm/scale", ("layers.{}.attn_norm.weight",), SAME, 1, absent_value=1.0),
        Entry("encoder/layers/attention_norm/bias", ("layers.{}.attn_norm.bias",), SAME, first_layer=1),
        Entry("encoder/layers/feed_forward/input/kernel", ("layers.{}.mlp.Wi.weight",), GATED_KERNEL),
        Entry("encoder/layers/feed_forward/input/bias", ("layers.{}.mlp.Wi.bias",), GATED_BIAS),
        *family.dense("encoder/layers/feed_forward/output", "layers.{}.mlp.Wo"),
        *family.norm("encoder/layers/feed_forward_norm", "layers.{}.mlp_norm"),
        *family.norm("encoder/final_norm", "final_norm"),
    ),
    classes={
        "ModernBertModel": {},
        "ModernBertForMaskedLM": MLM,
        "ModernBertForSequenceClassification": POOLER | bert.CLASSES,
        "ModernBertForTokenClassification": TAGS,
        "ModernBertForQuestionAnswering": QUESTION,
        "ModernBertForMultipleChoice": POOLER | bert.CHOICES,
    },
    # No head is optional: the MLM head and the pooler share the names `head.*`, so the class alone tells which of them
    # a file holds.
    copies={"decoder.weight": "embeddings.tok_embeddings.weight"},
    # Defaults of ModernBertConfig. The other dropout rates are written as mlp_dropout and not read.
    fields=(
        Field("vocab_size", "vocab_size", None),
        Field("layers", "num_hidden_layers", None),
        Field("width", "hidden_size", None),
        Field("heads", "num_attention_heads", None),
        Field("feed_forward", "intermediate_size", None),
        Field("max_positions", "max_position_embeddings", 8192),
        Field("dropout", "mlp_dropout", 0.0),
        Field("attention_dropout", "attention_dropout", 0.0),
        Field("layer_norm_epsilon", "norm_eps", 1e-5),
        Field("initializer_range", "initializer_range", 0.02),
    ),
    activation=("hidden_activation", "gelu"),
    fixed=(("decoder_bias", (True,)), ("classifier_pooling", POOLINGS), ("rope_scaling", (None, {}))),
    read_further=_read_further,
    write_further=_write_further,
    read_heads=lambda file, values, names: (
        {"pooling": values.get("classifier_pooling", "cls")} if names & {"classes", "choices"} else {}
    ),
    write_heads=lambda heads: {"classifier_pooling": heads.pooling if heads.pooling in POOLINGS else POOLINGS[0]},
    always=ALWAYS,
)
