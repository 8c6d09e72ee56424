"""LoadedModel, the form in which every checkpoint is opened, and two changes to it: a part, and a scale of targets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.model.heads.config import Heads
from bert_jax.model.heads.tokens import generator_config
from bert_jax.tokenization import vocabulary
from bert_jax.tokenization.vocabulary import Vocabulary

MOVING_AVERAGE = "ema"
PARTS = ("discriminator", "generator")
_EMBEDDINGS, _PROJECTION, _GENERATOR = "embeddings/", "embeddings/projection/", "generator/"
_REGRESSION_HEADS = {"regression": "classifier", "token_regression": "tagger"}  # by kind of task


# Without eq, since the comparison of arrays gives arrays.
@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in host memory: float32 parameters by path, as bert_jax.model.bert names them."""

    model: ModelConfig
    heads: Heads
    params: Mapping[str, np.ndarray]
    vocabulary: Vocabulary
    task: Mapping[str, Any] | None = None  # a fine-tuned model's name, kind, labels and options (bert_jax/tasks)
    step: int = 0
    dtype: str = "float32"  # in the file that was read; parameters are float32 here in any case

    # For messages and the model card; empty if unknown.
    origin: str = ""  # the path that was opened
    average: str = ""  # the average of a run's parameters that was read (open_checkpoint.read_params)
    training: Mapping[str, Any] = field(default_factory=dict)  # the run's configuration
    metrics: Mapping[str, Any] = field(default_factory=dict)  # the run's result.json
    starts: Sequence[Mapping[str, Any]] = ()  # the run's run.json (train/run_record.py)
    card: Mapping[str, Any] = field(default_factory=dict)  # metadata that its card keeps (card_metadata.KEPT)
    data: Sequence[Mapping[str, Any]] = ()  # the contents of a pretraining run's shards (bert_jax/data/phases.py)

    def rounded(self, dtype: str) -> "LoadedModel":
        """Rounds parameters to a dtype, in which the Hugging Face format then stores them."""
        params = {path: value.astype(jnp.dtype(dtype)).astype(np.float32) for path, value in self.params.items()}
        return replace(self, params=params, dtype=dtype)


def load_vocabulary(directory: Path, model: ModelConfig, config_file: str = "config.json") -> Vocabulary:
    """Reads a model's vocabulary.

    Raises:
        UserError: It has more tokens than the model.
    """
    words = vocabulary.load(directory)
    if words.vocab_size > model.vocab_size:
        raise UserError(
            f"{directory}: the tokenizer has {words.vocab_size} tokens, but {config_file} has vocab_size "
            f"{model.vocab_size}. Put the tokenizer files that belong to this model there"
        )
    return words


def select_part(loaded: LoadedModel, part: str) -> LoadedModel:
    """Selects the discriminator or the generator of a model trained with config.objective=replaced_tokens.

    Raises:
        UserError: The part is unknown, or the model has no generator.
    """
    if part not in PARTS or not loaded.heads.generator:
        raise UserError(
            f"unknown --part {part}; choose from {', '.join(PARTS)}"
            if loaded.heads.generator
            else f"{loaded.origin} has no generator; only models of config.objective=replaced_tokens have parts"
        )
    if part == "discriminator":
        params = {path: value for path, value in loaded.params.items() if not path.startswith(_GENERATOR)}
        return replace(loaded, heads=replace(loaded.heads, generator=0), params=params)
    # Both parts share the embeddings, but the generator reads them through its own projection, which in a model of its
    # own is in `embeddings`.
    params = {}
    for path, value in loaded.params.items():
        if path.startswith(_GENERATOR):
            own = path.removeprefix(_GENERATOR)
            params[_EMBEDDINGS + own if own.startswith("projection/") else own] = value
        elif path.startswith(_EMBEDDINGS) and not path.startswith(_PROJECTION):
            params[path] = value
    model = generator_config(loaded.model, loaded.heads.generator)
    return replace(loaded, model=model, heads=Heads(mlm=True), params=params, task=None)


def with_target_scale(loaded: LoadedModel, mean: float = 0.0, std: float = 1.0) -> LoadedModel:
    """Changes a regression to predict (target - mean) / std; returns other models unchanged.

    By default it predicts the target itself, for formats whose programs know no scale.
    """
    task = loaded.task or {}
    old_mean, old_std = task.get("target_mean", 0.0), task.get("target_std", 1.0)
    if task.get("kind") not in _REGRESSION_HEADS or (old_mean, old_std) == (mean, std):
        return loaded
    kernel, bias = (f"{_REGRESSION_HEADS[task['kind']]}/dense/{name}" for name in ("kernel", "bias"))
    params = dict(loaded.params)
    # The target is old_std * (x kernel + bias) + old_mean. In float64, so that a scale and its inverse lose nothing.
    params[kernel] = (params[kernel].astype("float64") * old_std / std).astype("float32")
    params[bias] = ((params[bias].astype("float64") * old_std + old_mean - mean) / std).astype("float32")
    return replace(loaded, params=params, task={**task, "target_mean": mean, "target_std": std})
