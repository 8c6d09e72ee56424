"""The common form of a model that was read from any kind of checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from bert_jax import vocabulary
from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.model.heads import Heads
from bert_jax.vocabulary import Vocabulary


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in host memory: float32 parameters by path, as bert_jax.model.bert names them.

    task        of a fine-tuned model: name, kind, labels and options (bert_jax/tasks)
    dtype       of the file that the parameters come from; they are float32 here in any case

    The remaining fields are for messages and the model card, and empty if unknown:

    origin      the path that was opened
    average     which average of a run's parameters these are (checkpoint_average); empty for none
    training    the configuration of the run
    data        what the shards of a pretraining run held (bert_jax/data/summary.py)
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
