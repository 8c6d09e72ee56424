"""Runs whose length, warmup and decay are counted in tokens."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import OptimizerConfig, PretrainConfig
from bert_jax.data.mixture import Mixture
from bert_jax.data.phases import Phase, PhasedLoader
from bert_jax.data.schedules import batch_schedule
from bert_jax.data.shards import open_dataset
from bert_jax.errors import UserError
from bert_jax.train import optim
from bert_jax.train.clock import Clock, TokenLength


@pytest.fixture(scope="module")
def parts(shards_dir):
    return [open_dataset(shards_dir, part) for part in ("train", "eval")]


def loader_of(parts, starts, schedule: str) -> PhasedLoader:
    phases = [Phase(first, Mixture.single(parts[number % 2])) for number, first in enumerate(starts)]
    return PhasedLoader(phases, parts[0].vocabulary(), batches=batch_schedule(schedule, 0), seed=3)


def mean_tokens(dataset) -> float:
    return float(dataset.gather(np.arange(dataset.rows)).sequence_lengths.sum()) / dataset.rows


def test_tokens_before_a_step_are_those_of_its_rows_on_average(parts):
    """Compares with a sum over steps, with means that are counted in the shards, not read from the manifest."""
    starts, schedule = (0, 6, 13, 19), "0:3,4:24,11:15"
    loader, rows = loader_of(parts, starts, schedule), batch_schedule(schedule, 0)
    total, means = 0.0, [mean_tokens(part) for part in parts]
    for step in range(40):
        assert loader.tokens_before(step) == pytest.approx(total, rel=1e-12)
        total += rows.at(step) * means[sum(first <= step for first in starts[1:]) % 2]


def test_after_whole_epochs_the_count_is_what_was_read(parts):
    train = parts[0]
    loader = loader_of(parts[:1], (0,), f"0:{train.rows}")
    read = sum(int((loader.batch(step).sequence_ids > 0).sum()) for step in range(3))
    assert loader.tokens_before(3) == read


@hypothesis.given(
    st.lists(st.integers(0, 50), min_size=1, max_size=30).filter(lambda counts: counts[-1] > 0), st.floats(0.5, 3000)
)
def test_the_steps_of_a_length_are_the_first_that_read_it(counts, tokens):
    def before(step: int) -> float:  # after the listed steps, each reads as many as the last
        return float(sum(counts[:step]) + max(0, step - len(counts)) * counts[-1])

    length = TokenLength(tokens, before)
    steps = next(step for step in range(1, 10_000) if before(step) >= tokens)
    assert length.steps == steps
    clock = Clock(steps=0, budget_minutes=0.0, log_every=100, length=length)
    fractions = [clock.read(step) for step in range(steps + 1)]
    assert fractions == [min(1.0, before(step) / tokens) for step in range(steps + 1)]
    assert fractions[-1] == 1.0 > fractions[-2]


def test_warmup_and_decay_are_counted_in_tokens_while_the_batch_grows():
    def before(step: int) -> int:
        return sum(64 if s < 40 else 256 for s in range(step))

    total, warmup, decay, final = before(100), 1_000, 5_000, 0.1
    written = OptimizerConfig(
        learning_rate=2.0, warmup_steps=0, schedule="wsd", warmup_tokens=1e3, decay_tokens=5e3, final_share=final
    )
    config = optim.with_token_shares(written, float(total))
    length = TokenLength(float(total), lambda step: float(before(step)))
    for step in range(length.steps + 1):
        tokens = before(step)
        level = final + (1 - final) * (1 - np.sqrt(max(0, tokens - (total - decay)) / decay))
        rate = optim.learning_rate(config, jnp.int32(step), jnp.float32(length.share(step)))
        np.testing.assert_allclose(rate, 2.0 * min(1.0, tokens / warmup, level), rtol=1e-4, atol=1e-5)
    assert config == dataclasses.replace(written, warmup_share=1_000 / total, decay_share=5_000 / total)


def test_without_tokens_the_optimizer_and_its_program_are_as_written():
    config = OptimizerConfig(warmup_steps=3, schedule="wsd")
    assert optim.with_token_shares(config, 0.0) == config

    def program(config):
        return str(jax.make_jaxpr(lambda step, done: optim.learning_rate(config, step, done))(3, 0.5))

    assert program(optim.with_token_shares(config, 100.0)) == program(config)


TOKENS = {"warmup_steps": 0, "schedule": "wsd"}


@pytest.mark.parametrize(
    ("changes", "tokens", "said"),
    [
        (TOKENS | {"decay_tokens": 5.0}, 0.0, r"optimizer\.decay_tokens is set, .*--config\.tokens=N"),
        (TOKENS | {"decay_tokens": 11.0}, 10.0, r"decay_tokens is 11, more than the run has; use at most 10"),
        (TOKENS | {"warmup_tokens": -1.0}, 10.0, r"optimizer\.warmup_tokens is -1\.0"),
        (TOKENS | {"warmup_tokens": float("nan")}, 10.0, r"optimizer\.warmup_tokens is nan"),
        ({"warmup_steps": 5, "warmup_tokens": 1.0}, 10.0, r"only one of them can be used"),
        ({"warmup_steps": 0, "decay_tokens": 1.0}, 10.0, r"of optimizer\.schedule=wsd, but the schedule is linear"),
    ],
)
def test_token_counts_that_do_not_fit_are_refused(changes, tokens, said):
    with pytest.raises(UserError, match=said):
        optim.with_token_shares(OptimizerConfig(**changes), tokens)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": 1e6}, r"config\.tokens is 1e\+06, but config\.steps is 1000000, too; .*--config\.steps=0"),
        ({"tokens": 1e6, "steps": 0, "budget_minutes": 3.0}, r"--config\.budget_minutes=0"),
        ({"tokens": -1.0, "steps": 0}, r"config\.tokens is -1\.0"),
        ({"tokens": float("inf"), "steps": 0}, r"config\.tokens is inf"),
    ],
)
def test_a_run_has_one_length(changes, said):
    with pytest.raises(UserError, match=said):
        PretrainConfig(**changes)
