"""What any kind of checkpoint is once it is open."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.model.heads import Heads
from bert_jax.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model in host memory: float32 parameters by path, as bert_jax.model.bert names them."""

    model: ModelConfig
    heads: Heads
    params: Mapping[str, np.ndarray]
    tokenizer: Tokenizer
    task: Mapping[str, Any] | None = None  # of a fine-tuned model: name, kind, labels ... (bert_jax/tasks/registry.py)
    step: int = 0
    dtype: str = "float32"  # of the file that the parameters come from; they are float32 here in any case
    # For messages and the model card; empty where unknown:
    origin: str = ""
    average: str = ""  # which average of a run's parameters these are (averaged.py); empty: none
    training: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)


def check_vocabulary(directory: Path, words: Tokenizer, model: ModelConfig, said_by: str = "config.json") -> None:
    """Raises UserError for a tokenizer whose ids the model's token table does not have."""
    if words.vocab_size > model.vocab_size:
        raise UserError(
            f"{directory}: the tokenizer has {words.vocab_size} tokens, {said_by} says vocab_size "
            f"{model.vocab_size}. Put the tokenizer files that belong to this model there"
        )
