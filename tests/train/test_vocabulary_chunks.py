"""The loss by chunks of the vocabulary, compared with the loss of whole logits and its gradient by jax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.errors import UserError
from bert_jax.model.ops import GpuOperations, VocabularyProduct
from bert_jax.model.runtime import Runtime
from bert_jax.train.losses import chunked_sums, vocabulary_sums

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
