"""Runs of several processes: what flags and environment say, and what a process prints at its end (test_hosts.py)."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from bert_jax.config.options import parse
from bert_jax.errors import UserError
from bert_jax.train import distributed
from bert_jax.train.distributed import Cluster


def test_the_last_line_is_whole_and_last_while_other_threads_write(capfd):
    """The threads write to the descriptor, as C++ does, in pieces without line ends."""
    begun, over = threading.Barrier(5), threading.Event()

    def write() -> None:
        begun.wait()
        while not over.wait(0.001):
            os.write(2, b'grpc_message:"Socket closed" ')

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    over.wait(0.02)
    distributed.print_last("error: process 1 of 2 has stopped", begun_by_others=True)
    over.wait(0.05)
    over.set()
    for thread in threads:
        thread.join()
    *before, last = capfd.readouterr().err.removesuffix("\n").split("\n")
    assert last == "error: process 1 of 2 has stopped" and "Socket closed" in "".join(before)


def test_a_process_that_may_open_no_more_files_prints_its_last_line(capfd, monkeypatch):
    def refuse(_: int) -> int:
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", refuse)
        distributed.print_last("interrupted")
    assert capfd.readouterr().err == "interrupted\n"


# The place of a process in a run, from flags and environment.


def flags(*arguments: str) -> distributed.ProcessOptions:
    return parse("bert-jax pretrain", "", distributed.ProcessOptions, arguments)


EXPLICIT = ("--coordinator_address=10.0.0.2:8476", "--num_processes=4", "--process_id=3")
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
TWO_TASKS = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_LOCALID": "1"}
EIGHT_GPUS = {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


def test_flags_come_before_the_environment_and_an_address_of_ip_6_is_read():
    environment = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    assert distributed.find(flags(), environment) == Cluster("host:1", 2, 0)
    assert distributed.find(flags("--process_id=1"), environment) == Cluster("host:1", 2, 1)
    found = distributed.find(flags(*EXPLICIT), environment)
    assert found == Cluster("10.0.0.2:8476", 4, 3) and (found.host, found.port) == ("10.0.0.2", 8476)
    found = distributed.find(flags("--coordinator_address=[fd00::1]:8476", *EXPLICIT[1:]), {})
    assert found is not None and (found.host, found.port) == ("fd00::1", 8476)


@pytest.mark.parametrize("environment", [{}, SLURM, OPEN_MPI])
def test_what_flags_and_environment_leave_open_is_left_to_the_scheduler(environment):
    found = distributed.find(flags(), environment)
    assert found == Cluster() and not found.complete
    assert distributed.find(flags("--process_id=1"), environment) == Cluster(process_id=1)
    assert distributed.find(flags(*EXPLICIT), environment) == Cluster("10.0.0.2:8476", 4, 3)
    assert distributed.find(flags("--num_processes=1"), environment) is None


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        # Slurm shows all GPUs of a step to its tasks.
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x4)", "SLURM_NODEID": "2", "SLURM_LOCALID": "5"}, (5,)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NODEID": "0"}, (0,)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NODEID": "1"}, ()),
        (SLURM | EIGHT_GPUS | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1"}, ()),
        (TWO_TASKS | EIGHT_GPUS, (4, 5, 6, 7)),
        (TWO_TASKS | {"SLURM_GPUS_ON_NODE": "8"}, (4, 5, 6, 7)),
        # --gpus-per-task shows each task its own, unless there is --gpu-bind=none.
        (TWO_TASKS | EIGHT_GPUS | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ()),
        (TWO_TASKS | {"SLURM_GPUS_PER_TASK": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ()),
        (TWO_TASKS | {"SLURM_GPUS_PER_TASK": "a100:2", "CUDA_VISIBLE_DEVICES": "0,1"}, ()),
        (TWO_TASKS | {"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}, ()),
        (TWO_TASKS | {"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, (1,)),
        (TWO_TASKS | {"SLURM_GPUS_PER_TASK": "1"}, ()),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, (1,)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, (2, 3)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0"}, ()),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "JAX_LOCAL_DEVICE_IDS": "2,3"}, None),
    ],
)
def test_the_tasks_of_a_machine_use_all_its_gpus(environment, devices):
    """Also where jax asks the scheduler for the rest: it would take one GPU for each task."""
    for arguments in (EXPLICIT, ()):
        cluster = distributed.find(flags(*arguments), environment)
        assert cluster is not None and cluster.local_device_ids == devices


@pytest.mark.slow
@pytest.mark.parametrize(("ids", "visible"), [(Cluster().local_device_ids, "all"), (None, "3")])
def test_no_device_ids_are_all_devices_for_jax_and_none_are_one(ids, visible):
    """The only Slurm task on a machine has all of its GPUs."""
    with socket.create_server(("", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    program = (
        f"import jax\njax.distributed.initialize({address!r}, local_device_ids={ids})\n"
        "print(jax.config.read('jax_cuda_visible_devices'))"
    )
    slurm = os.environ | SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "3"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=slurm)
    assert ended.stdout.strip() == visible


def test_tasks_that_cannot_share_the_gpus_of_their_machine_are_refused():
    three = TWO_TASKS | EIGHT_GPUS | {"SLURM_STEP_TASKS_PER_NODE": "3"}
    with pytest.raises(UserError, match="3 tasks on this machine cannot share its 8 GPUs equally; start one task"):
        distributed.find(flags(), three)


SHELL = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}  # of salloc or sbatch


@pytest.mark.parametrize(
    "environment",
    [
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        SHELL,
        SLURM | {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # use_interactive_step
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        SHELL | OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_single_task_and_a_shell_of_a_job_are_one_process(environment):
    assert distributed.find(flags(), environment) is None


def test_tasks_of_mpirun_in_a_shell_of_slurm_are_several_processes():
    assert distributed.find(flags(), SHELL | OPEN_MPI) == Cluster()


def test_a_shell_of_several_nodes_is_told_to_use_srun(monkeypatch, capsys):
    for name, value in (SHELL | {"SLURM_NNODES": "4"}).items():
        monkeypatch.setenv(name, value)
    with distributed.processes(flags()):
        pass
    assert "note: this is one process on one of 4 nodes; srun starts" in capsys.readouterr().err


def test_one_process_needs_no_coordinator():
    assert distributed.find(flags("--num_processes=1"), {"JAX_COORDINATOR_ADDRESS": "10.0.0.2:1"}) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Cluster("10.0.0.2:8476"), "--num_processes and --process_id must be given too, or JAX_COORDINATOR_ADDRESS"),
        (Cluster(None, 4, 3), "--coordinator_address must be given too, or JAX_COORDINATOR_ADDRESS"),
    ],
)
def test_values_that_no_scheduler_provides_are_named(given, message):
    """jax's own words, from an environment without a scheduler; pytest's process has started its devices."""
    program = (
        "import jax, sys\nfrom bert_jax.train import distributed as cluster\n"
        f"given = cluster.{given!r}\n"
        "try: jax.distributed.initialize(given.coordinator_address, given.num_processes, given.process_id)\n"
        "except ValueError as error: print(cluster.describe_failure(given, error))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert message in ended.stdout and ended.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ((), {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES is 'two'; expected a number"),
        (("--coordinator_address=host", *EXPLICIT[1:]), {}, "'host'; expected HOST:PORT of process 0"),
        (("--coordinator_address=host:99999", *EXPLICIT[1:]), {}, "expected HOST:PORT"),
        ((*EXPLICIT[:2], "--process_id=4"), {}, "--process_id is 4 with --num_processes=4; expected 0 to 3, each once"),
        ((*EXPLICIT[:1], "--num_processes=0", "--process_id=0"), {}, "--num_processes is 0; expected 1 or more"),
        ((*EXPLICIT, "--startup_timeout=0"), {}, r"--startup_timeout is 0\.0\. Use a number above 0"),
        ((*EXPLICIT, "--heartbeat_timeout=-1"), {}, "--heartbeat_timeout is -1"),
    ],
)
def test_a_mistake_is_one_line(arguments, environment, said):
    with pytest.raises(UserError, match=said) as caught:
        distributed.find(flags(*arguments), environment)
    assert "\n" not in str(caught.value)


def test_different_numbers_of_devices_are_refused():
    """Of three hosts with eight chips each, one of which has failed."""
    distributed.check_devices({0: 8, 1: 8, 2: 8})
    with pytest.raises(UserError, match=r"different numbers of devices \(process 1 has 7, process 0 8\)"):
        distributed.check_devices({0: 8, 1: 7, 2: 8})
