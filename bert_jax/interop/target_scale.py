"""The scale of the targets of a regression (bert_jax/tasks/kinds/target_scale.py) in the parameters of its head."""

import dataclasses

from bert_jax.interop.loaded_model import LoadedModel

HEADS = {"regression": "classifier", "token_regression": "tagger"}


def with_target_scale(loaded: LoadedModel, mean: float = 0.0, std: float = 1.0) -> LoadedModel:
    """A regression whose head predicts (target - mean) / std instead; other models are returned as they are.

    The default is the target itself, for formats whose programs know no scale.
    """
    task = loaded.task or {}
    old_mean, old_std = task.get("target_mean", 0.0), task.get("target_std", 1.0)
    if task.get("kind") not in HEADS or (old_mean, old_std) == (mean, std):
        return loaded
    kernel, bias = (f"{HEADS[task['kind']]}/dense/{name}" for name in ("kernel", "bias"))
    params = dict(loaded.params)
    params[kernel] = (params[kernel].astype("float64") * old_std / std).astype("float32")
    params[bias] = ((params[bias].astype("float64") * old_std + old_mean - mean) / std).astype("float32")
    return dataclasses.replace(loaded, params=params, task={**task, "target_mean": mean, "target_std": std})
