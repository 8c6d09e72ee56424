"""Model sizes by name.

base and large: Devlin et al. 2019, section 3. tiny to medium: Turc et al. 2019, "Well-Read Students Learn
Better", table 1, and the google-research/bert README. Heads are 64 wide, the feed-forward 4 times the width.
"""

import dataclasses
from typing import Any, NamedTuple

from bert_jax.command import UserError
from bert_jax.config import ModelConfig, ModelOptions


class Size(NamedTuple):
    layers: int
    width: int


HEAD_WIDTH = 64
FEED_FORWARD_FACTOR = 4

FROM_CHECKPOINT = "checkpoint"  # the preset that means: as init_from has it

PRESETS = {
    "tiny": Size(layers=2, width=128),
    "mini": Size(layers=4, width=256),
    "small": Size(layers=4, width=512),
    "medium": Size(layers=8, width=512),
    "base": Size(layers=12, width=768),
    "large": Size(layers=24, width=1024),
}


def model_config(options: ModelOptions, vocab_size: int) -> ModelConfig:
    """The architecture that a recipe's options name, for a tokenizer of vocab_size ids.

    Raises UserError for an unknown preset.
    """
    if options.preset not in PRESETS:
        known = ", ".join(PRESETS)
        raise UserError(
            f"config.model.preset is {options.preset!r}; use one of: {known}, or {FROM_CHECKPOINT} with init_from"
        )
    size = PRESETS[options.preset]
    return with_options(
        ModelConfig(
            vocab_size=vocab_size,
            layers=size.layers,
            width=size.width,
            heads=size.width // HEAD_WIDTH,
            feed_forward=size.width * FEED_FORWARD_FACTOR,
        ),
        options,
    )


def with_options(model: ModelConfig, options: ModelOptions) -> ModelConfig:
    """An architecture with what a recipe sets beside the preset."""
    attention_dropout = options.dropout if options.attention_dropout is None else options.attention_dropout
    given: dict[str, Any] = {
        "max_positions": options.max_positions,
        "dropout": options.dropout,
        "attention_dropout": attention_dropout,
    }
    return dataclasses.replace(model, **{name: value for name, value in given.items() if value is not None})
