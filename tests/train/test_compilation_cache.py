import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from tiny_runs import RECIPE, ROOT, TINY, environment

import bert_jax
from bert_jax.commands import embed, evaluate, features, fill_mask, predict, report
from bert_jax.errors import UserError
from bert_jax.train import compilation

# Prints how many programs jax compiled and how many it asked its cache for, after the command has ended.
COUNTING = """
import collections, sys, jax
from bert_jax import pretraining
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.rpartition("/")[2]]))
pretraining.main(sys.argv[1:])
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
