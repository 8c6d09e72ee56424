"""One vector a sequence, against loops over the sequences of packed rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from bert_jax.config import ModelConfig
from bert_jax.model import layers
from bert_jax.model.bert import Bert, abstract_params, bind
from bert_jax.model.heads.config import POOLINGS, Heads
from bert_jax.model.outputs import sequence_vectors
from bert_jax.model.runtime import Runtime

CONFIG = ModelConfig(vocab_size=20, layers=1, width=6, heads=2, feed_forward=4, max_positions=8)
SEQUENCES = np.array([[1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1]], np.int32)
FIRSTS = np.array([[0, 3], [0, 0]], np.int32)  # the second row has one sequence
HIDDEN = np.random.default_rng(0).normal(size=(2, 7, 6)).astype(np.float32)


def heads_of(pooling: str, pooler: bool) -> Heads:
    return Heads(pooling=pooling, pooler=pooler, classes=3)


@functools.cache
def params_of(pooling: str, pooler: bool) -> dict:
    draw = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: jnp.asarray(draw.normal(0, 0.5, leaf.shape), jnp.float32),
        abstract_params(CONFIG, heads_of(pooling, pooler)),
    )


def vectors(pooling: str, pooler: bool, hidden: np.ndarray) -> jax.Array:
    model: Bert = bind(CONFIG, heads_of(pooling, pooler), params_of(pooling, pooler), Runtime())
    return sequence_vectors(model, jnp.asarray(hidden), jnp.asarray(SEQUENCES), jnp.asarray(FIRSTS))


def by_hand(pooling: str, flat: dict, inside: np.ndarray) -> np.ndarray:
    if pooling == "cls":
        return inside[0]
    if pooling == "last":
        return inside[-1]
    if pooling == "max":
        return inside.max(axis=0)
    if pooling == "mean":
        return inside.mean(axis=0)
    keys = inside
    if pooling == "attention_additive":
        keys = np.tanh(inside @ flat["pooling/dense/kernel"] + flat["pooling/dense/bias"])
    return softmax(keys @ flat["pooling/query"]) @ inside


@pytest.mark.parametrize("pooling", POOLINGS)
def test_each_sequence_is_pooled_by_itself(pooling: str) -> None:
    flat = {path: np.asarray(leaf) for path, leaf in layers.flatten(params_of(pooling, True)).items()}
    found = vectors(pooling, True, HIDDEN)
    for row, number in ((0, 1), (0, 2), (1, 1)):
        vector = by_hand(pooling, flat, HIDDEN[row, SEQUENCES[row] == number].astype(np.float64))
        wanted = np.tanh(vector @ flat["pooler/dense/kernel"] + flat["pooler/dense/bias"])
        np.testing.assert_allclose(found[row, number - 1], wanted, atol=1e-5)


@pytest.mark.parametrize("pooling", ["max", "attention_additive"])
def test_a_sequence_that_is_not_there_gives_zeros_and_finite_gradients(pooling: str) -> None:
    def total(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = vectors(pooling, False, hidden)
        return jnp.square(found).sum(), found[1, 1]

    gradient, absent = jax.jit(jax.grad(total, has_aux=True))(jnp.asarray(HIDDEN))
    np.testing.assert_array_equal(absent, 0)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[0, 5:], 0)  # padding
