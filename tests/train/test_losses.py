"""Tests the loss functions against scipy, torch (golden arrays) and computations by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import IGNORED, REFRESH, read_arrays
from scipy.special import log_expit, log_softmax

from bert_jax.tasks.task import answer_sums, choice_sums, squared_error_sum
from bert_jax.train.losses import ClassCosts, binary_sums, classification_sums
from bert_jax.train.objectives import Term, means, total_loss


def test_classification_sums_against_scipy():
    random = np.random.default_rng(0)
    logits = random.normal(size=(3, 4, 7)).astype(np.float32)
    labels = random.integers(0, 7, size=(3, 4))
    weights = random.integers(0, 2, size=(3, 4)).astype(np.float32)
    loss, correct = classification_sums(jnp.array(logits), jnp.array(labels), jnp.array(weights))
    log_probs = np.take_along_axis(log_softmax(logits.astype(np.float64), axis=-1), labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, -(log_probs * weights).sum(), rtol=1e-6)
    assert correct == ((logits.argmax(-1) == labels) * weights).sum()


def test_label_zero_contributes_to_the_loss():
    logits = jnp.array([[2.0, 0.0]])
    loss, correct = classification_sums(logits, jnp.array([0]), jnp.array([1.0]))
    assert loss > 0
    assert correct == 1


def test_infinite_logits_of_padding_classes_give_finite_gradients():
    logits = jnp.array([[1.0, 2.0, -jnp.inf]])
    gradient = jax.grad(lambda x: classification_sums(x, jnp.array([0]), jnp.array([1.0]))[0])(logits)
    assert np.isfinite(gradient).all()
    assert gradient[0, 2] == 0


def test_terms_are_divided_by_their_own_counts_and_added():
    terms = {"mlm": Term(jnp.float32(6), {"accuracy": jnp.float32(1)}), "nsp": Term(jnp.float32(2), {})}
    counts = {"mlm": jnp.float32(3), "nsp": jnp.float32(4)}
    assert total_loss(terms, counts) == 2.5
    metrics = means(terms, counts)
    assert metrics["loss"] == 2.5
    np.testing.assert_allclose(metrics["mlm_accuracy"], 1 / 3, rtol=1e-6)


def test_term_without_items_adds_nothing_and_its_mean_is_nan():
    terms, counts = {"mlm": Term(jnp.float32(0), {})}, {"mlm": jnp.float32(0)}
    assert total_loss(terms, counts) == 0
    assert np.isnan(means(terms, counts)["mlm_loss"])


def test_binary_sums_against_scipy():
    random = np.random.default_rng(1)
    logits, labels = random.normal(0, 3, 9).astype(np.float32), random.integers(0, 2, 9)
    weights = random.integers(0, 2, 9).astype(np.float32)
    loss, correct = binary_sums(jnp.array(logits), jnp.array(labels), jnp.array(weights))
    np.testing.assert_allclose(loss, -(log_expit(np.where(labels, logits, -logits)) * weights).sum(), rtol=1e-6)
    assert correct == (((logits >= 0) == labels) * weights).sum()


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


@pytest.mark.parametrize("name", ["plain", "weighed", "smoothed", "both"])
def test_class_weights_and_label_smoothing_match_torch(name):
    golden = read_arrays("class_costs")
    costs = ClassCosts(
        weights=tuple(golden["class_weights"].tolist()) if name in ("weighed", "both") else (),
        smoothing=0.1 if name in ("smoothed", "both") else 0.0,
    )
    labels = jnp.array(np.maximum(golden["labels"], 0))
    weights = jnp.array(golden["labels"] != IGNORED, jnp.float32)

    def mean(logits):
        loss, _ = classification_sums(logits, labels, weights, costs)
        return total_loss({"task": Term(loss, {})}, {"task": costs.weigh(labels, weights).sum()})

    loss, gradient = jax.value_and_grad(mean)(jnp.array(golden["logits"]))
    np.testing.assert_allclose(loss, golden[f"{name}/loss"], rtol=1e-6, err_msg=REFRESH)
    np.testing.assert_allclose(gradient, golden[f"{name}/gradient"], atol=1e-7, err_msg=REFRESH)


def test_correct_predictions_are_weighted_by_class():
    logits, labels = jnp.eye(3), jnp.array([0, 1, 0])
    _, correct = classification_sums(logits, labels, jnp.ones(3), ClassCosts((0.25, 4.0, 1.0)))
    assert correct == 0.25 + 4.0


def test_total_loss_divides_by_counts_below_one():
    assert total_loss({"task": Term(jnp.float32(0.5), {})}, {"task": jnp.float32(0.25)}) == 2


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
