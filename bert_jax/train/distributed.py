"""Runs of several processes: detects the process index and the coordinator, starts and ends jax's service, and makes
processes agree on values.

    with distributed.processes(flags):  # one process: does nothing
        train()

Each process loads the rows that its devices own; process 0 writes logs, metrics and files. It broadcasts values that
only one process can know (a clock, a file) over the devices.
"""

import collections
import contextlib
import ctypes
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed as jax_distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax import command_line, errors
from bert_jax.command_line import EXIT_LOST, EXIT_STOPPED, EXIT_USER_ERROR
from bert_jax.config.options import POSITIVE, Checked, option
from bert_jax.errors import Stopped, UserError
from bert_jax.progress import print_note
from bert_jax.storage import hold
from bert_jax.train import watchdog

STARTUP_TIMEOUT = 300.0  # jax.distributed.initialize's own; pods of a scheduler start minutes apart
HEARTBEAT_TIMEOUT = 30.0  # a third of jax's own: all processes stand still until a lost one is noticed


_SECTION = "several processes (detected on TPU pods, Slurm, Open MPI and GKE)"


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(Checked):
    """The flags for running a command in several processes."""

    coordinator_address: str = option("", "the address of process 0", metavar="HOST:PORT", section=_SECTION)
    num_processes: int | None = option(None, "the number of processes; 1: only this one", metavar="N", section=_SECTION)
    process_id: int | None = option(None, "the number of this process, from 0", metavar="I", section=_SECTION)
    startup_timeout: float = option(
        STARTUP_TIMEOUT, "seconds that processes wait for each other", metavar="S", valid=POSITIVE, section=_SECTION
    )
    heartbeat_timeout: float = option(
        HEARTBEAT_TIMEOUT, "seconds of silence after which one is lost", metavar="S", valid=POSITIVE, section=_SECTION
    )


@dataclass(frozen=True)
class Cluster:
    """This process's place in a run, from flags and environment; jax asks the scheduler for values that are None."""

    coordinator_address: str | None = None  # HOST:PORT of process 0
    num_processes: int | None = None
    process_id: int | None = None
    # The GPUs of this process, numbered from 0 among those that it sees; (): all; None: jax's choice, by its variables.
    local_device_ids: tuple[int, ...] | None = ()

    @property
    def complete(self) -> bool:
        return None not in (self.coordinator_address, self.num_processes, self.process_id)

    @property
    def host(self) -> str:
        return (self.coordinator_address or "").rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port of process 0; 0 if the address has none."""
        port = (self.coordinator_address or "").rpartition(":")[2]
        return int(port) if port.isdecimal() else 0


def find(flags: ProcessOptions, environment: Mapping[str, str] = os.environ) -> Cluster | None:
    """Reads flags, JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; None for one process.

    jax.distributed.initialize asks the scheduler for missing values, except for the GPUs: jax would give each task the
    GPU with its number, and leave the others idle. Raises UserError for impossible values.
    """
    address = flags.coordinator_address or environment.get("JAX_COORDINATOR_ADDRESS") or None
    # Flags come first, then jax's variables, then the scheduler, which jax asks itself.
    count = _number("num_processes", flags.num_processes, environment)
    process = _number("process_id", flags.process_id, environment)
    # A scheduler's only task is one process, and needs no coordinator.
    if count == 1 or (address is count is process is None and _scheduled_tasks(environment) == 1):
        return None
    cluster = Cluster(address, count, process, _local_device_ids(environment))
    if address is None or count is None or process is None:
        return cluster
    if not cluster.host or not 0 < cluster.port < 1 << 16:
        raise UserError(f"--coordinator_address is {address!r}; expected HOST:PORT of process 0, such as 10.0.0.2:8476")
    if count <= 0:
        raise UserError(f"--num_processes is {count}; expected 1 or more")
    if not 0 <= process < count:
        raise UserError(f"--process_id is {process} with --num_processes={count}; expected 0 to {count - 1}, each once")
    return cluster


def describe_failure(cluster: Cluster, error: Exception) -> str:
    """Returns the message for a run whose processes jax could not connect."""
    names = ("coordinator_address", "num_processes", "process_id")
    missing = [f"--{name}" for name in names if getattr(cluster, name) is None]
    if missing and "defined" in str(error):
        return (
            f"{' and '.join(missing)} must be given too, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
            "JAX_PROCESS_ID: jax finds no scheduler that knows them"
        )
    return (
        f"jax cannot connect the processes of this run ({type(error).__name__}: {error}). Give --coordinator_address, "
        "--num_processes and --process_id, or --num_processes=1 to run this process alone"
    )


def _scheduled_tasks(environment: Mapping[str, str]) -> int | None:
    """Returns the number of tasks that started with this one; None without a scheduler that tells."""
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return int(environment["OMPI_COMM_WORLD_SIZE"])
    if "SLURM_JOB_ID" not in environment:
        return None
    # SLURM_NTASKS in a shell of salloc or sbatch is what srun would start. Such a shell is no step, or with
    # use_interactive_step in slurm.conf a step of one task.
    step = "SLURM_STEP_NODELIST" in environment
    return int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1) if step else 1


def _local_device_ids(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Returns the GPUs of a task among those that it sees: all, or its part of those that its machine's tasks share.

    Raises UserError if the tasks cannot share them equally.
    """
    if environment.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    seen = len(visible.split(",")) if visible else 0
    all_gpus = 0  # of the tasks on this machine; 0: unknown
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environment:
        number, tasks = environment["OMPI_COMM_WORLD_LOCAL_RANK"], int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"])
    else:
        # Slurm writes 2(x3),1 for 2 tasks on nodes 0 to 2 and 1 on node 3.
        counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        by_node = [int(tasks) for tasks, nodes in counts for _ in range(int(nodes or 1))]
        node = int(environment.get("SLURM_NODEID", 0))
        number, tasks = environment.get("SLURM_LOCALID", "0"), by_node[node] if node < len(by_node) else 0
        own = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]  # the number in TYPE:NUMBER
        all_gpus = int(environment.get("SLURM_GPUS_ON_NODE") or 0) or int(own or 0) * tasks
        seen = seen or int(own or 0)
    # A task that sees fewer has GPUs of its own, by --gpus-per-task or a script.
    shared = all_gpus or max(seen, tasks)
    if tasks < 2 or seen not in (0, shared):
        return ()
    if shared % tasks:
        raise UserError(
            f"{tasks} tasks on this machine cannot share its {shared} GPUs equally; start one task on each machine, "
            "which uses all of them, or one for each GPU"
        )
    share = shared // tasks
    return tuple(range(int(number) * share, (int(number) + 1) * share))


def _number(name: str, flag: int | None, environment: Mapping[str, str]) -> int | None:
    variable = f"JAX_{name.upper()}"
    if flag is not None or variable not in environment:
        return flag
    try:
        return int(environment[variable])
    except ValueError:
        raise UserError(f"{variable} is {environment[variable]!r}; expected a number, or give --{name}") from None


# Errors of gloo and NCCL when the process at the other end has died.
_CONNECTION = re.compile(r"connection (closed|reset|refused|timed out)|broken pipe|socket closed|ncclRemoteError", re.I)
# How long a failing process waits to hear that another one has failed, which is then the reason.
_BLAME_SECONDS = 5.0
_STDERR = 2  # the file descriptor, which C++ writes to as well

_Value = TypeVar("_Value")

_boundaries = itertools.count()  # steps that have ended: equal in all processes at the same step
_last_words = threading.Lock()  # only one reason for the end is printed


def is_primary() -> bool:
    """Whether this process writes the logs and files of the run: process 0, or the only one."""
    return jax.process_index() == 0


def note(line: str) -> None:
    """Prints a line of information or a warning, on the primary process alone."""
    print_note(line, quiet=not is_primary())


def broadcast_from_primary(value: _Value) -> _Value:
    """Returns process 0's JSON value. All processes call it at the same point.

    It travels over the devices as bytes and arrives after all dispatched steps; call it where metrics are fetched
    anyway.
    """
    if jax.process_count() == 1:
        return value
    # Only process 0 knows the size, so it goes first. The content is padded to a power of 2, to compile few shapes.
    content = json.dumps(value).encode() if is_primary() else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    padded = np.frombuffer(content.ljust(1 << (size - 1).bit_length(), b"\0"), np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)
    decoded: _Value = json.loads(received.tobytes()[:size])
    return decoded


def largest(values: Mapping[str, float]) -> dict[str, tuple[float, int]]:
    """Returns the largest of each value over all processes, and the process that has it.

    All processes call it at the same point.
    """
    gathered = multihost_utils.process_allgather(np.array([*values.values()], np.float32))
    table = np.asarray(gathered).reshape(jax.process_count(), len(values))
    return {name: (float(column.max()), int(column.argmax())) for name, column in zip(values, table.T, strict=True)}


def send_from_primary(number: float) -> jax.Array:
    """Returns at once a float32 array [] that will hold process 0's number, which must not be negative.

    All processes call it at the same point. Reading the array waits for the steps dispatched before.
    """
    # All processes but 0 contribute zeros, so the maximum over all devices is process 0's number.
    mesh = Mesh(jax.devices(), "devices")
    of_process = np.full(jax.local_device_count(), number if is_primary() else 0, np.float32)
    sent = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("devices")), of_process)
    # The mesh of the run may have the devices in another order, as on slices of TPUs.
    with jax.set_mesh(mesh):
        received: jax.Array = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))(sent)
    return received


def check_same(values: Mapping[str, Any], advice: str) -> None:
    """Raises UserError in a process whose JSON values differ from process 0's, and names the differences."""
    # Through JSON on both sides, so that a tuple equals a list.
    here = json.loads(json.dumps(dict(values)))
    there = broadcast_from_primary(here)
    if differing := [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]:
        listed = "; ".join(f"{name}: {there.get(name)} there, {here.get(name)} here" for name in differing)
        raise UserError(f"process {jax.process_index()} differs from process 0 ({listed}); {advice}")


def stop_requested() -> bool:
    """Whether a process received SIGTERM and all should stop here. Call it once at the end of each step, and
    before each batch of an evaluation.

    All processes get the same answer: they stop one step after the farthest that any had reached when jax passed the
    notice on, at most a second after the signal.
    """
    return bool(multihost_utils.reached_preemption_sync_point(next(_boundaries)))


@contextlib.contextmanager
def processes(flags: ProcessOptions, *, saves: bool = True, stall_timeout: float = 0.0) -> Iterator[None]:
    """Surrounds a command: connects this process to the others of its run, by flags, environment or scheduler.

    When a process fails, the others end too, with its message and exit code; with EXIT_LOST if it dies, and if a run
    stands still for stall_timeout seconds (0: never). A command that saves asks stop_requested; any other ends by
    SIGTERM as usual. Raises UserError if the processes cannot be connected.
    """
    cluster, several = find(flags), False
    nodes = os.environ.get("SLURM_NNODES", "1")
    if cluster is None and flags.num_processes is None and "SLURM_STEP_NODELIST" not in os.environ and nodes != "1":
        print_note(f"note: this is one process on one of {nodes} nodes; srun starts the tasks of a Slurm job on all")
    with contextlib.ExitStack() as stack:
        if cluster is not None:
            aborting = stack.enter_context(_Aborting(flags))
            with aborting.connecting():
                connected = _initialize(cluster, flags, saves)
            several = connected and jax.process_count() > 1  # a scheduler may have one process, which runs alone
        peers = watchdog.Peers(jax.process_index(), jax.process_count(), _client()) if several else None
        guard = stack.enter_context(watchdog.Watchdog(stall_timeout, _end, peers))
        try:
            yield
        except Stopped:  # all of them at the same step
            if not several:
                raise
            # Process 0 alone prints the message; the others exit with the same code.
            jax.distributed.shutdown()
            if is_primary():
                raise
            sys.exit(EXIT_STOPPED)
        except BaseException as error:
            if not several:
                raise
            _fail(guard, error)
        if several:
            jax.distributed.shutdown()  # waits for all processes


def _client() -> Any:
    """jax's client of its coordination service; no public name has it."""
    return jax_distributed.global_state.client


class _Aborting:
    """Turns jaxlib's abort, if processes do not connect or one of them is lost, into one line and an exit code.

    jaxlib logs why, and calls abort(). A function given to it instead is called with a value that Python cannot receive
    (jaxlib 0.10.2: std::bad_cast), so the signal of abort() is caught, in C: Python's own handlers would run in the
    main thread, which waits for a device.
    """

    def __init__(self, flags: ProcessOptions) -> None:
        self._timeout = flags.startup_timeout
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._handle)
        self._signal = ctypes.CDLL(None).signal
        self._signal.restype = ctypes.c_void_p
        self._signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        self._log: IO[bytes] | None = None

    def __enter__(self) -> "_Aborting":
        self._before = self._signal(signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p))
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGABRT, self._before)

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Keeps jaxlib's log, with its stack trace, from the screen until the processes are connected."""
        with tempfile.TemporaryFile() as self._log:
            self._stderr = os.dup(_STDERR)
            os.dup2(self._log.fileno(), _STDERR)
            try:
                yield
            finally:
                self._restore()
                self._log = None

    def _restore(self) -> None:
        os.dup2(self._stderr, _STDERR)
        os.close(self._stderr)

    def _handle(self, _number: int) -> None:
        if (log := self._log) is None:
            _end(EXIT_LOST, "another process of the run, or its machine, is lost; jax's lines above name it. Run the "
                 "same command on every host to resume")  # fmt: skip
        self._restore()
        log.seek(0)
        reason = re.search(r"absl::Status: (.*)", log.read().decode(errors="replace"))
        _end(EXIT_USER_ERROR, f"the processes of the run cannot connect within {self._timeout:g} s "
             f"({reason[1] if reason else 'jaxlib gives no reason'}). Start all of them, check --coordinator_address, "
             "--num_processes and --process_id on every host, or give --startup_timeout more seconds")  # fmt: skip


def _initialize(cluster: Cluster, flags: ProcessOptions, saves: bool) -> bool:
    """Starts jax's distributed runtime; returns False if nothing is given and jax finds no scheduler."""
    # The service catches SIGTERM. A command that never asks stop_requested would then not end by it. Set first, because
    # jax reads the option when it connects.
    jax.config.update("jax_enable_preemption_service", saves)
    place = (cluster.coordinator_address, cluster.num_processes, cluster.process_id)
    with warnings.catch_warnings():
        if not cluster.complete:
            warnings.simplefilter("ignore")  # in a Kubernetes pod without its package: a page on how to install that
        try:
            jax.distributed.initialize(
                *place,
                local_device_ids=cluster.local_device_ids,
                cluster_detection_method="deactivate" if cluster.complete else None,
                initialization_timeout=int(max(flags.startup_timeout, 1)),
                heartbeat_timeout_seconds=int(max(flags.heartbeat_timeout, 1)),
            )
        except (ValueError, RuntimeError) as error:
            # Nothing given: ValueError means that there is no scheduler, and RuntimeError that devices are in use
            # already (a notebook). The process is then alone.
            alone = "must be called before" in str(error) or "defined" in str(error)
            if place == (None, None, None) and alone:
                return False
            raise UserError(describe_failure(cluster, error)) from error
    check_devices(collections.Counter(device.process_index for device in jax.devices()))
    return True


def check_devices(counts: Mapping[int, int]) -> None:
    """Raises UserError if processes have different numbers of devices, which jax's broadcasts cannot serve."""
    fewest, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    if counts[fewest] != counts[most]:
        raise UserError(
            f"the processes have different numbers of devices (process {fewest} has {counts[fewest]}, process {most} "
            f"{counts[most]}); start each with equally many, and look for devices that have failed"
        )


def _fail(guard: watchdog.Watchdog, error: BaseException) -> NoReturn:
    """Ends all processes at once after an error of this one, since an orderly end would wait for the others."""
    outcome = command_line.outcome(error)
    if outcome is None and isinstance(error, Exception):
        # A collective fails here first when its other end has ended; the watchdog then hears why.
        threading.Event().wait(_BLAME_SECONDS)
    # Never released, because the process exits: the watching thread cannot print a second reason (_end).
    with _last_words:
        if outcome is None and isinstance(error, jax.errors.JaxRuntimeError) and _CONNECTION.search(str(error)):
            advice = "Another process has ended; see its log. Run the same command on every host to resume"
            outcome = EXIT_LOST, f"error: {errors.one_line(str(error))[:300]}. {advice}"
        if outcome is None:
            code, message = 1, f"{type(error).__name__}: {error}"
            print_last("".join(traceback.format_exception(error)))
        else:
            code, message = outcome
            print_last(errors.one_line(message), begun_by_others=code == EXIT_LOST)
        guard.announce(code, errors.one_line(message).removeprefix("error: ")[:2000])
        _exit(code)


def _end(code: int, why: str) -> NoReturn:
    """Ends this process because of another one or of a stall; called in a thread, since the main one may be waiting."""
    with _last_words:
        print_last(errors.one_line(f"error: {why}"), begun_by_others=code == EXIT_LOST)
        _exit(code)


def print_last(text: str, *, begun_by_others: bool = False) -> None:
    """Writes the last line on stderr, in one piece.

    C++ threads (gRPC, gloo) also write there, at any time and in pieces, about connections that a process's end closes.
    From here on they write to /dev/null, and a line that they may have begun ends before the text.
    """
    sys.stderr.flush()
    shown = _STDERR
    with contextlib.suppress(OSError):  # too many open files: others may still write after it
        shown = os.dup(_STDERR)
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(shown, f"{chr(10) * begun_by_others}{text.rstrip()}\n".encode())


def _exit(code: int) -> NoReturn:
    # os._exit runs no exit handlers: jax's would wait for processes that are lost.
    hold.release_all()  # the same command may be run again on other hosts, at once
    sys.stdout.flush()
    os._exit(code)
