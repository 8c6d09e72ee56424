"""Random parameters in the top layers of a pretrained encoder (Zhang et al. 2021, section 4: re-initialization)."""

from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Array, Key

from bert_jax.command import UserError
from bert_jax.config import FinetuneConfig, ModelConfig
from bert_jax.model import paths
from bert_jax.train import rules
from bert_jax.train.objectives import Objective
from bert_jax.train.run import root_key

STACK = "encoder/layers/"
POOLER = "pooler/"


def check(config: FinetuneConfig, model: ModelConfig) -> None:
    """Raises UserError where config.reinit_layers does not fit the model or the other keys."""
    layers = config.reinit_layers
    if not layers:
        return
    if not config.init_from:
        raise UserError(f"reinit_layers is {layers}, but init_from is not set, so all layers are random. Omit it")
    if model.encoder != "transformer" or model.shared_layers != "none":
        what = "whose layers share parameters" if model.encoder == "transformer" else f"of kind {model.encoder}"
        raise UserError(f"reinit_layers is {layers}, but init_from is a model {what}. Omit it")
    if not 0 < layers < model.layers:
        raise UserError(f"reinit_layers is {layers}; use 1 to {model.layers - 1} of the model's {model.layers} layers")
    if config.lora.rank:
        raise UserError(
            f"reinit_layers is {layers}, but lora.rank={config.lora.rank} trains adapters and no layers. "
            "Omit one of the two"
        )
    kind, _, last = config.train_layers.partition(":")
    if kind in ("head", "gradual") or (kind == "last" and last.isdecimal() and int(last) < layers):
        raise UserError(
            f"reinit_layers is {layers}, but train_layers={config.train_layers} does not train all of these layers "
            "from the beginning. Use train_layers=all, no_embeddings, or last:K with a larger K"
        )


def with_random_top(
    params: Mapping[str, np.ndarray], config: FinetuneConfig, model: ModelConfig, objective: Objective, seed: int
) -> dict[str, np.ndarray]:
    """The parameters of a checkpoint, with those of the last config.reinit_layers layers as in a run from scratch with
    this seed, and without the pooler, which is then initialized like any parameter that a checkpoint lacks."""
    found = dict(params)
    if not config.reinit_layers:
        return found

    def top_layers(key: Key[Array, ""]) -> dict[str, Array]:
        every = paths.flatten(objective.init(model, key))
        return {path: every[path][-config.reinit_layers :] for path in params if rules.stack_of(path) == STACK}

    random = jax.device_get(jax.jit(top_layers)(root_key(seed)))
    for path, top in random.items():
        found[path] = np.concatenate([params[path][: -config.reinit_layers], np.asarray(top, params[path].dtype)])
    return {path: value for path, value in found.items() if not path.startswith(POOLER)}
