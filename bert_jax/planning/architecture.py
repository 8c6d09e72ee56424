"""The architecture of a plan, where a checkpoint decides it."""

import dataclasses

from bert_jax.command import UserError
from bert_jax.config import ModelConfig, ModelOptions, PretrainConfig
from bert_jax.interop.initial_checkpoint import architecture, open_initial
from bert_jax.model import sizes


def with_architecture(config: PretrainConfig, vocab_size: int | None) -> tuple[PretrainConfig, int | None]:
    """Returns a recipe that names each part of its architecture, and its vocabulary, without the preset `checkpoint`.

    A recipe with another preset is returned as it is. The checkpoint of init_from or branch_from is read once.
    Raises UserError where there is none, and for a vocab_size that is not that of the checkpoint.
    """
    if config.model.preset != sizes.FROM_CHECKPOINT:
        return config, vocab_size
    model = architecture(config, 1, open_initial(config))
    if vocab_size not in (None, model.vocab_size):
        raise UserError(
            f"--vocab_size is {vocab_size}, but the model of {config.init_from or config.branch_from} has "
            f"{model.vocab_size} tokens; omit --vocab_size"
        )
    options = {item.name for item in dataclasses.fields(ModelOptions)}
    parts = {item.name: getattr(model, item.name) for item in dataclasses.fields(ModelConfig) if item.name in options}
    preset = ModelOptions().preset  # of which no part remains
    named = dataclasses.replace(config.model, preset=preset, **parts)
    return dataclasses.replace(config, model=named), model.vocab_size
