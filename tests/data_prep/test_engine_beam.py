import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from building import ROOT, begin, build_here, check_parts, command_line, contents, end, wait_for, with_engine

from bert_jax import command_line as command
from bert_jax.errors import UserError
from data_prep.build import build
from data_prep.build_options import BuildOptions

pytest.importorskip("apache_beam", reason="needs the extra: pip install '.[beam]'")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def by_local(corpus: Path, vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_here(corpus, vocab_dir, tmp_path_factory.mktemp("local"))


@pytest.fixture
def arguments(corpus: Path, vocab_dir: Path, tmp_path: Path) -> dict:
    """Those of by_local, in a Beam pipeline of two processes."""
    return with_engine("beam", corpus, vocab_dir, tmp_path)


def test_one_process_gives_the_shards_of_the_local_engine(arguments: dict, by_local: Path, tmp_path: Path) -> None:
    exchange = tmp_path / "exchange"
    build(BuildOptions(**arguments | {"workers": 1, "engine_options": f"--exchange={exchange} --runner=DirectRunner"}))
    assert contents(arguments["output"]) == contents(by_local)
    assert not list(exchange.iterdir())


def test_parts_are_those_of_this_machine(corpus: Path, vocab_dir: Path, tmp_path: Path) -> None:
    check_parts("beam", corpus, vocab_dir, tmp_path)


def test_a_stopped_and_killed_job_resumes_and_writes_the_same_bytes(arguments: dict, by_local: Path) -> None:
    """Ctrl-C, then SIGKILL of a worker, then of the main process; each run resumes the one before."""
    process = begin(arguments)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    assert end(process) == (130, "interrupted")
    wait_for(lambda: not any(child.is_running() for child in children), 20)

    process = begin(arguments)
    for child in psutil.Process(process.pid).children(recursive=True):
        if "sdk_worker" in str(child.cmdline()):
            child.kill()
            break
    status, told = end(process)
    assert status == command.EXIT_USER_ERROR and "a worker process was killed" in told

    process = begin(arguments)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(child.is_running() for child in children), 20)
    assert not arguments["output"].exists()

    build(BuildOptions(**arguments))
    assert contents(arguments["output"]) == contents(by_local)


def test_failures_are_one_line(arguments: dict, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the Beam pipeline failed \(.*NoRunner.*\); the units finished so far"):
        build(BuildOptions(**arguments | {"engine_options": "--runner=NoRunner"}))
    limited = ["bash", "-c", 'ulimit -f 100; exec "$@"', "bash", *command_line(arguments)]
    ended = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == command.EXIT_USER_ERROR
    assert "exceeds the file-size limit" in ended.stderr.strip().splitlines()[-1]
    assert not arguments["output"].exists()
