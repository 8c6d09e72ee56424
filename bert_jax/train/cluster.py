"""Finds which process of how many this one is, and where process 0 is, from flags and environment."""

import argparse
import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from bert_jax.command import UserError

STARTUP_TIMEOUT = 300.0  # jax.distributed.initialize's own; pods of a scheduler start minutes apart
HEARTBEAT_TIMEOUT = 100.0  # the same
_TASK_COUNTS = ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")  # in the environment of a task


@dataclass(frozen=True)
class Cluster:
    """The place of this process in a run, as flags and environment give it; jax asks the scheduler for what is None."""

    coordinator_address: str | None = None  # HOST:PORT of process 0
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: tuple[int, ...] | None = None  # the GPUs of this process on its machine; None: all

    @property
    def complete(self) -> bool:
        """Whether flags and environment give everything."""
        return None not in (self.coordinator_address, self.num_processes, self.process_id)

    @property
    def host(self) -> str:
        return (self.coordinator_address or "").rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port of process 0; 0 where the address has none."""
        port = (self.coordinator_address or "").rpartition(":")[2]
        return int(port) if port.isdecimal() else 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a run of several processes."""
    several = parser.add_argument_group("several processes (detected on TPU pods, Slurm, Open MPI and GKE)")
    several.add_argument("--coordinator_address", default="", metavar="HOST:PORT", help="the address of process 0")
    several.add_argument("--num_processes", type=int, metavar="N", help="the number of processes; 1: only this one")
    several.add_argument("--process_id", type=int, metavar="I", help="the number of this process, from 0")
    several.add_argument(
        "--startup_timeout",
        type=float,
        default=STARTUP_TIMEOUT,
        metavar="SECONDS",
        help=f"how long processes wait for each other at startup (default: {STARTUP_TIMEOUT:g})",
    )
    several.add_argument(
        "--heartbeat_timeout",
        type=float,
        default=HEARTBEAT_TIMEOUT,
        metavar="SECONDS",
        help=f"how long a process may be silent before it counts as lost (default: {HEARTBEAT_TIMEOUT:g})",
    )


def find(flags: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Cluster | None:
    """Returns what flags, JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID give, or None for one process.

    What they leave open, jax.distributed.initialize asks the scheduler for. Where they give everything, a task that
    shares its machine with others takes the GPU with its number there, as jax would choose, unless it has GPUs of its
    own. Raises UserError for impossible values.
    """
    for name in ("startup_timeout", "heartbeat_timeout"):
        if not getattr(flags, name) > 0:
            raise UserError(f"--{name} is {getattr(flags, name):g}; expected a number of seconds above 0")
    address = flags.coordinator_address or environment.get("JAX_COORDINATOR_ADDRESS") or None
    count = _number("num_processes", flags.num_processes, environment)
    process = _number("process_id", flags.process_id, environment)
    # A scheduler's only task is one process, and needs no coordinator.
    of_scheduler = {environment[name] for name in _TASK_COUNTS if name in environment}
    if count == 1 or (address is count is process is None and of_scheduler == {"1"}):
        return None
    cluster = Cluster(address, count, process)
    if not cluster.complete:
        return cluster
    _check(cluster)
    return dataclasses.replace(cluster, local_device_ids=_local_device_ids(environment))


def describe_failure(cluster: Cluster, error: Exception) -> str:
    """Returns the message for a run whose processes jax could not connect."""
    given = {
        "coordinator_address": cluster.coordinator_address,
        "num_processes": cluster.num_processes,
        "process_id": cluster.process_id,
    }
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if missing and "defined" in str(error):
        return (
            f"{' and '.join(missing)} must be given too, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
            "JAX_PROCESS_ID: jax finds no scheduler that knows them"
        )
    return (
        f"jax cannot connect the processes of this run ({type(error).__name__}: {error}). Give --coordinator_address, "
        "--num_processes and --process_id, or --num_processes=1 to run this process alone"
    )


def _local_device_ids(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Returns the GPU of a task that sees those of all tasks on its machine, one for each; None: all that it sees."""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environment:
        number, tasks = environment["OMPI_COMM_WORLD_LOCAL_RANK"], int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"])
    else:
        number, tasks = environment.get("SLURM_LOCALID", "0"), _slurm_tasks(environment)
    if tasks < 2 or environment.get("JAX_LOCAL_DEVICE_IDS"):  # which jax reads
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    own = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]  # the number in TYPE:NUMBER
    if not visible:
        return None if own else (int(number),)
    # --gpu-bind=none shows a task of one GPU those of the others, too.
    return (int(number),) if own in ("", "1") and len(visible.split(",")) == tasks else None


def _slurm_tasks(environment: Mapping[str, str]) -> int:
    """Returns the number of tasks on this node: of `2(x3),1`, 2 on nodes 0 to 2 and 1 on node 3; 0: unknown."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    by_node = [int(tasks) for tasks, nodes in counts for _ in range(int(nodes or 1))]
    node = int(environment.get("SLURM_NODEID", 0))
    return by_node[node] if node < len(by_node) else 0


def _number(name: str, flag: int | None, environment: Mapping[str, str]) -> int | None:
    variable = f"JAX_{name.upper()}"
    if flag is not None or variable not in environment:
        return flag
    try:
        return int(environment[variable])
    except ValueError:
        raise UserError(f"{variable} is {environment[variable]!r}; expected a number, or give --{name}") from None


def _check(cluster: Cluster) -> None:
    count, process = cluster.num_processes or 0, cluster.process_id or 0
    if not cluster.host or not 0 < cluster.port < 1 << 16:
        raise UserError(
            f"--coordinator_address is {cluster.coordinator_address!r}; expected HOST:PORT of process 0, such as "
            "10.0.0.2:8476"
        )
    if count <= 0:
        raise UserError(f"--num_processes is {count}; expected 1 or more")
    if not 0 <= process < count:
        raise UserError(f"--process_id is {process} with --num_processes={count}; expected 0 to {count - 1}, each once")
