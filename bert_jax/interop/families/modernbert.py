"""ModernBERT (modular_modernbert.py of transformers; Warner et al. 2024).

Query, key and value are one matrix, and so are the two inputs of the gated feed-forward. Layer 0 has no norm before
its attention. Whichever head a model has stands on one more dense layer and norm, `head`: in a masked language model
our mlm_head/transform, else our pooler.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.interop.family import (
    WRITTEN_ACTIVATIONS,
    Architecture,
    Family,
    Field,
    Parts,
    check_fixed,
    model_config,
    read_activation,
    read_fields,
    write_fields,
)
from bert_jax.interop.names import (
    ATTENTION_OUTPUT,
    LAYERS,
    SAME,
    VOCABULARY,
    Entry,
    Layout,
    dense,
    head_shape,
    norm,
)
from bert_jax.model.heads import Heads
from bert_jax.tokenizer import Tokenizer

# Defaults of ModernBertConfig. Its other rates of dropout are written as mlp_dropout, and not read.
FIELDS = (
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
)
EVERY = Field("every", "global_attn_every_n_layers", 3)
LOCAL_SLOTS = Field("slots", "local_attention", 128)  # both sides of a slot together
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
FIXED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("decoder_bias", (True,)),
    ("tie_word_embeddings", (True, False, None)),
    ("classifier_pooling", POOLINGS),
)
BIASES = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")
GLOBAL, LOCAL = "full_attention", "sliding_attention"
# Where the rotary base of a kind of layer stood before rope_parameters, and its default.
OLD_BASES = {GLOBAL: ("global_rope_theta", 160_000.0), LOCAL: ("local_rope_theta", 10_000.0)}


def _join_kernel(tensors: Sequence[np.ndarray], config: ModelConfig) -> np.ndarray:
    return tensors[0].T.reshape(config.width, 3, *head_shape(config))


def _join_gated(tensors: Sequence[np.ndarray], config: ModelConfig) -> np.ndarray:
    return tensors[0].T.reshape(config.width, 2, config.feed_forward)


QKV_KERNEL = Layout(_join_kernel, lambda ours, c: [ours.reshape(c.width, 3 * c.width).T])
QKV_BIAS = Layout(lambda tensors, c: tensors[0].reshape(3, *head_shape(c)), lambda ours, _: [ours.reshape(-1)])
GATED_KERNEL = Layout(_join_gated, lambda ours, c: [ours.reshape(c.width, 2 * c.feed_forward).T])
GATED_BIAS = Layout(lambda tensors, c: tensors[0].reshape(2, c.feed_forward), lambda ours, _: [ours.reshape(-1)])

ENCODER: tuple[Entry, ...] = (
    Entry("embeddings/token/table", ("embeddings.tok_embeddings.weight",), VOCABULARY),
    *norm("embeddings/norm", "embeddings.norm"),
    Entry(f"{LAYERS}attention/qkv/kernel", ("layers.{}.attn.Wqkv.weight",), QKV_KERNEL),
    Entry(f"{LAYERS}attention/qkv/bias", ("layers.{}.attn.Wqkv.bias",), QKV_BIAS),
    *dense(f"{LAYERS}attention/output", "layers.{}.attn.Wo", ATTENTION_OUTPUT),
    Entry(f"{LAYERS}attention_norm/scale", ("layers.{}.attn_norm.weight",), SAME, first_layer=1, without=1.0),
    Entry(f"{LAYERS}attention_norm/bias", ("layers.{}.attn_norm.bias",), SAME, first_layer=1),
    Entry(f"{LAYERS}feed_forward/input/kernel", ("layers.{}.mlp.Wi.weight",), GATED_KERNEL),
    Entry(f"{LAYERS}feed_forward/input/bias", ("layers.{}.mlp.Wi.bias",), GATED_BIAS),
    *dense(f"{LAYERS}feed_forward/output", "layers.{}.mlp.Wo"),
    *norm(f"{LAYERS}feed_forward_norm", "layers.{}.mlp_norm"),
    *norm("encoder/final_norm", "final_norm"),
)
MLM: Parts = {
    "mlm": (
        *dense("mlm_head/transform", "head.dense"),
        *norm("mlm_head/norm", "head.norm"),
        Entry("mlm_head/bias", ("decoder.bias",), VOCABULARY),
        Entry("mlm_head/output/table", ("decoder.weight",), VOCABULARY, tied=False),
    )
}
POOLER: Parts = {"pooler": (*dense("pooler/dense", "head.dense"), *norm("pooler/norm", "head.norm"))}
CLASSES: Parts = POOLER | {"classes": dense("classifier/dense", "classifier")}
CHOICES: Parts = POOLER | {"choices": dense("classifier/dense", "classifier")}
# Heads over tokens have the pooler's layer of themselves (model/bert.py).
TAGS: Parts = {"tags": dense("tagger/dense", "classifier") + POOLER["pooler"]}
QUESTION: Parts = {"question": dense("question_head/dense", "classifier") + POOLER["pooler"]}


def _read_model(where: Path, values: Mapping[str, Any]) -> ModelConfig:
    check_fixed(where, values, FIXED)
    fields = read_fields(where, values, FIELDS)
    biases = {name: bool(values.get(name)) for name in BIASES}
    if len(set(biases.values())) > 1:
        name = next(name for name in BIASES if biases[name] != biases[BIASES[0]])
        raise UserError(f"{where}: {name} is {biases[name]}, {BIASES[0]} is not; only both alike can be read")
    activation = read_activation(where, values, "hidden_activation")
    if read_activation(where, values, "classifier_activation") != activation:
        raise UserError(f"{where}: classifier_activation is not hidden_activation; only both alike can be read")
    layers = fields["layers"]
    every = _global_every(where, values, layers)
    slots = read_fields(where, values, (LOCAL_SLOTS,))["slots"]
    if slots < 2 and every < layers:  # a window of 0 is none here
        raise UserError(f"{where}: {LOCAL_SLOTS.theirs} is {slots}; wanted 2 or more")
    bases = _rotary_bases(where, values)
    return model_config(
        where,
        FIELDS,
        **fields,
        **ALWAYS,
        bias=biases[BIASES[0]],
        activation=activation,
        rotary_base=bases[GLOBAL],
        rotary_base_local=bases[LOCAL],
        window=0 if every == 1 else slots // 2,
        global_every=every,
        tied_output=values.get("tie_word_embeddings") is not False,
    )


def _global_every(where: Path, values: Mapping[str, Any], layers: int) -> int:
    """n, if the layers 0, n, 2n and so on are those that see everything.

    transformers 5 writes every layer's kind, the versions before it wrote n; where there are both, the kinds hold.
    """
    every = read_fields(where, values, (EVERY,))["every"]
    kinds = values.get("layer_types")
    if every < 1:
        raise UserError(f"{where}: {EVERY.theirs} is {every}; wanted 1 or more")
    if kinds is None:
        return every
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise UserError(f"{where}: layer_types is {kinds!r}; wanted the kind of each of the {layers} layers")
    others = [layer for layer, kind in enumerate(kinds) if layer and kind == GLOBAL]
    for candidate in (every, *others[:1], layers):
        if kinds == _kinds(layers, candidate):
            return candidate
    raise UserError(
        f"{where}: layer_types is {kinds!r}; only {GLOBAL!r} in the layers 0, n, 2n ... and {LOCAL!r} in all others "
        "can be read"
    )


def _kinds(layers: int, every: int) -> list[str]:
    return [LOCAL if layer % every else GLOBAL for layer in range(layers)]


def _rotary_bases(where: Path, values: Mapping[str, Any]) -> dict[str, float]:
    """The rotary base of each kind of layer, of rope_parameters or of the fields before it."""
    parameters = values.get("rope_parameters") or {}
    if not isinstance(parameters, dict) or not all(
        kind in OLD_BASES and isinstance(of_kind or {}, dict) for kind, of_kind in parameters.items()
    ):
        raise UserError(f"{where}: rope_parameters is {parameters!r}; wanted those of {GLOBAL!r} and of {LOCAL!r}")
    if scaling := values.get("rope_scaling"):
        raise UserError(f"{where}: rope_scaling is {scaling!r}; only None can be read")
    bases: dict[str, float] = {}
    for kind, (old, default) in OLD_BASES.items():
        of_kind = parameters.get(kind) or {}
        if (rotation := of_kind.get("rope_type", "default")) != "default":
            raise UserError(f"{where}: rope_parameters has the rope_type {rotation!r}; only 'default' can be read")
        base = of_kind.get("rope_theta", values.get(old, default))
        if base is None and kind == LOCAL:  # as the versions before 5 took it
            base = bases[GLOBAL]
        if not isinstance(base, int | float) or isinstance(base, bool) or not base > 1:
            raise UserError(f"{where}: the rotary base ({old}, or rope_theta of {kind}) is {base!r}; wanted over 1")
        bases[kind] = float(base)
    return bases


def _write_model(model: ModelConfig, words: Tokenizer) -> dict[str, Any]:
    """Fields of transformers 5, and those of the versions before it."""
    activation = WRITTEN_ACTIVATIONS[model.activation]
    bases = {GLOBAL: model.rotary_base, LOCAL: model.rotary_base_local}
    return (
        write_fields(model, FIELDS)
        | dict.fromkeys(BIASES, model.bias)
        | {old: bases[kind] for kind, (old, _) in OLD_BASES.items()}
        | {
            "layer_types": _kinds(model.layers, model.global_every if model.window else 1),
            EVERY.theirs: model.global_every,
            LOCAL_SLOTS.theirs: 2 * model.window or LOCAL_SLOTS.default,
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
            "hidden_activation": activation,
            "classifier_activation": activation,
            "decoder_bias": True,
            "embedding_dropout": model.dropout,
            "classifier_dropout": model.dropout,
            "tie_word_embeddings": model.tied_output,
            "pad_token_id": words.pad_id,
            "cls_token_id": words.cls_id,
            "bos_token_id": words.cls_id,
            "sep_token_id": words.sep_id,
            "eos_token_id": words.sep_id,
        }
    )


def _read_heads(where: Path, values: Mapping[str, Any], parts: frozenset[str]) -> dict[str, Any]:
    pooled = parts & {"classes", "choices"}
    return {"pooling": values.get("classifier_pooling", "cls")} if pooled else {}


def _write_heads(heads: Heads) -> dict[str, Any]:
    return {"classifier_pooling": heads.pooling if heads.pooling in POOLINGS else POOLINGS[0]}


MODERNBERT = Family(
    model_type="modernbert",
    title="ModernBERT",
    prefix="model.",
    base=("embeddings.", "layers.", "final_norm."),
    base_class="ModernBertModel",
    encoder=ENCODER,
    architectures={
        "ModernBertModel": Architecture({}, {}),
        "ModernBertForMaskedLM": Architecture(MLM, {}),
        "ModernBertForSequenceClassification": Architecture(CLASSES, {}),
        "ModernBertForTokenClassification": Architecture(TAGS, {}),
        "ModernBertForQuestionAnswering": Architecture(QUESTION, {}),
        "ModernBertForMultipleChoice": Architecture(CHOICES, {}),
    },
    copies={"decoder.weight": "embeddings.tok_embeddings.weight"},
    read_model=_read_model,
    write_model=_write_model,
    read_heads=_read_heads,
    write_heads=_write_heads,
    always=ALWAYS,
)
