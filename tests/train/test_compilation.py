"""Compilation: the cache on disk, what is reported while a program compiles, and later shapes compiled in threads."""

import logging
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import RECIPE, ROOT, TINY, environment

import bert_jax
from bert_jax.commands import embed, evaluate, features, fill_mask, predict, report, score
from bert_jax.config import MeshConfig
from bert_jax.errors import UserError
from bert_jax.train import compilation, sharding
from bert_jax.train.clock import Clock
from bert_jax.train.compilation import CompilingAhead, later_batch_shapes
from bert_jax.train.metrics import ProgressLine
from bert_jax.train.run import Source
from bert_jax.train.step import TrainState

# Prints how many programs jax compiled and how many it asked its cache for, after the command has ended.
COUNTING = """
import collections, sys, jax
from bert_jax.commands import pretrain
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.rpartition("/")[2]]))
pretrain.main(sys.argv[1:])
asked = counts["compile_requests_use_cache"]
print("compiled", asked - counts["cache_hits"], asked)
"""


@pytest.fixture(autouse=True)
def cache_of_the_tests():
    folder = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", folder)


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """Neither the environment nor a program has set jax's folder."""
    monkeypatch.delenv(compilation.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.mark.usefixtures("unset")
def test_programs_are_kept_in_the_user_s_cache(tmp_path):
    assert compilation.enable_compilation_cache() == tmp_path / "bert_jax" / "programs"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "bert_jax" / "programs")


@pytest.mark.usefixtures("unset")
def test_programs_of_a_workdir_in_a_bucket_are_kept_in_the_bucket():
    assert str(compilation.enable_compilation_cache("gs://bucket/a/run")) == "gs://bucket/bert_jax/programs"
    assert jax.config.jax_compilation_cache_dir == "gs://bucket/bert_jax/programs"


@pytest.mark.parametrize("value", ["", "gs://bucket/programs"])
def test_jax_s_own_variable_decides_where_it_is_set(monkeypatch, value):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv(compilation.VARIABLE, value)
    assert compilation.enable_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir == before


@pytest.mark.usefixtures("unset")
def test_a_cache_that_cannot_be_made_is_done_without(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compilation.enable_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.usefixtures("unset")
def test_a_folder_that_a_program_gave_jax_is_left(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    with pytest.raises(UserError, match="no checkpoint at"):
        bert_jax.load(tmp_path / "none")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")


CHECKPOINT = ("--checkpoint", "/none")
STARTS: dict[str, Callable[[], object]] = {
    "predict": lambda: predict.main([*CHECKPOINT, "--input", "/none.txt"]),
    "embed": lambda: embed.main([*CHECKPOINT, "--input", "/none.txt", "--output", "/none.npz"]),
    "evaluate": lambda: evaluate.main([*CHECKPOINT, "--data", "/none"]),
    "fill_mask": lambda: fill_mask.main([*CHECKPOINT, "a [MASK]"]),
    "score": lambda: score.main([*CHECKPOINT, "--input", __file__]),
    "report": lambda: report.main(["/none"]),
    "features": lambda: features.main([*CHECKPOINT, "--config", "tagging:task=conll2003"]),
    "bert_jax.load": lambda: bert_jax.load(Path("/none")),
    "bert_jax.finetune": lambda: bert_jax.finetune(Path("/none"), "/none.tsv", text="text", label="label"),
    "bert_jax.pretrain": lambda: bert_jax.pretrain("bert_tiny", "/none"),
}


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("name", STARTS)
def test_what_runs_a_model_keeps_its_programs(name, tmp_path):
    with pytest.raises(UserError):  # nothing that it names is there
        STARTS[name]()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "bert_jax" / "programs")


def start_two_processes(shards: Path, workdir: Path, homes: list[Path]) -> list[tuple[int, int]]:
    """Trains with two processes, each with its home directory; returns (programs compiled, programs run) of each."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    started = []
    for process, home in enumerate(homes):
        several = (f"--coordinator_address=127.0.0.1:{port}", "--num_processes=2", f"--process_id={process}")
        arguments = [f"--config={RECIPE}", f"--workdir={workdir}", f"--config.data.train={shards}", *TINY, *several]
        arguments += ["--config.batch_size=8", "--config.steps=2", "--config.eval.max_rows=8"]
        changed = {"XDG_CACHE_HOME": str(home), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        variables = {name: value for name, value in environment(1).items() if name != compilation.VARIABLE}
        command = [sys.executable, "-c", COUNTING, *arguments]
        started.append(
            subprocess.Popen(command, cwd=ROOT, env=variables | changed, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
    found = []
    for each in started:
        printed, errors = each.communicate(timeout=240)
        assert each.returncode == 0, errors.decode()[-2000:]
        words = printed.decode().rpartition("compiled")[2].split()
        found.append((int(words[0]), int(words[1])))
    return found


@pytest.mark.slow
def test_a_second_start_on_hosts_with_separate_homes_compiles_nothing(shards_dir, tmp_path):
    homes = [tmp_path / "home-0", tmp_path / "home-1"]
    first = start_two_processes(shards_dir, tmp_path / "first", homes)
    assert all(compiled >= 4 for compiled, _ in first), first
    second = start_two_processes(shards_dir, tmp_path / "second", homes)
    assert [compiled for compiled, _ in second] == [0, 0] and all(asked >= 4 for _, asked in second), second
    assert not list(tmp_path.rglob("*.mark"))
    # In one home, process 0 alone writes: programs for devices of process 1 are not there.
    of_process_1 = programs(homes[1]) - programs(homes[0])
    start_two_processes(shards_dir, tmp_path / "third", [tmp_path / "shared"] * 2)
    assert of_process_1 - programs(tmp_path / "shared")


def programs(home: Path) -> set[str]:
    return {path.name for path in (home / "bert_jax" / "programs").glob("*-cache")}


# What a run says about the compilation of its first step and of its first evaluation.


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
    assert new[0] == cached[0] == "compiling the training step" and len(new) == len(cached) == 2
    assert re.fullmatch(r"compiled the training step in 0:\d\d", new[1])
    assert re.fullmatch(r"loaded the training step from the compilation cache in 0:\d\d", cached[1])


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


# Programs for later batches: compiled while a run trains, once each, and their errors are not lost.


MESH = sharding.make_mesh(MeshConfig())


class Batch(NamedTuple):
    input_ids: Any


def step(state: TrainState, batch: Batch, fraction: Any, key: jax.Array) -> tuple[TrainState, jax.Array]:
    if batch.input_ids.shape[1] == 7:
        raise ValueError("no room for rows of 7")
    return state._replace(step=state.step + 1), batch.input_ids.sum() + fraction


def batch_of(length: int) -> Batch:
    return Batch(jax.device_put(np.ones((8, length), np.int32), sharding.rows_sharding(MESH)))


def start(lengths: list[int], lines: list[str]) -> tuple[Any, TrainState, jax.Array, CompilingAhead]:
    whole = sharding.replicated(MESH)
    zero = np.zeros((), np.int32)
    state = jax.device_put(TrainState(zero, {"w": np.ones(3, np.float32)}, (), None, zero), whole)
    key = jax.device_put(jax.random.key(0), whole)
    jitted = jax.jit(step, donate_argnums=0)
    later = {
        number: Batch(jax.ShapeDtypeStruct((8, length), jnp.int32, sharding=sharding.rows_sharding(MESH)))
        for number, length in enumerate(lengths, 1)
    }
    return jitted, state, key, CompilingAhead(jitted, state, later, (key,), MESH, lines.append)


def test_each_shape_is_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []
    jax.config.update("jax_log_compiles", True)
    try:
        with jax.set_mesh(MESH), caplog.at_level(logging.WARNING):
            jitted, state, key, ahead = start([5, 6], lines)
            with ahead:
                for length in (4, 6, 5, 6, 4):
                    ahead.wait_for(batch_of(length))
                    state, found = jitted(state, batch_of(length), np.float32(0), key)
                    assert found == 8 * length
    finally:
        jax.config.update("jax_log_compiles", False)
    messages = [record.getMessage() for record in caplog.records]
    for what in ("Compiling jit(step)", "Finished XLA compilation of jit(step)"):  # jax lowers it, and XLA compiles it
        assert sum(what in message for message in messages) == 3, what
    assert state.step == 5
    assert lines == [f"compiling for step {n}: batches of 8 rows of {n + 4} positions" for n in (1, 2)]


def test_a_program_that_does_not_compile_ends_the_run_before_its_first_batch() -> None:
    with jax.set_mesh(MESH):
        *_, ahead = start([7], [])
        with ahead, pytest.raises(ValueError, match="no room for rows of 7"):
            ahead.wait_for(batch_of(7))
        *_, ahead = start([7], [])
        with ahead, pytest.raises(ValueError, match="no room for rows of 7"):
            while True:
                ahead.wait_for(batch_of(4))


def test_a_finished_run_has_no_later_shapes() -> None:
    assert later_batch_shapes(Mock(spec=Source), 300, 300, MESH, (3, 7)) == {}
