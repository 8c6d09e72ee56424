import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax

from bert_jax.train.losses import classification_sums, means, total_loss


def test_classification_sums_against_scipy():
    random = np.random.default_rng(0)
    logits = random.normal(size=(3, 4, 7)).astype(np.float32)
    labels = random.integers(0, 7, size=(3, 4))
    weights = random.integers(0, 2, size=(3, 4)).astype(np.float32)
    loss, correct = classification_sums(jnp.array(logits), jnp.array(labels), jnp.array(weights))
    log_probs = np.take_along_axis(log_softmax(logits.astype(np.float64), axis=-1), labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, -(log_probs * weights).sum(), rtol=1e-6)
    assert correct == ((logits.argmax(-1) == labels) * weights).sum()


def test_label_zero_counts():
    logits = jnp.array([[2.0, 0.0]])
    loss, correct = classification_sums(logits, jnp.array([0]), jnp.array([1.0]))
    assert loss > 0
    assert correct == 1


def test_minus_infinity_logits_of_padding_entries_give_finite_gradients():
    logits = jnp.array([[1.0, 2.0, -jnp.inf]])
    gradient = jax.grad(lambda x: classification_sums(x, jnp.array([0]), jnp.array([1.0]))[0])(logits)
    assert np.isfinite(gradient).all()
    assert gradient[0, 2] == 0


def test_terms_are_divided_by_their_own_counts_and_added():
    sums = {"mlm_loss": jnp.float32(6), "mlm_correct": jnp.float32(1), "nsp_loss": jnp.float32(2)}
    counts = {"mlm": jnp.float32(3), "nsp": jnp.float32(4)}
    assert total_loss(sums, counts) == 2.5
    metrics = means(sums, counts)
    assert metrics["loss"] == 2.5
    np.testing.assert_allclose(metrics["mlm_accuracy"], 1 / 3, rtol=1e-6)


def test_a_term_without_a_single_item_adds_nothing_and_is_not_a_number():
    sums, counts = {"mlm_loss": jnp.float32(0)}, {"mlm": jnp.float32(0)}
    assert total_loss(sums, counts) == 0
    assert np.isnan(means(sums, counts)["mlm_loss"])
