"""Gives a model another vocabulary: the rows of its token tables and biases follow."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import paths
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads import Heads
from bert_jax.resizing.change import VocabularyChange
from bert_jax.tokenizer import Tokenizer


def with_vocabulary(loaded: LoadedModel, change: VocabularyChange) -> LoadedModel:
    """Returns the model with another vocabulary, whose rows are means of the old vocabulary's (VocabularyChange).

    It has as many rows as the vocabulary has tokens; rows of the old model that no token used are dropped. Rows with
    one source are copied exactly. The model's metrics, which were measured with the old vocabulary, are dropped.
    """
    model = dataclasses.replace(loaded.model, vocab_size=len(change.sources))
    wanted = paths.flatten(abstract_params(model, loaded.heads))
    params = dict(loaded.params)
    for path, axis in vocabulary_axes(loaded.model, loaded.heads).items():
        by_row = np.moveaxis(loaded.params[path], axis, 0)
        rows = _mean_rows(by_row, change.sources, loaded.dtype)
        padding = wanted[path].shape[axis] - len(rows)
        rows = np.pad(rows, [(0, padding)] + [(0, 0)] * (rows.ndim - 1))
        params[path] = np.ascontiguousarray(np.moveaxis(rows, 0, axis))
    return dataclasses.replace(loaded, model=model, params=params, vocabulary=Tokenizer(change.spec), metrics={})


def vocabulary_axes(model: ModelConfig, heads: Heads) -> dict[str, int]:
    """Returns the parameters that have a row for each token, by path, with the axis of these rows.

    They are those whose shape depends on the size of the vocabulary: token tables, and biases of outputs.
    """
    larger = dataclasses.replace(model, vocab_size=2 * model.vocab_size + 1_000)
    shapes, others = (
        {path: leaf.shape for path, leaf in paths.flatten(abstract_params(one, heads)).items()}
        for one in (model, larger)
    )
    differing = {path: np.flatnonzero(np.not_equal(shape, others[path])) for path, shape in shapes.items()}
    return {path: int(axes[0]) for path, axes in differing.items() if len(axes)}


def _mean_rows(table: np.ndarray, sources: Sequence[tuple[int, ...]], dtype: str) -> np.ndarray:
    """Returns a float32 table whose rows are means of rows of another; means are rounded to a dtype."""
    rows = table[[source[0] for source in sources]]
    for index, source in enumerate(sources):
        if len(source) > 1:
            rows[index] = table[list(source)].mean(0, dtype=np.float64).astype(jnp.dtype(dtype))
    return rows
