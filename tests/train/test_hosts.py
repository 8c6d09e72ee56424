"""Runs of several real processes, started as on several hosts; all on this machine, connected by gloo."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import RECIPE, ROOT, TINY, environment

from bert_jax.train import metrics
from bert_jax.train.workdir import latest_step, read_params

pytestmark = pytest.mark.slow

STEPS, SAVE_EVERY = 40, 5
WAIT = 240  # seconds; no run here takes as long, even on a busy machine


class Started:
    """The processes of one run; what each prints goes to files."""

    def __init__(
        self, name: str, arguments: list[str], count: int, devices: int | tuple[int, ...], out: Path,
        *more: list[str], programs: Sequence[list[str]] = (),
    ) -> None:  # fmt: skip
        counts = devices if isinstance(devices, tuple) else (devices,) * count
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        self._out = out
        self.processes = []
        for process in range(count):
            several = [
                f"--coordinator_address=127.0.0.1:{port}", f"--num_processes={count}", f"--process_id={process}",
                "--startup_timeout=120",
            ]  # fmt: skip
            program = programs[process] if programs else [sys.executable, "-m", "bert_jax", name]
            command = [*program, *arguments, *(several if count > 1 else [])]
            command += more[process] if more else []
            with (out / f"{process}.out").open("w") as stdout, (out / f"{process}.err").open("w") as stderr:
                variables = environment(counts[process])
                started = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=stdout, stderr=stderr)
            self.processes.append(started)

    def codes(self) -> list[int]:
        until = time.monotonic() + WAIT
        try:
            return [process.wait(max(until - time.monotonic(), 1)) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()

    def errors(self, process: int) -> str:
        return (self._out / f"{process}.err").read_text()

    def printed(self, process: int) -> list[str]:
        """The JSON lines that a process printed, without what gloo's threads write before them."""
        lines = (self._out / f"{process}.out").read_text().splitlines()
        return [line[line.index("{") :] for line in lines if "{" in line]

    def all_well(self) -> "Started":
        assert self.codes() == [0] * len(self.processes), [self.errors(n) for n in range(len(self.processes))]
        return self


@pytest.fixture(scope="module")
def shards(shards_dir) -> Path:
    return shards_dir


def recipe(shards: Path, workdir: Path, *overrides: str) -> list[str]:
    return [
        f"--config={RECIPE}",
        f"--workdir={workdir}",
        f"--config.data.train={shards}",
        *TINY,
        "--config.batch_size=16",
        f"--config.steps={STEPS}",
        "--config.log_every=4",
        f"--config.checkpoint.every_steps={SAVE_EVERY}",
        "--config.checkpoint.keep=0",
        "--config.optimizer.schedule.warmup_steps=4",
        *overrides,
    ]


@pytest.fixture(scope="module")
def alone(shards, tmp_path_factory) -> Path:
    """The workdir of one process with four devices."""
    folder = tmp_path_factory.mktemp("alone")
    Started("pretrain", recipe(shards, folder / "run"), 1, 4, folder).all_well()
    return folder / "run"


def wait_for(started: Started, happened: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT
    while not happened():
        assert time.monotonic() < until and all(process.poll() is None for process in started.processes)
        time.sleep(0.02)


def same_run(workdir: Path, alone: Path) -> None:
    """Logs, result and parameters equal those of one process, as closely as law 4 promises."""
    here, there = metrics.read_metrics(workdir), metrics.read_metrics(alone)
    assert [line["step"] for line in here] == [line["step"] for line in there]
    for mine, wanted in zip(here, there, strict=True):
        for name in ("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "padding_share"):
            assert mine[name] == pytest.approx(wanted[name], rel=1e-6), (mine["step"], name)
    results = [json.loads((folder / "result.json").read_text()) for folder in (workdir, alone)]
    for name in ("step", "tokens", "eval_loss", "eval_mlm_loss", "eval_mlm_accuracy", "eval_nsp_accuracy"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-6), name
    mine, wanted = read_params(workdir), read_params(alone)
    for path, value in wanted.items():
        np.testing.assert_allclose(mine[path], value, rtol=1e-4, atol=1e-6, err_msg=path)


def test_killed_and_stopped_processes_resume_and_train_as_one_process_does(shards, alone, tmp_path):
    """Of two processes, process 1 is killed, then process 0 with the coordinator; SIGTERM to any one then stops both
    on another mesh, and two finish the run."""
    workdir = tmp_path / "run"
    arguments = recipe(shards, workdir)
    for victim in (1, 0):
        saved = latest_step(workdir) or 0
        started = Started("pretrain", arguments, 2, 1, tmp_path)
        wait_for(started, lambda: (latest_step(workdir) or 0) > saved)  # noqa: B023 (called at once)
        started.processes[victim].kill()
        began = time.monotonic()
        codes = started.codes()
        assert time.monotonic() - began < 30
        assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 75
        last = started.errors(1 - victim).splitlines()[-1]
        assert last.startswith("error: ") and last.endswith("un the same command on every host to resume")
    stopped = Started("pretrain", [*arguments, "--config.mesh.fsdp=2"], 2, 2, tmp_path)
    wait_for(stopped, lambda: "layers unrolled, attention" in stopped.errors(0))
    stopped.processes[1].send_signal(signal.SIGTERM)
    assert stopped.codes() == [143, 143]
    assert f"SIGTERM: saved step {latest_step(workdir)} in" in stopped.errors(0)
    assert "pretraining" not in stopped.errors(1) and not stopped.printed(1)
    finished = Started("pretrain", arguments, 2, 2, tmp_path).all_well()
    same_run(workdir, alone)
    last = metrics.read_metrics(workdir)[-1]
    assert all(last[f"{name}_process"] in (0, 1) and last[name] >= 0 for name in metrics.OF_HOSTS)
    [printed] = finished.printed(0)
    assert json.loads(printed)["step"] == STEPS and not finished.printed(1)


# An extension for each process. In a TPU slice, a host's chips form a square of the torus, and the mesh runs along the
# torus: here, too, neighbors on the mesh are devices of different processes, also on the axis fsdp.
ALTERNATING = """
import sys
import numpy as np
from jax.experimental import mesh_utils
from bert_jax.train import sharding

in_order, local_rows = mesh_utils.create_device_mesh, sharding.local_rows

def alternate(*arguments, **options):
    grid = in_order(*arguments, **options)
    return grid.reshape(2, -1).T.reshape(grid.shape)

def noted(*arguments, **options):
    rows = local_rows(*arguments, **options)
    print("rows", "contiguous" if isinstance(rows, slice) else rows.tolist(), file=sys.stderr)
    return rows

mesh_utils.create_device_mesh, sharding.local_rows = alternate, noted
"""


@pytest.mark.parametrize(("fsdp", "begun"), [(1, 0), (2, 20)])
def test_processes_whose_rows_are_not_contiguous_train_as_one_process_does(fsdp, begun, shards, alone, tmp_path):
    """From the start, or from a checkpoint of one process."""
    if begun:
        shutil.copytree(alone, tmp_path / "run")
        for folder in (tmp_path / "run" / "checkpoints").iterdir():
            if folder.name.isdecimal() and int(folder.name) > begun:
                shutil.rmtree(folder)
    (tmp_path / "alternating.py").write_text(ALTERNATING)
    arguments = ["--import", str(tmp_path / "alternating.py"), *recipe(shards, tmp_path / "run")]
    started = Started("pretrain", [*arguments, f"--config.mesh.fsdp={fsdp}"], 2, 4, tmp_path).all_well()
    assert ("resuming from" in started.errors(0)) == bool(begun)
    for process in (0, 1):
        # Two rows for each of eight devices, in turns.
        rows = [row for row in range(16) if row // 2 % 2 == process]
        assert f"rows {rows}" in started.errors(process) and "contiguous" not in started.errors(process)
    same_run(tmp_path / "run", alone)


def test_hosts_with_different_numbers_of_devices_are_refused_in_a_line(shards, tmp_path):
    started = Started("pretrain", recipe(shards, tmp_path / "run"), 2, (4, 2), tmp_path)
    assert started.codes() == [2, 2]
    for process in (0, 1):
        assert "the processes have different numbers of devices" in started.errors(process).splitlines()[-1]
    assert latest_step(tmp_path / "run") is None


# Runs the command with an evaluation that takes long.
EVALUATING_SLOWLY = """
import sys, time
from bert_jax.data.loader import DatasetLoader

batches = DatasetLoader.evaluation_batches

def slow(*arguments, **keywords):
    for batch in batches(*arguments, **keywords):
        time.sleep(2)
        print("one more batch", file=sys.stderr, flush=True)
        yield batch

DatasetLoader.evaluation_batches = slow
from bert_jax import command_line
from bert_jax.commands import pretrain
command_line.run(lambda arguments: pretrain.main(arguments[1:]))
"""


def test_sigterm_ends_an_evaluation_of_two_processes_which_is_repeated(shards, tmp_path):
    arguments = recipe(shards, tmp_path / "run", "--config.steps=7", "--config.eval.every_steps=7")
    programs = [[sys.executable, "-c", EVALUATING_SLOWLY, "pretrain"]] * 2
    started = Started("pretrain", arguments, 2, 1, tmp_path, programs=programs)
    wait_for(started, lambda: "one more batch" in started.errors(0))
    started.processes[1].send_signal(signal.SIGTERM)
    assert started.codes() == [143, 143]
    assert 1 < started.errors(0).count("one more batch") < 8  # of 10 batches
    assert started.errors(0).count("one more batch") - started.errors(1).count("one more batch") in (-1, 0, 1)
    assert f"SIGTERM: saved step 7 in {tmp_path / 'run'}" in started.errors(0)
    Started("pretrain", arguments, 2, 1, tmp_path).all_well()
    lines = metrics.read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [4, 7] and "eval_loss" in lines[-1]


def test_a_damaged_newest_checkpoint_ends_both_processes_and_is_moved(shards, alone, tmp_path):
    shutil.copytree(alone, tmp_path / "run")
    steps = tmp_path / "run" / "checkpoints"
    for part in (steps / str(STEPS) / "params").rglob("d/*"):
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    started = Started("pretrain", recipe(shards, tmp_path / "run"), 2, 1, tmp_path)
    assert started.codes() == [75, 75]
    for process in (0, 1):
        assert f"checkpoint {steps / str(STEPS)} is damaged and was moved" in started.errors(process).splitlines()[-1]
    assert latest_step(tmp_path / "run") == STEPS - SAVE_EVERY


def test_evaluation_by_two_processes_equals_that_of_one(shards, alone, tmp_path):
    result = json.loads((alone / "result.json").read_text())
    started = Started("evaluate", [f"--checkpoint={alone}", f"--data={shards}"], 2, 1, tmp_path).all_well()
    [printed] = started.printed(0)
    assert not started.printed(1)
    for name in ("loss", "mlm_loss", "mlm_accuracy", "nsp_accuracy"):
        assert json.loads(printed)[name] == pytest.approx(result[f"eval_{name}"], rel=1e-6)


def test_two_processes_fine_tune_seeds_and_keep_the_best(alone, tmp_path):
    (tmp_path / "train.tsv").write_text("text\tlabel\n" + "a good book\tgood\na bad book\tbad\n" * 8)
    files = [f"--config.task.{split}={tmp_path / 'train.tsv'}" for split in ("train", "dev")]
    arguments = [
        f"--config={ROOT / 'configs' / 'own.py'}", *files, "--config.task.text=text", "--config.task.label=label",
        f"--config.init_from={alone}", "--config.task=classification", "--config.task.max_length=16",
        "--config.batch_size=8", "--config.steps=3", "--config.seeds=0,1",
    ]  # fmt: skip
    for name, count, devices in (("one", 1, 2), ("two", 2, 1)):
        Started("finetune", [*arguments, f"--workdir={tmp_path / name}"], count, devices, tmp_path).all_well()
    one, two = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two"))
    for name, wanted in one["metrics"].items():
        assert two["metrics"][name]["values"] == pytest.approx(wanted["values"], rel=1e-5), name
    one, two = (read_params(tmp_path / name) for name in ("one", "two"))
    for path, value in one.items():
        np.testing.assert_allclose(two[path], value, rtol=1e-4, atol=1e-6, err_msg=path)


def test_processes_with_different_flags_are_refused_and_write_nothing(shards, tmp_path):
    other = [[], ["--config.optimizer.learning_rate=0.5", "--config.model.remat=layer"]]
    started = Started("pretrain", recipe(shards, tmp_path / "run"), 2, 1, tmp_path, *other)
    assert started.codes() == [2, 2]
    for process in (0, 1):
        last = started.errors(process).splitlines()[-1]
        differing = "model.remat: none there, layer here; optimizer.learning_rate: 0.001 there, 0.5 here"
        assert f"process 1 differs from process 0 ({differing})" in last
    assert latest_step(tmp_path / "run") is None


def test_a_workdir_that_hosts_do_not_share_is_refused(shards, tmp_path):
    apart = [["--workdir", str(tmp_path / "first")], ["--workdir", str(tmp_path / "second")]]
    started = Started("pretrain", recipe(shards, tmp_path / "first"), 2, 1, tmp_path, *apart)
    assert started.codes() == [2, 2]
    assert "name a --workdir on a file system that all hosts share" in started.errors(0).splitlines()[-1]


def test_processes_that_do_not_connect_end_with_one_line_in_bounded_time(shards, tmp_path):
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    where = [f"--coordinator_address={address}", "--num_processes=2", "--startup_timeout=1"]
    for process in (0, 1):
        command = [sys.executable, "-m", "bert_jax", "pretrain", *recipe(shards, tmp_path / "run"), *where]
        command.append(f"--process_id={process}")
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT, check=False)
        assert ended.returncode == 2 and ended.stderr.count("\n") == 1
        assert "cannot connect within 1 s (DEADLINE_EXCEEDED" in ended.stderr
    assert not (tmp_path / "run").exists()
