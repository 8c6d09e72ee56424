"""AdamW against a plain numpy reading of Loshchilov and Hutter 2019, algorithm 2."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert_jax.command import UserError
from bert_jax.config import OptimizerConfig
from bert_jax.train import optim

CONFIG = OptimizerConfig(learning_rate=0.01, warmup_steps=4, weight_decay=0.1, clip_norm=1.0, epsilon=1e-6)


def rate(step: int, fraction: float, config: OptimizerConfig = CONFIG) -> float:
    return float(optim.learning_rate(config, jnp.int32(step), jnp.float32(fraction)))


def test_rate_warms_up_then_falls_to_zero():
    rates = [rate(step, step / 20) for step in range(21)]
    np.testing.assert_allclose(rates[:3], [0.0025, 0.005, 0.0075])
    np.testing.assert_allclose(rates[4:], 0.01 * (1 - np.arange(4, 21) / 20), rtol=1e-6, atol=1e-9)


def test_rate_has_no_jump():
    rates = np.array([rate(step, step / 2000, OptimizerConfig(warmup_steps=200)) for step in range(0, 2000)])
    assert np.abs(np.diff(rates)).max() <= 1e-4 / 200 * 1.001


def test_updates_are_those_of_the_paper():
    random = np.random.default_rng(0)
    params = {"dense": {"kernel": random.normal(size=(3, 2)), "bias": random.normal(size=2)}}
    params = jax.tree.map(jnp.float32, params)
    optimizer = optim.build(CONFIG, params)
    state = optimizer.init(params)
    expected = jax.tree.map(np.float64, params)
    first = jax.tree.map(np.zeros_like, expected)
    second = jax.tree.map(np.zeros_like, expected)
    for step in range(5):
        gradient = jax.tree.map(lambda leaf: jnp.float32(random.normal(size=leaf.shape)), params)
        direction, state = optimizer.update(gradient, state, params)
        params = optim.apply_updates(params, direction, jnp.float32(0.01), None)
        norm = np.sqrt(sum((np.float64(leaf) ** 2).sum() for leaf in jax.tree.leaves(gradient)))
        clipped = jax.tree.map(lambda leaf, norm=norm: np.float64(leaf) / max(1.0, norm), gradient)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, clipped)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, second, clipped)
        for name, decay in (("kernel", 0.1), ("bias", 0.0)):
            mean = first["dense"][name] / (1 - 0.9 ** (step + 1))
            spread = np.sqrt(second["dense"][name] / (1 - 0.999 ** (step + 1)))
            expected["dense"][name] -= 0.01 * (mean / (spread + 1e-6) + decay * expected["dense"][name])
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(params["dense"][name], expected["dense"][name], rtol=2e-5)


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(UserError, match="adamw"):
        optim.build(OptimizerConfig(name="sgd"), {})


def test_a_frozen_parameter_stays_bit_for_bit():
    params = {"a": jnp.float32([0.1, 0.2]), "b": jnp.float32([0.3])}
    moved = optim.apply_updates(params, params, jnp.float32(0.1), {"a": np.float32(0), "b": np.float32(1)})
    np.testing.assert_array_equal(moved["a"], params["a"])
    assert moved["b"] != params["b"]


def test_optax_agrees_with_its_own_adamw():
    params = {"kernel": jnp.linspace(-1.0, 1.0, 7)}
    config = OptimizerConfig(clip_norm=0.0, weight_decay=0.01, epsilon=1e-8)
    ours, theirs = optim.build(config, params), optax.adamw(0.1, eps=1e-8, weight_decay=0.01)
    direction, _ = ours.update(params, ours.init(params), params)
    updates, _ = theirs.update(params, theirs.init(params), params)
    moved = optim.apply_updates(params, direction, jnp.float32(0.1), None)
    np.testing.assert_allclose(moved["kernel"], optax.apply_updates(params, updates)["kernel"], rtol=1e-6)
