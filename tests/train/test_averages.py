"""The moving average of parameters: its closed form, in a run, and over a restart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import OptimizerConfig
from bert_jax.errors import UserError
from bert_jax.train import optim


def test_the_average_is_that_of_the_definition():
    random = np.random.default_rng(0)
    params = {"kernel": jnp.float32(random.normal(size=(3, 2)))}
    average = optim.first_average(0.9, params)
    expected = np.float64(params["kernel"])
    for step in range(1, 200):
        params = {"kernel": jnp.float32(random.normal(size=(3, 2)))}
        average = optim.next_average(0.9, jnp.int32(step), average, params)
        kept = min(0.9, (1 + step) / (10 + step))
        expected = kept * expected + (1 - kept) * np.float64(params["kernel"])
    np.testing.assert_allclose(average["kernel"], expected, rtol=1e-5, atol=1e-6)


def test_what_does_not_move_is_its_own_average_bit_for_bit():
    frozen = {"table": jnp.float32([0.1, 1 / 3, 1e-30])}
    average = optim.first_average(0.999, frozen)
    for step in range(1, 20):
        average = optim.next_average(0.999, jnp.int32(step), average, frozen)
    np.testing.assert_array_equal(average["table"], frozen["table"])


def test_no_average_is_kept_without_a_decay():
    assert optim.first_average(0.0, {"a": jnp.ones(1)}) is None


def test_the_first_average_is_in_memory_of_its_own():
    params = {"a": jnp.ones(3)}
    average = optim.first_average(0.9, params)
    step = jax.jit(lambda params, average: (params, average), donate_argnums=(0, 1))
    step(params, average)  # would refuse to give one buffer away twice


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(UserError, match="ema_decay"):
        optim.build(OptimizerConfig(ema_decay=decay), {})
