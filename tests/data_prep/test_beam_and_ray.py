"""The engines beam and ray: the same output as the local engine's, also after they were stopped or lost workers."""

import importlib.util
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from building import (
    ROOT,
    begin,
    build_here,
    command_line,
    contents,
    end,
    finished_units,
    wait_for,
    with_engine,
)

from bert_jax import command_line as command
from bert_jax.errors import UserError
from data_prep.build import build
from data_prep.build_options import BuildOptions

pytestmark = pytest.mark.slow
BEAM, RAY = (
    pytest.param(
        engine,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(package) is None, reason=f"needs the extra: pip install '.[{engine}]'"
        ),
    )
    for engine, package in (("beam", "apache_beam"), ("ray", "ray"))
)
with_beam = pytest.mark.parametrize("arguments", [BEAM], indirect=True)
with_ray = pytest.mark.parametrize("arguments", [RAY], indirect=True)


@pytest.fixture(scope="module")
def by_local(corpus: Path, vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_here(corpus, vocab_dir, tmp_path_factory.mktemp("local"))


@pytest.fixture
def arguments(request: pytest.FixtureRequest, corpus: Path, vocab_dir: Path, tmp_path: Path) -> dict:
    """The arguments for the output of by_local, by two workers of an engine that the job starts."""
    return with_engine(request.param, corpus, vocab_dir, tmp_path)


def test_the_options_of_the_dataflow_script_are_those_of_beam() -> None:
    options = pytest.importorskip("apache_beam.options.pipeline_options").PipelineOptions([])
    script = (ROOT / "deploy" / "dataflow.sh").read_text()
    names = re.findall(r"--(\w+)=", "".join(re.findall(r'^options\+?="(.*)"$', script, re.MULTILINE)))
    assert len(names) == 8 and set(names) <= set(options.get_all_options())


@with_beam
def test_one_process_of_beam_gives_the_local_shards(arguments: dict, by_local: Path) -> None:
    build(BuildOptions(**arguments | {"workers": 1, "engine_options": "--runner=DirectRunner"}))
    assert contents(arguments["output"]) == contents(by_local)


@with_beam
def test_a_stopped_and_killed_job_of_beam_resumes_and_writes_the_same_bytes(arguments: dict, by_local: Path) -> None:
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


@with_beam
def test_failures_of_beam_are_one_line(arguments: dict, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the Beam pipeline failed \(.*NoRunner.*\); the units finished so far"):
        build(BuildOptions(**arguments | {"engine_options": "--runner=NoRunner"}))
    limited = ["bash", "-c", 'ulimit -f 100; exec "$@"', "bash", *command_line(arguments)]
    ended = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == command.EXIT_USER_ERROR
    assert "exceeds the file-size limit" in ended.stderr.strip().splitlines()[-1]
    assert not arguments["output"].exists()


def busy_workers(process: psutil.Process) -> list[psutil.Process]:
    """The processes below one that do a unit now; Ray gives them the task's name."""
    return [child for child in process.children(recursive=True) if "ray::_do" in str(child.cmdline())]


@with_ray
def test_a_stopped_job_resumes_survives_a_killed_worker_and_writes_the_same_shards(
    arguments: dict, by_local: Path
) -> None:
    process = begin(arguments)
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    status, told = end(process)
    assert status == command.EXIT_STOPPED and "out.incomplete; run the same command again" in told
    wait_for(lambda: not any(child.is_running() for child in children), 20)

    process = begin(arguments | {"workers": 1})
    os.killpg(process.pid, signal.SIGINT)
    assert end(process) == (130, "interrupted")

    process = begin(arguments)
    finished = finished_units(arguments["output"])
    victims: list[psutil.Process] = []
    wait_for(lambda: bool(victims.extend(busy_workers(psutil.Process(process.pid))) or victims))
    victims[0].kill()
    assert end(process)[0] == 0 and finished
    assert contents(arguments["output"]) == contents(by_local)


@pytest.fixture
def two_nodes() -> Iterator[tuple[str, psutil.Process]]:
    """The address of a cluster of two nodes with one core each, and the second one's raylet."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=1)
        (raylet,) = node.all_processes["raylet"]
        yield cluster.address, psutil.Process(raylet.process.pid)
    finally:
        cluster.shutdown()


@with_ray
def test_job_survives_the_loss_of_a_node(arguments: dict, by_local: Path, two_nodes) -> None:
    address, raylet = two_nodes
    process = begin(arguments | {"workers": 0, "engine_options": f"--address={address}"})
    try:
        victims: list[psutil.Process] = []
        wait_for(lambda: bool(victims.extend(busy_workers(raylet)) or victims))
        left = finished_units(arguments["output"])
        for each in [raylet, *raylet.children(recursive=True)]:
            each.kill()
        assert process.poll() is None and not arguments["output"].exists()
        assert end(process)[0] == 0 and left
    finally:
        process.kill()
    assert contents(arguments["output"]) == contents(by_local)


@with_ray
def test_a_missing_cluster_is_reported_in_one_line(arguments: dict) -> None:
    with pytest.raises(UserError, match=r"cannot reach a Ray cluster at 127\.0\.0\.1:1: .*refused"):
        build(BuildOptions(**arguments | {"engine_options": "--address=127.0.0.1:1"}))
    with pytest.raises(UserError, match="unrecognized arguments: --adress"):
        build(BuildOptions(**arguments | {"engine_options": "--adress=auto"}))
