"""Writes models in bert_jax format, which is a workdir."""

from pathlib import Path

from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.tokenizer import Tokenizer
from bert_jax.train.workdir import WorkdirConfig, write_config, write_params
from bert_jax.vocabulary import TOKENIZER


def write(loaded: LoadedModel, directory: Path) -> None:
    """Writes a model as the workdir of a run at step 0, with parameters and no optimizer state."""
    directory.mkdir(parents=True, exist_ok=True)
    write_params(directory, 0, loaded.params)
    Tokenizer(loaded.vocabulary.spec).save(directory / TOKENIZER)
    kind = "pretraining" if loaded.task is None else "finetuning"
    write_config(
        directory,
        WorkdirConfig(
            loaded.model,
            loaded.heads,
            kind,
            training=loaded.training,
            task=loaded.task,
            dtype=loaded.dtype,
            data=loaded.data,
        ),
    )
