"""Opens the checkpoint from which a run starts: all of it, or some of its layers; and finds the run's architecture."""

import dataclasses
from collections.abc import Sequence

from bert_jax.command import UserError
from bert_jax.config import ModelConfig, PretrainConfig, TrainConfig
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import sizes
from bert_jax.train.branch import checkpoint_folder
from bert_jax.train.freezing import ENCODER_STACK
from bert_jax.train.workdir import read_config


def open_initial(config: TrainConfig) -> LoadedModel | None:
    """Opens init_from, as the model of its init_layers; returns None for a run from scratch.

    Raises UserError for init_layers without init_from, and whenever open_checkpoint and with_layers do.
    """
    if not config.init_from:
        if config.init_layers and not getattr(config, "branch_from", ""):  # a branch has the layers of its trunk
            raise UserError(
                f"init_layers is {config.init_layers}, but init_from is not set. Name the checkpoint that has the "
                "layers with --config.init_from=CHECKPOINT, or omit init_layers"
            )
        return None
    loaded = open_checkpoint(config.init_from, config.init_average, average_key="init_average")
    return with_layers(loaded, config.init_layers) if config.init_layers else loaded


def architecture(config: PretrainConfig, vocab_size: int, loaded: LoadedModel | None) -> ModelConfig:
    """Returns the architecture of a recipe for a tokenizer of vocab_size ids, or of its checkpoint with its changes.

    loaded   what open_initial returns
    Raises UserError for the preset `checkpoint` without one, and for options that ModelConfig refuses.
    """
    if config.model.preset != sizes.FROM_CHECKPOINT:
        return sizes.model_config(config.model, vocab_size)
    if config.branch_from:
        workdir = checkpoint_folder(config.branch_from).parent.parent
        return sizes.with_options(read_config(workdir).model, config.model)
    if loaded is None:
        raise UserError("model.preset is checkpoint, but init_from is not set; set --config.init_from=CHECKPOINT")
    return sizes.with_options(loaded.model, config.model)


def with_layers(loaded: LoadedModel, layers: Sequence[int]) -> LoadedModel:
    """The model of some layers of a checkpoint, numbered from 0, with everything else as it is.

    A student that starts from every second layer of its teacher learns faster than one with random layers (DistilBERT;
    Sanh et al. 2019, section 3). Raises UserError for layers that do not exist or are not in ascending order, and for
    those whose kind of attention depends on their place, where the places would change it.
    """
    model, origin = loaded.model, loaded.origin or "the checkpoint"
    if model.encoder != "transformer":
        raise UserError(f"init_layers selects Transformer layers, but {origin} has an encoder {model.encoder}. Omit it")
    if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < model.layers:
        raise UserError(
            f"init_layers is {tuple(layers)}; use ascending numbers from 0 to {model.layers - 1}, the last layer of "
            f"{origin}"
        )
    kinds = [(model.is_global(layer), layer == 0 and model.norm == "pre_but_first") for layer in layers]
    new_kinds = [(model.is_global(place), place == 0 and model.norm == "pre_but_first") for place in range(len(layers))]
    if kinds != new_kinds:
        raise UserError(
            f"init_layers is {tuple(layers)}, but other layers of {origin} would then have global attention or no "
            f"first norm. Take whole groups of {model.global_every} layers, with layer 0 first"
        )
    params = dict(loaded.params)
    for path, value in params.items():
        if path.startswith(ENCODER_STACK) and len(value) == model.layers and not _shared(loaded, path):
            params[path] = value[list(layers)]
    return dataclasses.replace(loaded, model=dataclasses.replace(model, layers=len(layers)), params=params)


def _shared(loaded: LoadedModel, path: str) -> bool:
    """Whether all layers share a parameter, which then is stored once."""
    return loaded.model.shared_layers != "none" and len(loaded.params[path]) == 1
