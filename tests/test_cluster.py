import argparse

import pytest

from bert_jax.command import UserError
from bert_jax.train import cluster
from bert_jax.train.cluster import Cluster


def flags(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cluster.add_flags(parser)
    return parser.parse_args(arguments)


EXPLICIT = ("--coordinator_address=10.0.0.2:8476", "--num_processes=4", "--process_id=3")
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


def test_one_machine_is_one_process():
    assert cluster.find(flags(), {}) is None
    assert cluster.find(flags("--num_processes=1"), {"JAX_COORDINATOR_ADDRESS": "10.0.0.2:1"}) is None


def test_flags_come_before_the_environment():
    environment = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    assert cluster.find(flags(), environment) == Cluster("host:1", 2, 0)
    assert cluster.find(flags("--process_id=1"), environment) == Cluster("host:1", 2, 1)
    found = cluster.find(flags(*EXPLICIT), environment)
    assert found == Cluster("10.0.0.2:8476", 4, 3) and (found.host, found.port) == ("10.0.0.2", 8476)


def test_an_address_of_ip_6_is_read():
    found = cluster.find(flags("--coordinator_address=[fd00::1]:8476", *EXPLICIT[1:]), {})
    assert found is not None and (found.host, found.port) == ("fd00::1", 8476)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        (SLURM, Cluster("node003:61452", 2, 1, (0,))),  # the port follows from the job's number
        (OPEN_MPI, Cluster("10.96.0.1:62624", 3, 2, (1,))),
    ],
)
def test_a_scheduler_is_found_as_jax_finds_it(monkeypatch, environment, wanted):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cluster.find(flags()) == wanted
    assert cluster.find(flags("--num_processes=1")) is None


def test_a_scheduler_with_one_task_is_one_process(monkeypatch):
    for name, value in (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}).items():
        monkeypatch.setenv(name, value)
    assert cluster.find(flags()) is None


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (EXPLICIT[:1], {}, "--num_processes and --process_id must be given too"),
        (EXPLICIT[1:], {}, "--coordinator_address must be given too, or JAX_COORDINATOR_ADDRESS"),
        ((), {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES is 'two'; give a number"),
        (("--coordinator_address=host", *EXPLICIT[1:]), {}, "'host'; give HOST:PORT, as"),
        (("--coordinator_address=host:99999", *EXPLICIT[1:]), {}, "give HOST:PORT"),
        ((*EXPLICIT[:2], "--process_id=4"), {}, "--process_id is 4 with --num_processes=4; give 0 to 3, each once"),
        ((*EXPLICIT[:1], "--num_processes=0", "--process_id=0"), {}, "--num_processes is 0; give 1 or more"),
        ((*EXPLICIT, "--startup_timeout=0"), {}, "--startup_timeout is 0; give a number of seconds above 0"),
        ((*EXPLICIT, "--heartbeat_timeout=-1"), {}, "--heartbeat_timeout is -1"),
    ],
)
def test_a_mistake_is_one_line(arguments, environment, said):
    with pytest.raises(UserError, match=said) as caught:
        cluster.find(flags(*arguments), environment)
    assert "\n" not in str(caught.value)
