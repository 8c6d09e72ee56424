"""Architectures by name, each as published except for the vocabulary, which is the tokenizer's.

tiny to large   BERT: base and large, Devlin et al. 2019, section 3; the smaller ones Turc et al. 2019, "Well-Read
                Students Learn Better", table 1, and the README of google-research/bert
roberta, xlmr   Liu et al. 2019, section 3; Conneau et al. 2020, section 3. Positions begin at row 2, one token type
spanbert        BERT's architecture (Joshi et al. 2020, section 4.2)
academic_large  the "24hBERT" of Izsak et al. 2021: BERT-Large with the norm before each sublayer
mosaicbert      like Portes et al. 2023: gated feed-forward, no learned positions. It has rotations where they bias
                attention by distance (ALiBi), and biases in the gated matmul where they have none
modernbert      Warner et al. 2024, section 2 and table 4
transformer     the base encoder of Vaswani et al. 2017, table 3; epsilon and attention dropout of tensor2tensor's
                transformer_base_v1, initial deviation 1/sqrt(D) as its embeddings have
shaw            BERT-Base with relative positions only (Shaw et al. 2018, clipped at 16 as in section 4.1, one
                table for all heads of a layer as in 3.3)
buckets         MPNet's architecture (Song et al. 2020): learned positions and T5's buckets of distances
albert          Lan et al. 2020, table 1 and section 4.1: embeddings of width 128, one set of parameters for all
                layers. The releases of version 2, and of xxlarge, have no dropout
electra         Clark et al. 2020, table 6: small has embeddings of width 128; a classifier begins with GELU. The
                generator is not part of a preset (config.objective.generator_size)
gpt, gpt2       Radford et al. 2018, section 4.1; Radford et al. 2019, table 2, the smallest
"""

import dataclasses
from typing import Any, TypeAlias

from bert_jax.config import ModelConfig, ModelOptions
from bert_jax.errors import UserError

Fields: TypeAlias = dict[str, Any]  # of ModelConfig without vocab_size; omitted fields are BERT's

HEAD_WIDTH = 64
FEED_FORWARD_FACTOR = 4

FROM_CHECKPOINT = "checkpoint"  # this preset takes the architecture of init_from


def _size(layers: int, width: int) -> Fields:
    """BERT's proportions: heads are 64 wide, and feed-forward layers four times as wide as the model."""
    return {"layers": layers, "width": width, "heads": width // HEAD_WIDTH, "feed_forward": width * FEED_FORWARD_FACTOR}


_BASE, _LARGE = _size(12, 768), _size(24, 1024)
# fairseq counts positions from the padding id, 1, which itself has none: the first position is 2.
_ROBERTA = {"segment_types": 1, "position_offset": 2, "layer_norm_epsilon": 1e-5}
_MOSAICBERT = {"positions": "rotary", "gated": True, "attention_dropout": 0.0}
# Its local attention spans 128 positions, 64 on either side, in two layers of three.
_MODERNBERT = {
    "max_positions": 8192,
    "segment_types": 0,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "layer_norm_epsilon": 1e-5,
    "norm": "pre_but_first",
    "bias": False,
    "gated": True,
    "positions": "rotary",
    "rotary_base": 160_000.0,
    "window": 64,
    "global_every": 3,
    "pooler": "transform",
}
_ALBERT = {"embedding_width": 128, "shared_layers": "all", "activation": "gelu_tanh"}
_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
_GPT = {
    "segment_types": 0,
    "layer_norm_epsilon": 1e-5,
    "embedding_norm": False,
    "activation": "gelu_tanh",
    "causal": True,
}

# Later operands of | override earlier ones: a size, then the family, then what differs in this model.
PRESETS: dict[str, Fields] = {  # an extension adds its own
    "tiny": _size(2, 128),
    "mini": _size(4, 256),
    "small": _size(4, 512),
    "medium": _size(8, 512),
    "base": _BASE,
    "large": _LARGE,
    "roberta_base": _BASE | _ROBERTA,
    "roberta_large": _LARGE | _ROBERTA,
    "xlmr_base": _BASE | _ROBERTA,
    "xlmr_large": _LARGE | _ROBERTA,
    "spanbert_base": _BASE,
    "spanbert_large": _LARGE,
    "academic_large": _LARGE | {"norm": "pre"},
    "mosaicbert_base": _BASE | _MOSAICBERT,
    "mosaicbert_large": _LARGE | _MOSAICBERT,
    "modernbert_base": _MODERNBERT | {"layers": 22, "width": 768, "heads": 12, "feed_forward": 1152},
    "modernbert_large": _MODERNBERT | {"layers": 28, "width": 1024, "heads": 16, "feed_forward": 2624},
    "transformer_base": _size(6, 512)
    | {
        "segment_types": 0,
        "attention_dropout": 0.0,
        "layer_norm_epsilon": 1e-6,
        "initializer_range": 512**-0.5,
        "embedding_norm": False,
        "activation": "relu",
        "positions": "sinusoidal",
    },
    "shaw_base": _BASE | {"positions": "none", "relative": "shaw", "relative_distance": 16},
    "buckets_base": _BASE
    | {"segment_types": 0, "position_offset": 2, "relative": "buckets", "layer_norm_epsilon": 1e-5},
    "albert_base": _BASE | _ALBERT,
    "albert_large": _LARGE | _ALBERT,
    "albert_xlarge": _size(24, 2048) | _ALBERT | {"heads": 16},
    "albert_xxlarge": _size(12, 4096) | _ALBERT | _NO_DROPOUT,
    "albert_base_v2": _BASE | _ALBERT | _NO_DROPOUT,
    "albert_large_v2": _LARGE | _ALBERT | _NO_DROPOUT,
    "albert_xlarge_v2": _size(24, 2048) | _ALBERT | {"heads": 16} | _NO_DROPOUT,
    "electra_small": _size(12, 256) | {"embedding_width": 128, "pooler": "gelu"},
    "electra_base": _BASE | {"pooler": "gelu"},
    "electra_large": _LARGE | {"pooler": "gelu"},
    "gpt": _BASE | _GPT,
    "gpt2": _BASE | _GPT | {"max_positions": 1024, "norm": "pre"},
}


def model_config(options: ModelOptions, vocab_size: int) -> ModelConfig:
    """Builds the architecture that a recipe's options name, for a tokenizer of vocab_size ids.

    Raises:
        UserError: the preset is unknown, or ModelConfig refuses the options.
    """
    if options.preset not in PRESETS:
        raise UserError(
            f"unknown config.model.preset {options.preset!r}; choose from {', '.join(PRESETS)}, or {FROM_CHECKPOINT} "
            "with init_from"
        )
    return with_options(ModelConfig(vocab_size=vocab_size, **PRESETS[options.preset]), options)


def with_options(model: ModelConfig, options: ModelOptions) -> ModelConfig:
    """Changes the fields of an architecture that a recipe sets in addition to the preset.

    Raises:
        UserError: ModelConfig refuses a field, or a field has no effect in the result.
    """
    # Fields that a recipe leaves unset keep the preset's values.
    given = given_fields(options)
    changed = dataclasses.replace(model, **given)
    # A preset may have fields without effect in the changed model; a recipe may only set them to their defaults.
    for name, needed in without_effect(vars(changed)).items():
        if name in given and given[name] != getattr(ModelConfig, name):
            raise UserError(
                f"model.{name} is {given[name]}, which has no effect without {needed}. Set that as well, or omit "
                f"model.{name}"
            )
    return changed


def without_effect(fields: Fields) -> dict[str, str]:
    """Maps the fields that change nothing in an architecture to the setting that they need."""
    # global_every=1 makes all layers global: then nothing is local, and a window has no effect.
    rotary, windowed, some_global = fields["positions"] == "rotary", fields["window"] > 0, fields["global_every"] > 1
    period = "model.global_every of 2 or more"
    needs = {
        "window": (some_global, period),
        "global_every": (windowed, "model.window"),
        "rotary_base": (rotary, "model.positions=rotary"),
        "rotary_base_local": (rotary and windowed and some_global, f"rotary positions, model.window and {period}"),
        "relative_distance": (fields["relative"] != "none", "model.relative"),
        "position_offset": (fields["positions"] == "learned", "model.positions=learned"),
    }
    return {name: needed for name, (effective, needed) in needs.items() if not effective}


def given_fields(options: ModelOptions) -> Fields:
    """Returns the fields of ModelConfig that a recipe sets; attention_dropout follows dropout unless it is set."""
    architecture = {item.name for item in dataclasses.fields(ModelConfig)}
    given = {name: value for name, value in vars(options).items() if name in architecture and value is not None}
    # A recipe that changes dropout means both, as the papers' single figure does.
    if "dropout" in given:
        given.setdefault("attention_dropout", given["dropout"])
    return given


def check_positions(model: ModelConfig, length: int, name: str) -> None:
    """Checks that rows of `length` positions, from the shards `name`, fit the model.

    Raises:
        UserError: they are longer than model.max_positions.
    """
    if length > model.max_positions:
        raise UserError(
            f"the rows of {name} have {length} positions, but the model supports only {model.max_positions}; use "
            f"--config.model.max_positions={length}"
        )
