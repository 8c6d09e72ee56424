"""The two models of replaced token detection (ELECTRA) as models of their own."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from bert_jax.command import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model.heads import Heads
from bert_jax.model.heads.replaced_tokens import generator_config

PARTS = ("discriminator", "generator")
_EMBEDDINGS, _PROJECTION, _GENERATOR = "embeddings/", "embeddings/projection/", "generator/"


def part_of(loaded: LoadedModel, part: str) -> LoadedModel:
    """Returns the discriminator or the generator of a model that was trained with config.objective=replaced_tokens.

    The generator has the embeddings that both share. Raises UserError for an unknown part, and for a model without a
    generator.
    """
    if part not in PARTS:
        raise UserError(f"unknown --part {part}; choose from {', '.join(PARTS)}")
    if not loaded.heads.generator:
        raise UserError(
            f"{loaded.origin} has no generator; only models trained with config.objective=replaced_tokens have parts"
        )
    if part == "discriminator":
        params = {path: value for path, value in loaded.params.items() if not path.startswith(_GENERATOR)}
        return dataclasses.replace(loaded, heads=dataclasses.replace(loaded.heads, generator=0), params=params)
    model = generator_config(loaded.model, loaded.heads.generator)
    params = _generator_params(loaded.params)
    return dataclasses.replace(loaded, model=model, heads=Heads(mlm=True), params=params, task=None)


def _generator_params(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = {
        path: value
        for path, value in params.items()
        if path.startswith(_EMBEDDINGS) and not path.startswith(_PROJECTION)
    }
    for path, value in params.items():
        if path.startswith(_GENERATOR):
            own = path.removeprefix(_GENERATOR)
            found[_EMBEDDINGS + own if own.startswith("projection/") else own] = value
    return found
