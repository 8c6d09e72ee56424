import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from bert_jax.model import layers
from bert_jax.model.layers import Dense, LayerNorm, activation, child_key, layer_norm_narrow, truncated_normal
from bert_jax.model.ops import add_bias, operations
from bert_jax.model.runtime import Runtime

KEY = jax.random.key(0)


@pytest.mark.parametrize("again", [False, True])
def test_gelu_and_its_slope_are_those_of_the_normal_distribution(again):
    gelu = activation("gelu", again=again)
    x = np.linspace(-6, 6, 241, dtype=np.float32)
    np.testing.assert_allclose(gelu(jnp.asarray(x)), x * norm.cdf(x), atol=1e-6)
    slope = jax.vmap(jax.grad(gelu))(jnp.asarray(x))
    np.testing.assert_allclose(slope, norm.cdf(x) + x * norm.pdf(x), atol=1e-6)


def test_layer_norm_gives_mean_zero_and_deviation_one_before_scale_and_bias():
    module = LayerNorm(37, epsilon=1e-12, runtime=Runtime())
    y = module(5 + 3 * jax.random.normal(KEY, (4, 37)))
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(y.std(-1), 1, atol=1e-6)


def test_layer_norm_computes_in_float32_for_any_compute_dtype():
    x = (100 + jax.random.normal(KEY, (4, 64))).astype(jnp.bfloat16)
    narrow = LayerNorm(64, epsilon=1e-12, runtime=Runtime(compute_dtype="bfloat16"))(x)
    exact = LayerNorm(64, epsilon=1e-12, runtime=Runtime())(x)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(np.float32), exact, rtol=2**-8)


@pytest.mark.parametrize("bias", [None, jnp.linspace(-1, 1, 64)])
def test_the_norm_that_keeps_little_has_the_gradients_of_the_other(bias):
    x, scale = 3 + jax.random.normal(KEY, (2, 5, 64)), jnp.linspace(0.5, 2, 64)

    def plain(x, scale, bias):
        normal = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return normal * scale[None, None] + (0 if bias is None else bias[None, None])

    def narrow(x, scale, bias):
        return layer_norm_narrow(x, scale, bias, 1e-6, "float32")

    def gradients(norm):
        by = (0, 1) if bias is None else (0, 1, 2)
        return jax.grad(lambda *arrays: jnp.sin(norm(*arrays)).sum(), by)(x, scale, bias)

    one, other = gradients(plain), gradients(narrow)
    jax.tree.map(lambda here, there: np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-5), one, other)


@pytest.mark.parametrize("add", [functools.partial(add_bias, rows_of_ones=rows) for rows in (0, 1, 8)])
def test_a_bias_adds_to_every_row_and_its_gradient_sums_them(add):
    x, bias = jnp.ones((5, 3)), jnp.arange(3.0)
    _, pull = jax.vjp(add, x, bias)
    cotangent = jax.random.normal(KEY, (5, 3))
    gradients = pull(cotangent)
    np.testing.assert_array_equal(add(x, bias)[2], [1, 2, 3])
    np.testing.assert_array_equal(gradients[0], cotangent)
    np.testing.assert_allclose(gradients[1], cotangent.sum(0), rtol=1e-6)


def test_dense_contracts_the_last_axes():
    x, kernel = jax.random.normal(KEY, (2, 3, 4, 5)), jax.random.normal(child_key(KEY, "kernel"), (4, 5, 6, 7))
    bias = jnp.arange(42.0).reshape(6, 7)
    wanted = np.einsum("abij,ijkl->abkl", x, kernel) + np.asarray(bias)
    for platform in ("cpu", "tpu", "gpu"):
        got = operations(Runtime(platform=platform)).dense(x, kernel, bias, 2)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_dense_in_the_form_of_each_platform_has_the_same_gradients(platform):
    x, kernel = jax.random.normal(KEY, (2, 3, 4)), jax.random.normal(child_key(KEY, "kernel"), (4, 5, 6))

    def loss(platform, x, kernel, bias):
        return jnp.sin(operations(Runtime(platform=platform)).dense(x, kernel, bias, 1)).sum()

    arguments = (x, kernel, jnp.ones((5, 6)))
    here, there = (jax.grad(functools.partial(loss, name), (0, 1, 2))(*arguments) for name in ("cpu", platform))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5), here, there)


def test_bfloat16_products_may_leave_in_float32():
    module = Dense((8,), (3,), deviation=1.0, runtime=Runtime(compute_dtype="bfloat16"), key=KEY)
    assert module(jnp.ones((2, 8))).dtype == jnp.bfloat16
    assert module(jnp.ones((2, 8)), dtype=jnp.float32).dtype == jnp.float32


def test_initial_values_are_a_normal_cut_at_two_deviations():
    values = np.asarray(truncated_normal(KEY, (200, 500), 0.02))
    assert np.abs(values).max() <= 0.04
    # The deviation of a normal cut at two deviations. Five standard errors: one false alarm in 1.7 million.
    cut = math.sqrt(1 - 2 * 2 * norm.pdf(2) / (norm.cdf(2) - norm.cdf(-2)))
    assert abs(values.std() / (0.02 * cut) - 1) < 5 / math.sqrt(2 * values.size)
    assert abs(values.mean()) < 5 * 0.02 / math.sqrt(values.size)


def test_flatten_and_unflatten_undo_each_other():
    value = np.ones((2, 3))  # an array is a leaf
    nested = {"encoder": {"norm": {"scale": 1, "bias": value}}, "bias": 3}
    flat = layers.flatten(nested)
    assert flat == {"bias": 3, "encoder/norm/bias": value, "encoder/norm/scale": 1}
    assert list(flat) == sorted(flat) and flat["encoder/norm/bias"] is value
    assert layers.unflatten(flat) == nested


@pytest.mark.parametrize("flat", [{"a": 1, "a/b": 2}, {"a/b": 2, "a": 1}])
def test_a_path_that_is_parameter_and_folder_is_refused(flat):
    with pytest.raises(ValueError, match="'a"):
        layers.unflatten(flat)
