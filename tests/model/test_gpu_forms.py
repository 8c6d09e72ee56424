"""The form of each operation for NVIDIA GPUs, run on a CPU, against the default form."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, random_params
from tiny_batches import lay, random_sequence

from bert_jax.data.example import Batch
from bert_jax.model import layers
from bert_jax.model.bert import bind
from bert_jax.model.dropout import dropout, row_seeds
from bert_jax.model.layers import layer_norm_narrow
from bert_jax.model.ops import GpuOperations, Operations, TpuOperations, operations
from bert_jax.model.runtime import Runtime
from bert_jax.train.objectives import MaskedLMObjective

KEY = jax.random.key(0)
OBJECTIVE = MaskedLMObjective()


def batch() -> Batch:
    """A padded row, a full one, and two sequences packed into one."""
    rows = [[7], [15], [6, 8]]
    rows = [[random_sequence(length, 61, length) for length in lengths] for lengths in rows]
    return jax.tree.map(jnp.asarray, lay(rows, 15, predictions=4))


def loss_and_gradients(config: Any, params: Any, platform: str, dtype: str = "float32") -> tuple[Any, Any]:
    attention = "einsum" if dtype == "bfloat16" else "auto"
    runtime = Runtime(dtype, platform=platform, attention=attention, layer_loop="scan")
    rows = batch()

    @jax.jit
    def run(params: Any) -> tuple[Any, Any]:
        def loss(params: Any) -> jax.Array:
            terms = OBJECTIVE.apply(bind(config, OBJECTIVE.heads, params, runtime), rows, jax.random.key(3))
            return sum((term.loss for term in terms.values()), jnp.float32(0))

        return jax.value_and_grad(loss)(params)

    return run(params)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "shaw", "albert"])
def test_a_model_with_dropout_has_the_loss_and_gradients_of_the_default_form(family: str) -> None:
    config = dataclasses.replace(FAMILIES[family], dropout=0.2, attention_dropout=0.2)
    params = random_params(config, OBJECTIVE.heads)
    (wanted, expected), (found, gradients) = (loss_and_gradients(config, params, name) for name in ("cpu", "gpu"))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    for path, gradient in layers.flatten(gradients).items():
        theirs = np.asarray(layers.flatten(expected)[path])
        np.testing.assert_allclose(gradient, theirs, atol=1e-5 * max(1.0, np.abs(theirs).max()), err_msg=path)


@pytest.mark.slow
def test_gradients_in_bfloat16_are_as_near_to_float32_as_those_of_the_default_form() -> None:
    config = dataclasses.replace(FAMILIES["bert"], dropout=0.2, attention_dropout=0.2)
    params = random_params(config, OBJECTIVE.heads)

    def flat(*arguments: str) -> np.ndarray:
        gradients = layers.flatten(loss_and_gradients(config, params, *arguments)[1])
        return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in gradients.values()])

    exact, default, form = flat("cpu"), flat("cpu", "bfloat16"), flat("gpu", "bfloat16")
    ours, theirs = (np.linalg.norm(one - exact) / np.linalg.norm(exact) for one in (form, default))
    assert ours < 1.2 * theirs < 0.05


@pytest.mark.slow
def test_heads_projected_one_by_one_equal_those_of_one_matmul() -> None:
    draw = np.random.default_rng(0)
    hidden, kernel, bias, queries = (
        jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((2, 5, 6), (6, 3, 2, 4), (3, 2, 4), (2, 3, 6))
    )
    forms = operations(Runtime(platform="gpu"))

    def loss(separate: bool, *arguments: Any) -> jax.Array:
        heads = forms.project_heads(*arguments, separate=separate)
        return sum(jnp.sin((number + 1) * part).sum() for number, part in enumerate(heads))

    for arguments, by in (((hidden, None, kernel, bias), (1, 3, 4)), ((hidden, queries, kernel, bias), (1, 2, 3, 4))):
        together, alone = (jax.value_and_grad(loss, by)(separate, *arguments) for separate in (False, True))
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5), together, alone)


@pytest.mark.parametrize("bias", [True, False], ids=["with bias", "without bias"])
def test_a_norm_whose_gradient_is_split_equals_one_whose_gradient_is_not(bias: bool) -> None:
    x, scale = 3 + jax.random.normal(KEY, (2, 5, 64)), jnp.linspace(0.5, 2, 64)
    shift = jnp.linspace(-1, 1, 64) if bias else None

    def loss(split: bool, x: Any, scale: Any, shift: Any) -> jax.Array:
        return jnp.sin(layer_norm_narrow(x, scale, shift, 1e-6, "float32", split)).sum()

    whole, split = (
        jax.value_and_grad(functools.partial(loss, one), (0, 1, 2))(x, scale, shift) for one in (False, True)
    )
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), whole, split)


def test_a_mask_that_is_computed_again_is_the_same() -> None:
    seeds, x = row_seeds(KEY, (), 4), jnp.ones((4, 33))
    kept, pull = jax.vjp(lambda x: dropout(x, 0.3, seeds, again=True), x)
    np.testing.assert_array_equal(kept, dropout(x, 0.3, seeds))
    np.testing.assert_array_equal(pull(x)[0], kept)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_look_ups_take_rows_and_their_gradient_adds_to_them(dtype: str) -> None:
    table, rows = jax.random.normal(KEY, (5, 8)), jnp.array([[0, 3, 3], [4, 0, 3]])
    look_up = operations(Runtime(dtype, platform="gpu")).look_up
    found, pull = jax.vjp(lambda table: look_up(table, rows), table)
    np.testing.assert_array_equal(found, table[rows])
    gradient = jax.random.normal(jax.random.key(1), found.shape).astype(dtype).astype(jnp.float32)
    wanted = np.zeros(table.shape)
    np.add.at(wanted, np.asarray(rows), np.asarray(gradient))
    np.testing.assert_allclose(pull(gradient)[0], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("platform", "form"),
    [
        ("cuda", GpuOperations),
        ("gpu", GpuOperations),
        ("rocm", Operations),
        ("cpu", Operations),
        ("tpu", TpuOperations),
    ],
)
def test_the_platform_chooses_the_form(platform: str, form: type) -> None:
    assert type(operations(Runtime(platform=platform))) is form
