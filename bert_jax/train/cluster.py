"""Which process of how many this one is, and where process 0 is: by flags, by the environment, or by the scheduler."""

import argparse
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from jax._src.clusters import ClusterEnv  # jax has no public name for what its initialize() finds out

from bert_jax.command import UserError

STARTUP_TIMEOUT = 300.0  # jax.distributed.initialize's own; pods of a scheduler start minutes apart
HEARTBEAT_TIMEOUT = 100.0  # the same


@dataclass(frozen=True)
class Cluster:
    """A run of several processes, and this one's place in it."""

    coordinator_address: str  # HOST:PORT of process 0
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None  # None: all devices of this machine

    @property
    def host(self) -> str:
        return self.coordinator_address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.coordinator_address.rpartition(":")[2])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a run of several processes."""
    several = parser.add_argument_group("several processes (found by itself on TPU pods, Slurm, Open MPI and GKE)")
    several.add_argument("--coordinator_address", default="", metavar="HOST:PORT", help="where process 0 listens")
    several.add_argument("--num_processes", type=int, metavar="N", help="how many there are; 1: this one alone")
    several.add_argument("--process_id", type=int, metavar="I", help="which this is, from 0")
    several.add_argument(
        "--startup_timeout",
        type=float,
        default=STARTUP_TIMEOUT,
        metavar="SECONDS",
        help=f"how long processes wait for each other at the start (default: {STARTUP_TIMEOUT:g})",
    )
    several.add_argument(
        "--heartbeat_timeout",
        type=float,
        default=HEARTBEAT_TIMEOUT,
        metavar="SECONDS",
        help=f"after how long a silence a process counts as dead (default: {HEARTBEAT_TIMEOUT:g})",
    )


def find(flags: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Cluster | None:
    """The run that flags, JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or else the scheduler tell of.

    None for one process. Raises UserError for what is given in part and is nowhere to be found, or makes no sense.
    """
    for name in ("startup_timeout", "heartbeat_timeout"):
        if not getattr(flags, name) > 0:
            raise UserError(f"--{name} is {getattr(flags, name):g}; give a number of seconds above 0")
    address = flags.coordinator_address or environment.get("JAX_COORDINATOR_ADDRESS", "")
    count = _number("num_processes", flags.num_processes, environment)
    process = _number("process_id", flags.process_id, environment)
    if count == 1:
        return None
    local: tuple[int, ...] | None = None
    if not address or count is None or process is None:
        found = _detected(address or None, count, process, flags.startup_timeout)
        if found is None and not address and count is None and process is None:
            return None
        if found is None:
            given = {"coordinator_address": address, "num_processes": count, "process_id": process}
            missing = [f"--{name}" for name, value in given.items() if value in ("", None)]
            raise UserError(
                f"{' and '.join(missing)} must be given too, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
                "JAX_PROCESS_ID: no scheduler is there that tells"
            )
        if found.num_processes == 1:
            return None
        address, count, process, local = (
            found.coordinator_address,
            found.num_processes,
            found.process_id,
            found.local_device_ids,
        )
    cluster = Cluster(address, count, process, local)
    _check(cluster)
    return cluster


def _number(name: str, flag: int | None, environment: Mapping[str, str]) -> int | None:
    variable = f"JAX_{name.upper()}"
    if flag is not None or variable not in environment:
        return flag
    try:
        return int(environment[variable])
    except ValueError:
        raise UserError(f"{variable} is {environment[variable]!r}; give a number, or --{name}") from None


def _check(cluster: Cluster) -> None:
    host, port = cluster.host, cluster.coordinator_address.rpartition(":")[2]
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(
            f"--coordinator_address is {cluster.coordinator_address!r}; give HOST:PORT, as 10.0.0.2:8476, of process 0"
        )
    if not 0 <= cluster.process_id < cluster.num_processes:
        raise UserError(
            f"--process_id is {cluster.process_id} with --num_processes={cluster.num_processes}; "
            f"give 0 to {cluster.num_processes - 1}, each once"
            if cluster.num_processes > 0
            else f"--num_processes is {cluster.num_processes}; give 1 or more"
        )


def _detected(address: str | None, count: int | None, process: int | None, timeout: float) -> Cluster | None:
    """What jax finds out of its schedulers for what is None; None where there is none of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in a pod of Kubernetes without its package: a page on how to install that
        try:
            found = ClusterEnv.auto_detect_unset_distributed_params(address, count, process, None, None, int(timeout))
        except Exception as error:  # of a scheduler's interface: whatever it raises
            raise UserError(
                f"the scheduler does not tell which processes there are ({type(error).__name__}: {error}). Give "
                "--coordinator_address, --num_processes and --process_id; --num_processes=1 runs this one alone"
            ) from error
    found_address, found_count, found_process, local = found
    if found_address is None or found_count is None or found_process is None:
        return None
    return Cluster(found_address, found_count, found_process, None if local is None else tuple(local))
