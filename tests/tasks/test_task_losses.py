"""The sums of the losses of tasks, against computations by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from bert_jax.tasks.task import answer_sums, choice_sums, squared_error_sum


def test_absent_choices_are_never_predicted():
    scores = np.array([[1.0, 5.0, 2.0], [0.5, 0.1, 9.0]], np.float32)
    present = np.array([[1, 1, 1], [1, 1, 0]], bool)
    loss, correct = choice_sums(jnp.array(scores), jnp.array(present), jnp.array([1, 0]), jnp.ones(2))
    np.testing.assert_allclose(loss, -log_softmax(scores[0])[1] - log_softmax(scores[1, :2])[0], rtol=1e-6)
    assert correct == 2


def test_answer_sums_match_hand_computation_with_a_padding_row():
    random = np.random.default_rng(2)
    logits = random.normal(size=(3, 5, 2)).astype(np.float32)
    possible = np.array([[1, 1, 1, 1, 0], [0, 1, 1, 0, 0], [0] * 5], bool)
    starts, ends = np.array([1, 1, 0]), np.array([3, 2, 0])

    def sums(logits):
        return answer_sums(logits, jnp.array(possible), jnp.array(starts), jnp.array(ends), jnp.array([1.0, 1.0, 0.0]))

    first = -log_softmax(logits[0, :4, 0])[1] - log_softmax(logits[0, :4, 1])[3]
    second = -log_softmax(logits[1, 1:3, 0])[0] - log_softmax(logits[1, 1:3, 1])[1]
    loss, correct = sums(jnp.array(logits))
    np.testing.assert_allclose(loss, (first + second) / 2, rtol=1e-6)
    predictions = [(logits[0, :4].argmax(0) == [1, 3]).all(), (logits[1, 1:3].argmax(0) == [0, 1]).all()]
    assert correct == sum(predictions)
    gradient = jax.grad(lambda logits: sums(logits)[0])(jnp.array(logits))
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[~possible], 0)


def test_squared_error_sum_of_token_scores():
    scores, targets = np.array([[1.0, 2.0], [0.0, 3.0]], np.float32), np.array([[0.0, 9.0], [0.5, 1.0]], np.float32)
    weights = np.array([[1.0, 0.0], [1.0, 1.0]], np.float32)
    assert squared_error_sum(*map(jnp.array, (scores, targets, weights))) == 1 + 0.25 + 4


@pytest.mark.slow
def test_smoothing_of_choices_is_over_present_choices():
    scores, present = jnp.array([[1.0, 5.0, 2.0], [0.5, 0.1, 9.0]]), jnp.array([[1, 1, 1], [1, 1, 0]], bool)
    labels, weights = jnp.array([1, 0]), jnp.array([1.0, 2.0])

    def loss(scores):
        return choice_sums(scores, present, labels, weights, smoothing=0.3)[0]

    first, second = -log_softmax(np.array(scores[0])), -log_softmax(np.array(scores[1, :2]))
    wanted = 0.7 * first[1] + 0.3 * first.mean() + 2 * (0.7 * second[0] + 0.3 * second.mean())
    np.testing.assert_allclose(loss(scores), wanted, rtol=1e-6)
    gradient = jax.grad(loss)(scores)
    assert np.isfinite(gradient).all() and gradient[1, 2] == 0
