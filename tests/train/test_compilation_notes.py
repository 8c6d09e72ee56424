"""What a run says about the compilation of its first step and of its first evaluation."""

import time

import jax
import jax.numpy as jnp
import pytest

from bert_jax.train import compilation
from bert_jax.train.clock import Clock
from bert_jax.train.metrics import ProgressLine


@pytest.fixture
def every_line(monkeypatch):
    """Also short compilations are reported."""
    monkeypatch.setattr(compilation, "WORTH_A_LINE", 0.0)


def compile_in_block(number: float) -> None:
    function = jax.jit(lambda x: jnp.sin(x) * number + jnp.tanh(x @ x))  # a program that no other test has
    x = jnp.ones((7, 7))
    with compilation.compiling(ProgressLine("run")):
        function(x).block_until_ready()


def test_new_and_cached_programs_are_told_apart(every_line, tmp_path, monkeypatch, capsys):
    from jax.experimental.compilation_cache import compilation_cache

    shortest = jax.config.jax_persistent_cache_min_compile_time_secs
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        compilation_cache.reset_cache()
        compile_in_block(0.7213)
        new = capsys.readouterr().err.splitlines()
        compile_in_block(0.7213)
        cached = capsys.readouterr().err.splitlines()
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
    assert new == ["compiling the training step", "compiled the training step in 0:00"]
    assert cached == ["compiling the training step", "loaded the training step from the compilation cache in 0:00"]


def test_a_step_that_is_ready_at_once_is_not_mentioned_again(capsys):
    with compilation.compiling(ProgressLine("run")):
        pass
    assert capsys.readouterr().err == "compiling the training step\n"


def test_the_first_evaluation_is_announced_and_its_compiling_is_no_pace(every_line, monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock(steps=100, budget_minutes=0.0, log_every=10)
    clock.read(0)
    clock.start_estimate()
    clock.read(10)
    with compilation.evaluating(ProgressLine("run"), clock, begins=True):
        jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", 30.0)
        now[0] += 30 + 2
    assert capsys.readouterr().err.splitlines() == ["compiling the evaluation", "compiled the evaluation in 0:30"]
    assert clock.remaining == pytest.approx(2 * 9)
    with compilation.evaluating(ProgressLine("run"), clock, begins=False):
        now[0] += 1
    assert clock.remaining == pytest.approx(3 * 9) and not capsys.readouterr().err
