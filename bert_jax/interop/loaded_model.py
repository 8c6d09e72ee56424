"""The common form of a model that was read from any kind of checkpoint."""

import dataclasses
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

# The common form of a model that was read from any kind of checkpoint.


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in host memory: float32 parameters by path, as bert_jax.model.bert names them.

    task        of a fine-tuned model: name, kind, labels and options (bert_jax/tasks)
    dtype       of the file that the parameters come from; they are float32 here in any case

    The remaining fields are for messages and the model card, and empty if unknown:

    origin      the path that was opened
    average     which average of a run's parameters these are (checkpoint_average); empty for none
    training    the configuration of the run
    data        what the shards of a pretraining run held (bert_jax/data/phases.py)
    metrics     result.json of the run
    """

    model: ModelConfig
    heads: Heads
    params: Mapping[str, np.ndarray]
    vocabulary: Vocabulary
    task: Mapping[str, Any] | None = None
    step: int = 0
    dtype: str = "float32"
    origin: str = ""
    average: str = ""
    training: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    data: Sequence[Mapping[str, Any]] = ()

    def rounded(self, dtype: str) -> "LoadedModel":
        """Returns the model with parameters rounded to a dtype, in which the Hugging Face format then stores them."""
        narrow = jnp.dtype(dtype)
        params = {path: value.astype(narrow).astype(np.float32) for path, value in self.params.items()}
        return replace(self, params=params, dtype=dtype)


def load_vocabulary(directory: Path, model: ModelConfig, config_file: str = "config.json") -> Vocabulary:
    """Reads a model's vocabulary. Raises UserError if it has ids that the model's token table lacks."""
    words = vocabulary.load(directory)
    if words.vocab_size > model.vocab_size:
        raise UserError(
            f"{directory}: the tokenizer has {words.vocab_size} tokens, but {config_file} has vocab_size "
            f"{model.vocab_size}. Put the tokenizer files that belong to this model there"
        )
    return words


# The two models of replaced token detection (ELECTRA) as models of their own.


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


# The scale of the targets of a regression (bert_jax/tasks/task.py) in the parameters of its head.


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


MOVING_AVERAGE = "ema"
