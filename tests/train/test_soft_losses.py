"""The terms of distillation equal their formulas, computed by numpy in float64, and so do their gradients."""

import jax
import numpy as np
import pytest

from bert_jax.train import losses

DRAW = np.random.default_rng(0)
OURS, THEIRS = DRAW.normal(0, 3, (2, 4, 5, 7))
WEIGHTS = DRAW.random((4, 5))
soft_class_sum = jax.jit(losses.soft_class_sum, static_argnums=3)
soft_binary_sum = jax.jit(losses.soft_binary_sum, static_argnums=3)
squared_difference_sum = jax.jit(losses.squared_difference_sum)
hidden_sum = jax.jit(losses.hidden_sum, static_argnums=0)


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def differences(function, at: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """The gradient of a function of numpy arrays by central differences."""
    found = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        moved = np.zeros_like(at)
        moved[place] = step
        found[place] = (function(at + moved) - function(at - moved)) / (2 * step)
    return found


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_soft_classes_are_the_divergence_from_the_teacher_times_the_squared_temperature(temperature):
    p, q = softmax(THEIRS / temperature), softmax(OURS / temperature)
    wanted = temperature**2 * (WEIGHTS * (p * np.log(p / q)).sum(axis=-1)).sum()
    value, gradient = jax.value_and_grad(soft_class_sum)(OURS, THEIRS, WEIGHTS, temperature)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    # The derivative of a cross-entropy by its logits, of which the temperature divides one factor of two.
    np.testing.assert_allclose(gradient, temperature * (q - p) * WEIGHTS[..., None], rtol=1e-4, atol=1e-6)


def test_a_teacher_gets_no_gradient_and_a_student_like_it_none_either():
    for loss in (
        lambda ours, theirs: soft_class_sum(ours, theirs, WEIGHTS, 2.0),
        lambda ours, theirs: squared_difference_sum(ours, theirs, np.ones((4, 5, 7))),
        lambda ours, theirs: hidden_sum("mse", ours, theirs, WEIGHTS),
        lambda ours, theirs: hidden_sum("cosine", ours, theirs, WEIGHTS),
    ):
        assert not np.any(jax.grad(loss, argnums=1)(OURS, THEIRS))
        value, gradient = jax.value_and_grad(loss)(THEIRS, THEIRS)
        np.testing.assert_allclose(value, 0, atol=1e-5)
        np.testing.assert_allclose(gradient, 0, atol=1e-6)


def test_impossible_classes_of_both_add_nothing():
    """Absent choices, and the padding of a vocabulary, have the same very low logit in both."""
    low = np.full((4, 5, 2), -1e30)
    padded = [np.concatenate([each, low], axis=-1) for each in (OURS, THEIRS)]
    wanted = soft_class_sum(OURS, THEIRS, WEIGHTS, 2.0)
    value, gradient = jax.value_and_grad(soft_class_sum)(*padded, WEIGHTS, 2.0)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    assert not np.any(gradient[..., -2:])


def test_soft_labels_are_divergences_of_two_classes_each():
    weights = np.ones_like(OURS)
    p, q = sigmoid(THEIRS / 2), sigmoid(OURS / 2)
    wanted = 4 * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).sum()
    value, gradient = jax.value_and_grad(soft_binary_sum)(OURS, THEIRS, weights, 2.0)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(gradient, 2 * (q - p), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "mse"])
def test_hidden_states_are_compared_by_their_cosine_or_their_mean_squared_difference(kind):
    def by_hand(states: np.ndarray) -> float:
        total = 0.0
        for place in np.ndindex(WEIGHTS.shape):
            ours, theirs = states[place], THEIRS[place]
            cosine = ours @ theirs / np.sqrt((ours @ ours) * (theirs @ theirs))
            total += WEIGHTS[place] * (1 - cosine if kind == "cosine" else np.mean((ours - theirs) ** 2))
        return total

    value, gradient = jax.value_and_grad(lambda states: hidden_sum(kind, states, THEIRS, WEIGHTS))(OURS)
    np.testing.assert_allclose(value, by_hand(OURS), rtol=1e-5)
    np.testing.assert_allclose(gradient, differences(by_hand, OURS), atol=1e-4)
