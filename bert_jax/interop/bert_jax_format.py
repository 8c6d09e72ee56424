"""Reads models in bert_jax format, which is a workdir."""

import dataclasses
import json
from collections.abc import Mapping

import numpy as np

from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.interop import checkpoint_average
from bert_jax.interop.loaded_model import LoadedModel, load_vocabulary
from bert_jax.model import lora, paths
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads import Heads
from bert_jax.model.heads.hidden_projection import NAME as HIDDEN_PROJECTION
from bert_jax.storage.location import Location, local_folder
from bert_jax.train.early_stop import selected_step
from bert_jax.train.run import RESULT_FILE
from bert_jax.train.workdir import read_config
from bert_jax.vocabulary import TOKENIZER


def read(
    workdir: Location,
    step: int | None = None,
    average: str = "",
    merged: bool = True,
    average_key: str = checkpoint_average.FLAG,
) -> LoadedModel:
    """Reads the model of a workdir at a step, or an average of its parameters (checkpoint_average.read_params).

    Without a step it reads the newest checkpoint, or the best one of a run that stopped early. LoRA's adapters are
    merged into the matrices that they adapt, unless `merged` is false; a projection to a teacher's width is left out.
    Raises UserError if there is no such checkpoint, and if parameters, config.json and tokenizer do not agree.
    """
    config = read_config(workdir)
    selected = selected_step(workdir)
    if step is None and (step := selected) is None:
        raise UserError(f"no checkpoint in {workdir}: none has been saved yet. Train first, or give another folder")
    params = checkpoint_average.read_params(workdir, step, average, average_key)
    _check_params(params, config.model, config.heads, workdir)
    words = load_vocabulary(local_folder(workdir / TOKENIZER), config.model)
    heads = dataclasses.replace(config.heads, hidden_projection=0)  # only training has a teacher
    params = {path: value for path, value in params.items() if path.split(paths.SEPARATOR)[0] != HIDDEN_PROJECTION}
    model = config.model
    if merged:
        model, params = lora.merge(model, params)
    return LoadedModel(
        model,
        heads,
        params,
        words,
        config.task,
        step,
        dtype=config.dtype,
        origin=str(workdir),
        training=config.training,
        data=config.data,
        # result.json reports the parameters of the selected step themselves, not an average of them.
        metrics=_result(workdir) if step == selected and not average else {},
        average=average,
    )


def _check_params(params: Mapping[str, np.ndarray], model: ModelConfig, heads: Heads, workdir: Location) -> None:
    expected = {path: leaf.shape for path, leaf in paths.flatten(abstract_params(model, heads)).items()}
    got = {path: value.shape for path, value in params.items()}
    for path in sorted(set(expected) | set(got)):
        if expected.get(path) != got.get(path):
            raise UserError(
                f"{workdir}: parameter {path} is {got.get(path, 'missing')}, but config.json expects "
                f"{expected.get(path, 'none')}. Was config.json changed or copied from another workdir?"
            )


def _result(workdir: Location) -> dict[str, object]:
    """Returns result.json, or nothing if the run has not finished or the file is damaged."""
    try:
        return dict(json.loads((workdir / RESULT_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}  # only the model card uses it
