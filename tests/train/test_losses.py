"""Tests the loss functions against scipy, torch (golden arrays) and computations by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import IGNORED, REFRESH, read_arrays
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy.special import log_expit, log_softmax

from bert_jax.errors import UserError
from bert_jax.model.ops import GpuOperations, VocabularyProduct
from bert_jax.model.runtime import Runtime
from bert_jax.train import losses
from bert_jax.train.losses import ClassCosts, binary_sums, chunked_sums, classification_sums, vocabulary_sums
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
    assert total_loss({"task": Term(jnp.float32(0.5), {})}, {"task": jnp.float32(0.25)}) == 2  # counts may be small
    # A term without items adds nothing, and its mean is NaN.
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


# The terms of distillation equal their formulas, computed by numpy in float64, and so do their gradients.


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


# The loss by chunks of the vocabulary, compared with the loss of whole logits and its gradient by jax.


VOCABULARY, ROWS, WIDTH = 61, (3, 7), 20
PADDED = 128


def arguments(dtype: str, bias: bool, seed: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {
        "vectors": jnp.asarray(draw.normal(size=(*ROWS, WIDTH)), dtype),
        "table": jnp.asarray(draw.normal(size=(PADDED, WIDTH)), jnp.float32),
        "bias": jnp.asarray(draw.normal(size=PADDED), jnp.float32) if bias else None,
        "labels": jnp.asarray(draw.integers(0, VOCABULARY, ROWS)),
        "weights": jnp.asarray(draw.choice([0.0, 1.0, 2.5], ROWS), jnp.float32),
    }


def compute(runtime: Runtime, values: dict[str, Any]) -> tuple[Any, Any]:
    """The sums, and the gradients of 3 losses and 0.5 squares by vectors, table, bias and weights."""

    def loss(trained: dict[str, Any]) -> tuple[jax.Array, Any]:
        product = VocabularyProduct(trained["vectors"], trained["table"], trained["bias"], VOCABULARY, runtime)
        sums = vocabulary_sums(product, values["labels"], trained["weights"])
        return 3 * sums.loss + 0.5 * sums.squares, sums

    trained = {name: value for name, value in values.items() if name != "labels"}
    gradients, sums = jax.jit(jax.grad(loss, has_aux=True))(trained)
    return sums, gradients


@pytest.mark.parametrize("bias", [True, False], ids=["with bias", "without bias"])
@pytest.mark.parametrize("platform", ["cpu", "gpu"], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("at_once", [1000, 64, 50, 16])
def test_sums_and_gradients_equal_those_of_whole_logits(
    at_once: int, platform: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = arguments("float32", bias)
    wanted = compute(Runtime(platform="cpu"), values)
    monkeypatch.setattr(GpuOperations, "vocabulary_piece", at_once)
    found = compute(Runtime(logits_at_once=at_once if platform == "cpu" else 0, platform=platform), values)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(a).max())
    assert not np.asarray(found[1]["table"][VOCABULARY:]).any()


def test_gradients_of_bfloat16_vectors_differ_by_the_rounding_of_the_logits_gradient() -> None:
    values = arguments("bfloat16", True)
    (wanted, exact), (found, close) = (
        compute(Runtime("bfloat16", logits_at_once=number), values) for number in (0, 48)
    )
    np.testing.assert_allclose(wanted, found, rtol=1e-5)
    assert close["vectors"].dtype == jnp.bfloat16 and close["table"].dtype == jnp.float32
    for name in ("vectors", "table", "bias"):
        largest = np.abs(np.asarray(exact[name], np.float32)).max()
        difference = np.asarray(exact[name], np.float32) - np.asarray(close[name], np.float32)
        assert np.abs(difference).max() < 2**-7 * largest, name


def test_no_array_of_the_program_holds_the_logits_of_all_tokens() -> None:
    def sizes(jaxpr: Any) -> set[int]:
        found = {int(np.prod(variable.aval.shape)) for equation in jaxpr.eqns for variable in equation.outvars}
        inner = (
            part
            for equation in jaxpr.eqns
            for part in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "jaxpr") or hasattr(leaf, "eqns")
            )
        )
        return found.union(
            *(sizes(getattr(part, "jaxpr", part)) for part in inner if hasattr(getattr(part, "jaxpr", part), "eqns"))
        )

    values = arguments("float32", True)
    whole = np.prod(ROWS) * PADDED
    for at_once, present in ((0, True), (16, False)):
        traced = jax.make_jaxpr(lambda values, number=at_once: compute(Runtime(logits_at_once=number), values))(values)
        assert (whole in sizes(traced.jaxpr)) == present


def test_rows_on_eight_devices_give_the_sums_and_gradients_of_one() -> None:
    draw = np.random.default_rng(1)
    rows, table = draw.normal(size=(16, WIDTH)).astype(np.float32), draw.normal(size=(PADDED, WIDTH))
    labels, weights = draw.integers(0, VOCABULARY, 16), np.ones(16, np.float32)

    def loss(rows: jax.Array, table: jax.Array) -> jax.Array:
        precision = jax.lax.Precision.HIGHEST
        options = {"vocab_size": VOCABULARY, "chunk": 48, "precision": precision}
        return chunked_sums(rows, table, None, jnp.asarray(labels), jnp.asarray(weights), **options)[0]

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    laid = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data")))
    whole = jax.device_put(table.astype(np.float32), NamedSharding(mesh, PartitionSpec()))
    wanted, found = run(rows, table.astype(np.float32)), run(laid, whole)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), wanted, found)


def test_a_tie_with_the_label_in_another_chunk_counts_as_correct() -> None:
    rows, table = jnp.ones((2, 1)), jnp.array([[1.0], [2.0], [2.0], [0.0]])
    options = {"vocab_size": 4, "chunk": 1, "precision": jax.lax.Precision.HIGHEST}
    found = [
        float(chunked_sums(rows, table, None, jnp.array([label, 0]), jnp.array([1.0, 0.0]), **options)[1])
        for label in range(4)
    ]
    assert found == [0, 1, 1, 0]


def test_a_negative_number_of_tokens_is_refused() -> None:
    with pytest.raises(UserError, match=r"config\.model\.logits_at_once is -1"):
        Runtime(logits_at_once=-1)
