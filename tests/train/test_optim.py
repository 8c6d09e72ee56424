"""Tests AdamW against a numpy version of Loshchilov and Hutter 2019, algorithm 2; schedules, factors and decays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert_jax.config import (
    AdamW,
    ConstantSchedule,
    CosineSchedule,
    InverseSqrtSchedule,
    LinearSchedule,
    Muon,
    OptimizerConfig,
    ScheduleConfig,
    WSDSchedule,
)
from bert_jax.errors import UserError
from bert_jax.model import layers as paths
from bert_jax.train import optim, rules
from bert_jax.train.rules import Trained

CONFIG = AdamW(
    learning_rate=0.01,
    schedule=LinearSchedule(warmup_steps=4, from_start=True),
    weight_decay=0.1,
    clip_norm=1.0,
    epsilon=1e-6,
)


def rates_of(config: OptimizerConfig, steps: int) -> np.ndarray:
    """Returns the learning rate of each step of a run of `steps` steps, and of the step after its last."""
    numbers = np.arange(steps + 1)
    rates = jax.vmap(lambda step, fraction: optim.learning_rate(config, step, fraction))
    return np.asarray(rates(jnp.int32(numbers), jnp.float32(numbers / steps)))


def test_rate_warms_up_then_falls_to_zero():
    rates = rates_of(CONFIG, 20)
    np.testing.assert_allclose(rates[:3], [0.0025, 0.005, 0.0075])
    np.testing.assert_allclose(rates[4:], 0.01 * (1 - np.arange(4, 21) / 20), rtol=1e-6, atol=1e-9)


def test_a_run_that_ends_within_its_warmup_is_told_which_keys_to_set():
    told = optim.warmup_warning(AdamW(schedule=LinearSchedule(warmup_steps=200)), 199)
    assert "optimizer.schedule.warmup_steps is 200, but the run has 199 steps" in told and "\n" not in told
    assert rates_of(dataclasses.replace(CONFIG, schedule=ConstantSchedule(warmup_steps=21)), 20)[:-1].max() < 0.01
    for warmup, steps in ((200, 200), (200, 0), (0, 5)):
        assert not optim.warmup_warning(AdamW(schedule=LinearSchedule(warmup_steps=warmup)), steps)
    assert not optim.warmup_warning(AdamW(schedule=LinearSchedule(warmup_steps=0, warmup_share=0.06)), 5)


@pytest.mark.parametrize("from_start", [False, True])
def test_rate_has_no_jump(from_start):
    rates = rates_of(AdamW(schedule=LinearSchedule(warmup_steps=200, from_start=from_start)), 2000)
    assert np.abs(np.diff(rates)).max() <= 1e-4 / 200 * 1.001


@pytest.mark.parametrize(("warmup", "steps"), [(0, 7), (1, 7), (10, 94), (3, 4), (1000, 10_000), (20, 20), (30, 20)])
def test_rates_are_those_of_transformers(warmup, steps):
    """Checks get_linear_schedule_with_warmup and get_cosine_schedule_with_warmup (transformers 5, optimization.py)."""
    for kind in (LinearSchedule, CosineSchedule):
        wanted = []
        for step in range(steps):
            left = (steps - step) / max(1, steps - warmup)
            if step < warmup:
                wanted.append(step / max(1, warmup))
            elif kind is LinearSchedule:
                wanted.append(max(0.0, left))
            else:
                wanted.append(max(0.0, 0.5 * (1 + np.cos(np.pi * (1 - left)))))
        rates = rates_of(AdamW(learning_rate=1.0, schedule=kind(warmup_steps=warmup)), steps)[:-1]
        np.testing.assert_allclose(rates, wanted, rtol=1e-5, atol=1e-6)
        # The same warmup as a share of the run.
        if 0 < warmup < steps:
            shared = AdamW(learning_rate=1.0, schedule=kind(warmup_steps=0, warmup_share=warmup / steps))
            np.testing.assert_allclose(rates_of(shared, steps)[:-1], wanted, rtol=1e-5, atol=1e-6)


def test_a_warmup_in_steps_ends_at_the_peak_in_a_run_limited_by_time():
    # Steps take longer and longer, so that the completed fraction of the run is no multiple of the step.
    steps = np.arange(101)
    fractions = jnp.float32((steps / 100) ** 2)
    config = AdamW(learning_rate=1.0, schedule=LinearSchedule(warmup_steps=20))
    rates = np.asarray(jax.vmap(lambda *at: optim.learning_rate(config, *at))(jnp.int32(steps), fractions))
    np.testing.assert_allclose(rates[:21], steps[:21] / 20, rtol=1e-6)
    assert (np.diff(rates[20:]) < 0).all() and rates[100] == 0


def test_adamw_updates_match_the_paper():
    random = np.random.default_rng(0)
    params = {"dense": {"kernel": random.normal(size=(3, 2)), "bias": random.normal(size=2)}}
    params = jax.tree.map(jnp.float32, params)
    optimizer = optim.build(CONFIG, params)
    state = optimizer.init(params)
    expected = jax.tree.map(np.float64, params)
    first = jax.tree.map(np.zeros_like, expected)
    second = jax.tree.map(np.zeros_like, expected)
    update, apply_updates = jax.jit(optimizer.update), jax.jit(optim.apply_updates)
    for step in range(5):
        gradient = jax.tree.map(lambda leaf: jnp.float32(random.normal(size=leaf.shape)), params)
        direction, state = update(gradient, state, params)
        params = apply_updates(params, direction, jnp.float32(0.01), None)
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


def test_frozen_parameter_stays_bitwise_identical():
    params = {"a": jnp.float32([0.1, 0.2]), "b": jnp.float32([0.3])}
    moved = optim.apply_updates(params, params, jnp.float32(0.1), {"a": np.float32(0), "b": np.float32(1)})
    np.testing.assert_array_equal(moved["a"], params["a"])
    assert moved["b"] != params["b"]


def test_adamw_matches_optax_adamw():
    params = {"kernel": jnp.linspace(-1.0, 1.0, 7)}
    config = AdamW(clip_norm=0.0, weight_decay=0.01, epsilon=1e-8)
    ours, theirs = optim.build(config, params), optax.adamw(0.1, eps=1e-8, weight_decay=0.01)
    direction, _ = ours.update(params, ours.init(params), params)
    updates, _ = theirs.update(params, theirs.init(params), params)
    moved = optim.apply_updates(params, direction, jnp.float32(0.1), None)
    np.testing.assert_allclose(moved["kernel"], optax.apply_updates(params, updates)["kernel"], rtol=1e-6)


@pytest.mark.slow
def test_updates_without_bias_correction_match_original_bert():
    """The reference is google-research/bert, optimization.py, AdamWeightDecayOptimizer.apply_gradients, in numpy."""
    config = dataclasses.replace(CONFIG, bias_correction=False, clip_norm=0.0)
    random = np.random.default_rng(0)
    params = {"kernel": jnp.float32(random.normal(size=(3, 2)))}
    optimizer = optim.build(config, params)
    state, expected, m, v = optimizer.init(params), np.float64(params["kernel"]), 0.0, 0.0
    for _ in range(4):
        gradient = random.normal(size=(3, 2))
        direction, state = optimizer.update({"kernel": jnp.float32(gradient)}, state, params)
        params = optim.apply_updates(params, direction, jnp.float32(0.01), None)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        expected = expected - 0.01 * (m / (np.sqrt(v) + 1e-6) + 0.1 * expected)
    np.testing.assert_allclose(params["kernel"], expected, rtol=2e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta2": 1.0}, r"optimizer\.beta2"),
        ({"epsilon": 0.0}, r"optimizer\.epsilon"),
        ({"weight_decay": -0.1}, r"optimizer\.weight_decay"),
        ({"clip_norm": float("nan")}, r"optimizer\.clip_norm"),
        ({"ema_decay": -0.1}, r"optimizer\.ema_decay"),
        ({"ema_decay": 1.0}, r"optimizer\.ema_decay"),
        ({"layer_decay": 0.0}, r"optimizer\.layer_decay"),
        ({"layer_decay": 1.5}, r"optimizer\.layer_decay"),
        ({"learning_rate": float("nan")}, r"optimizer\.learning_rate"),
    ],
    ids=str,
)
def test_an_invalid_value_is_refused_by_its_key(changes, message):
    with pytest.raises(UserError, match=message):
        AdamW(**changes)


@pytest.mark.parametrize(
    ("schedule", "changes", "message"),
    [
        (WSDSchedule, {"decay_share": 0.0}, r"optimizer\.schedule\.decay_share"),
        (LinearSchedule, {"final_share": 1.5}, r"optimizer\.schedule\.final_share"),
        (LinearSchedule, {"warmup_share": 0.06, "warmup_steps": 10}, "only one of them can be used"),
        (LinearSchedule, {"warmup_steps": -2}, r"optimizer\.schedule\.warmup_steps"),
        (InverseSqrtSchedule, {"warmup_steps": 0}, r"no warmup is configured. Set --config\.optimizer\.schedule\.w"),
    ],
)
def test_an_invalid_schedule_is_refused_by_its_key(schedule, changes, message):
    with pytest.raises(UserError, match=message):
        schedule(**changes)


def test_a_warmup_of_a_tenth_is_for_fine_tuning():
    with pytest.raises(UserError, match=r"warmup_steps is -1, which is for fine-tuning"):
        optim.build(AdamW(schedule=LinearSchedule(warmup_steps=-1)), {})


def test_muon_is_refused_where_a_model_has_no_matrix_for_it():
    params = layers()
    config = Muon()
    optim.build(config, params)
    head = {"mlm_head": params["mlm_head"]}
    optim.build(config, params, Trained.everything(head))  # the matrices are frozen
    recurrent = {"encoder": {"layers": {"forward": {"input": {"kernel": jnp.ones((1, 2, 4, 2))}}}}}
    with pytest.raises(UserError, match=r"optimizer is muon, but .* --config\.optimizer=adamw"):
        optim.build(config, recurrent | head)


SCHEDULES = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + np.cos(np.pi * x)) / 2,
    "constant": lambda x: np.ones_like(x),
    "wsd": lambda x: np.where(x < 0.8, 1.0, 1 - np.sqrt(np.maximum(x - 0.8, 0) / 0.2)),
}


def schedule_of(name: str, **options: float) -> ScheduleConfig:
    kind = ScheduleConfig.kinds[name]
    known = {item.name for item in dataclasses.fields(kind)}
    given = {"warmup_steps": 0, "decay_share": 0.2} | options
    return kind(**{key: value for key, value in given.items() if key in known})


def rates_at(config: OptimizerConfig, fractions: np.ndarray) -> np.ndarray:
    return jax.vmap(lambda fraction: optim.learning_rate(config, jnp.int32(5), fraction))(jnp.float32(fractions))


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_match_their_closed_forms(name):
    x = np.linspace(0, 1, 101)
    config = AdamW(learning_rate=3.0, schedule=schedule_of(name, final_share=0.1))
    wanted = np.where(name == "constant", 1.0, 0.1 + 0.9 * SCHEDULES[name](x))
    np.testing.assert_allclose(rates_at(config, x), 3 * wanted, rtol=1e-5, atol=1e-6)


def test_inverse_square_root_matches_the_original_transformer():
    """Checks Vaswani et al. 2017, equation 3, by steps and by shares of a run of 80,000 steps."""
    step = np.array([1, 10, 3_999, 4_000, 4_001, 16_000, 80_000])
    wanted = 512**-0.5 * np.minimum(step**-0.5, step * 4_000.0**-1.5)
    config = AdamW(learning_rate=(512 * 4_000) ** -0.5, schedule=InverseSqrtSchedule(warmup_steps=4_000))
    by_steps = [optim.learning_rate(config, jnp.int32(number - 1), jnp.float32(0.5)) for number in step]
    np.testing.assert_allclose(by_steps, wanted, rtol=1e-6)
    by_share = dataclasses.replace(config, schedule=InverseSqrtSchedule(0, 4_000 / 80_000))
    np.testing.assert_allclose(rates_at(by_share, step / 80_000), wanted, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_runs_over_the_rest_after_warmup_share(name):
    x = np.linspace(0, 1, 101)
    config = AdamW(learning_rate=2.0, schedule=schedule_of(name, warmup_share=0.06))
    rates = rates_at(config, x)
    left = x if name == "wsd" else np.clip((x - 0.06) / 0.94, 0, 1)  # the decay of wsd is a share of the whole run
    np.testing.assert_allclose(rates, 2 * np.minimum(x / 0.06, SCHEDULES[name](left)), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_constant_schedule_can_end_with_wsd_without_a_jump():
    flat = AdamW(schedule=ConstantSchedule(warmup_steps=0, warmup_share=0.1))
    end = dataclasses.replace(flat, schedule=WSDSchedule(0, 0.1, decay_share=0.2))  # 800 steps become 1,000
    before, after = rates_at(flat, np.array([799 / 800])), rates_at(end, np.array([800, 801, 1000]) / 1000)
    np.testing.assert_allclose(after[0], before[0], rtol=1e-3)  # the square root is steep where the decay begins
    assert after[0] > after[1] > after[2]
    np.testing.assert_allclose(after[2], 0, atol=1e-6 * flat.learning_rate)


def layers() -> dict:
    """Returns parameters of embeddings, three stacked layers and a head."""
    return {
        "embeddings": {"token": {"table": jnp.ones((5, 2))}},
        "encoder": {"layers": {"feed_forward": {"output": {"kernel": jnp.ones((3, 2, 2)), "bias": jnp.ones((3, 2))}}}},
        "mlm_head": {"bias": jnp.ones(5)},
    }


def test_layer_decay_reduces_the_rate_of_lower_layers():
    factors = paths.flatten(optim.rate_factors(AdamW(layer_decay=0.5), layers()))
    kernel = factors["encoder/layers/feed_forward/output/kernel"]
    assert kernel.shape == (3, 1, 1)
    np.testing.assert_array_equal(kernel.ravel(), [1 / 8, 1 / 4, 1 / 2])
    assert factors["embeddings/token/table"] == 1 / 16
    assert factors["mlm_head/bias"] == 1


def test_rate_factors_multiply_and_zero_freezes():
    params = layers()
    config = AdamW(layer_decay=0.5, rates={"^embeddings/": 0.0, "layers/2/.*bias": 4.0})
    factors = optim.rate_factors(config, params, rules.trainable("last:2", params))
    by_path = paths.flatten(factors)
    np.testing.assert_array_equal(by_path["encoder/layers/feed_forward/output/bias"].ravel(), [0, 1 / 4, 2])
    moved = paths.flatten(optim.apply_updates(params, params, jnp.float32(0.1), factors))
    np.testing.assert_allclose(moved["encoder/layers/feed_forward/output/bias"][:, 0], [1, 0.975, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(moved["embeddings/token/table"], params["embeddings"]["token"]["table"])
    assert optim.rate_factors(AdamW(), params) is None


def test_weight_decay_applies_to_matrices_unless_a_rule_matches():
    decays = paths.flatten(optim.decays(AdamW(decays={"layers/0/": 0.5, "head/bias$": 0.25}), layers()))
    np.testing.assert_array_equal(
        decays["encoder/layers/feed_forward/output/kernel"].ravel(), np.float32([0.5, 0.01, 0.01])
    )
    np.testing.assert_array_equal(decays["encoder/layers/feed_forward/output/bias"].ravel(), np.float32([0.5, 0, 0]))
    assert decays["mlm_head/bias"] == 0.25
    assert decays["embeddings/token/table"] == np.float32(0.01)


@pytest.mark.parametrize("decays", [{".*": 0.2}, {"kernel$": 0.3, "^embeddings/": 0.2}])
def test_a_weight_decay_that_applies_to_no_parameter_is_reported(decays):
    config = AdamW(weight_decay=0.1, decays=decays)
    told = optim.weight_decay_warning(config, layers())
    assert f"optimizer.weight_decay=0.1 has no effect, because optimizer.decays={decays} matches all" in told
    usual = dataclasses.replace(config, weight_decay=OptimizerConfig.weight_decay)
    others = ({}, {"kernel$": 0.3}, {"layers/[01]/": 0.3, "^embeddings/": 0.2}, {"bias$": 0.1})
    for quiet in (usual, *(dataclasses.replace(config, decays=some) for some in others)):
        assert optim.weight_decay_warning(quiet, layers()) == ""


# The moving average of parameters: its closed form, in a run, and over a restart.


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
    assert optim.first_average(0.0, frozen) is None


def test_the_first_average_is_in_memory_of_its_own():
    params = {"a": jnp.ones(3)}
    average = optim.first_average(0.9, params)
    step = jax.jit(lambda params, average: (params, average), donate_argnums=(0, 1))
    step(params, average)  # would refuse to give one buffer away twice
