"""Compilation: the cache on disk, reports about the first programs, and compiling later shapes in threads."""

import contextlib
import os
import threading
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from etils import epath
from jax._src import compiler
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from bert_jax.storage.files import try_lock
from bert_jax.storage.location import GOOGLE, Location, bucket_and_name, find_store
from bert_jax.train import distributed
from bert_jax.train import sharding as partitioning
from bert_jax.train.clock import Clock
from bert_jax.train.describe import describe_batch
from bert_jax.train.metrics import ProgressLine, duration
from bert_jax.train.run import Source
from bert_jax.train.step import TrainState

VARIABLE = "JAX_COMPILATION_CACHE_DIR"  # jax's own; it may also name gs://BUCKET/FOLDER

_LOCK = ".writer"  # in the cache folder: held by the process that writes if process 0 does not
_locks: list[IO[bytes]] = []  # open until the process ends


def enable_compilation_cache(workdir: str = "") -> Location | None:
    """Makes jax keep compiled programs in ~/.cache/bert_jax (or $XDG_CACHE_HOME/bert_jax) and returns that folder.

    For a workdir in Google Cloud Storage it is gs://BUCKET/bert_jax/programs, because a preempted machine loses its
    disk. Returns None, and changes nothing, if jax has a folder already, if JAX_COMPILATION_CACHE_DIR is set (an empty
    value disables the cache), or if the folder cannot be created. Programs are found by a hash of their code, compiler
    and devices, so deleting the folder is always safe.
    """
    if VARIABLE in os.environ or jax.config.values["jax_compilation_cache_dir"] is not None:
        return None
    if find_store(workdir) is GOOGLE:
        # Not in the workdir: one that somebody else made would contain code to execute.
        stored = epath.Path(f"{GOOGLE.scheme}{bucket_and_name(workdir)[0]}") / "bert_jax" / "programs"
        jax.config.update("jax_compilation_cache_dir", str(stored))
        return stored
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache) / "bert_jax" / "programs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a missing or read-only home directory costs compile time, nothing else
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


def write_on_every_host() -> None:
    """Makes one process per cache folder write its compiled programs, and all processes if the cache is in a store.

    All processes call it once connected. It changes nothing for one process, or for a folder that all share.
    """
    # jax lets only process 0 write programs (0.10.2 to 0.12.0; jax/_src/compiler.py, _cache_write), because others
    # might write the same file at the same time. With a home directory on each host, all other processes would compile
    # at every start.
    if jax.process_count() == 1:
        return
    named = str(jax.config.values["jax_compilation_cache_dir"] or "")
    stored = "://" in named
    folder = Path(named) if named and not stored else None
    by_jax = compiler._cache_write
    if (folder is not None or stored) and not distributed.is_primary():
        # This happens before it is known whether to write, because the programs of the next lines are to be found as
        # well. They take less than a second to compile, so jax keeps them only if its shortest time is set to 0.
        with contextlib.suppress(OSError):  # another process of this host holds the lock, or the folder is read-only
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                _locks.append((folder / _LOCK).open("ab"))
                try_lock(_locks[-1])
            # A copy of jax's function that takes this process for process 0.
            first = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
            compiler._cache_write = types.FunctionType(by_jax.__code__, vars(compiler) | {"distributed": first})
    # Process 0 leaves a mark in its folder; a process that sees the mark shares the folder.
    mark = ""
    if folder is not None and distributed.is_primary():
        with contextlib.suppress(OSError):
            name = f"{os.urandom(8).hex()}.mark"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
            mark = name
    mark = distributed.broadcast_from_primary(mark)
    is_seen = folder is None or not mark or (folder / mark).exists()
    multihost_utils.process_allgather(np.bool_(is_seen))  # all have looked
    # A process that shares process 0's folder leaves writing to it, as jax does. In a store an object appears whole,
    # whoever writes it, and each process may have keys of its own (on CPUs, jax 0.10.2), so all of them write.
    if is_seen and not stored:
        compiler._cache_write = by_jax
    if folder is not None and mark and distributed.is_primary():
        (folder / mark).unlink(missing_ok=True)


_COMPILED = "/jax/core/compile/backend_compile_duration"  # jax's own events, also for programs found in the cache
_CACHED = "/jax/compilation_cache/cache_hits"
WORTH_A_LINE = 2.0  # seconds


class _Count:
    """This process's requests for programs, how many the cache had, and the seconds by thread."""

    def __init__(self) -> None:
        # Threads that compile at once may lose a count. Counts only choose the words of a line.
        self.asked = self.cached = 0
        self._seconds: defaultdict[int, float] = defaultdict(float)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    @property
    def seconds(self) -> float:
        """The seconds this thread spent compiling, or loading programs from the cache."""
        return self._seconds[threading.get_ident()]

    def _on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:
            self.asked += 1
            self._seconds[threading.get_ident()] += duration_secs

    def _on_event(self, event: str, **_: str | int) -> None:
        self.cached += event == _CACHED


_count = _Count()


@contextlib.contextmanager
def compiling(progress: ProgressLine) -> Iterator[None]:
    """Shows that this block compiles or loads the training step, and reports which it was if it took long."""
    asked, cached, began = _count.asked, _count.cached, time.monotonic()
    progress.note("compiling the training step")
    yield
    _report(progress, "the training step", asked, cached, time.monotonic() - began)


@contextlib.contextmanager
def evaluating(progress: ProgressLine, clock: Clock, begins: bool) -> Iterator[None]:
    """Does the same for the first evaluation; compile seconds do not count in the run's pace."""
    if not begins:
        yield
        return
    asked, cached, before = _count.asked, _count.cached, _count.seconds
    progress.note("compiling the evaluation")
    yield
    seconds = _count.seconds - before
    clock.leave_out(seconds)
    _report(progress, "the evaluation", asked, cached, seconds)


def _report(progress: ProgressLine, program: str, asked: int, cached: int, seconds: float) -> None:
    """Reports, if it took long, whether all programs since the counts `asked` and `cached` were in the cache."""
    if seconds >= WORTH_A_LINE:
        # Loaded only if the cache had every program: one that it lacked may have taken all of the time.
        loaded = _count.cached > cached and _count.cached - cached == _count.asked - asked
        how = f"loaded {program} from the compilation cache" if loaded else f"compiled {program}"
        progress.report(f"{how} in {duration(seconds)}")


class CompilingAhead:
    """Compiles a training step for the shapes of later batches in threads, while the run trains on the first shape.

    With one process and several cores this takes hardly more time than one program. A program that does not compile,
    or does not fit into memory, is reported in the first minutes, and not after days.

    Several processes compile all shapes before the first step, in the same order. So do GPUs, because XLA times
    kernels on the GPU while it compiles, which the training step would disturb.

    Args:
        later: abstract batches, by the first step of each shape (`later_batch_shapes`).
        arguments: the step's arguments after state, batch and fraction.
    """

    def __init__(
        self,
        train_step: Any,
        state: TrainState,
        later: Mapping[int, Any],
        arguments: Sequence[Any],
        mesh: Mesh,
        report: Callable[[str], None],
    ) -> None:
        # Compiled programs are found by shapes, dtypes, weak types and shardings, so all of them must match the loop's
        # call.
        def abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
            weak = getattr(leaf, "weak_type", False)  # which keys do not have
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=weak)

        abstract_state, *others = jax.tree.map(abstract, (state, *arguments))  # the first step takes the state itself

        def compile_for(batch: Any) -> None:
            with jax.set_mesh(mesh):  # which is a property of the thread
                # The loop passes the fraction as np.float32, too. A Python float would be another type.
                train_step.lower(abstract_state, batch, np.float32(0), *others).compile()

        at_once = jax.process_count() > 1 or mesh.devices.flat[0].platform == "gpu"
        self._compiling: dict[Any, Future[None]] = {}
        # One core is left for the loop.
        self._threads = ThreadPoolExecutor(max(min(len(later), (os.cpu_count() or 2) - 1), 1), "compile")
        for step, batch in later.items():
            report(f"compiling for step {step}: {describe_batch(batch)}")
            if at_once:
                compile_for(batch)
            else:
                self._compiling[_shape(batch)] = self._threads.submit(compile_for, batch)

    def wait_for(self, batch: Any) -> None:
        """Waits for the batch's program, if its shape is one of the later ones.

        Raises the error if any program has failed to compile.
        """
        # Finished programs are collected, too: an error then ends the run soon, not when the program is needed.
        for shape in [shape for shape, future in self._compiling.items() if future.done() or shape == _shape(batch)]:
            self._compiling.pop(shape).result()

    def __enter__(self) -> "CompilingAhead":
        return self

    def __exit__(self, *exception: Any) -> None:
        # A compilation that has begun cannot be interrupted, and nobody waits for it.
        self._threads.shutdown(wait=False, cancel_futures=True)


def later_batch_shapes(
    source: Source, first: int, end: int, mesh: Mesh, shapes_at: Sequence[int] = ()
) -> dict[int, Any]:
    """Returns an abstract batch for each shape or type that differs from the first batch's, by its first step.

    Args:
        first: the run's first step.
        end: the run's number of steps; 0: unknown.
        shapes_at: steps whose batches have all shapes (Run.shapes_at); empty: the source's changes. One row of each is
            read.
    """
    if 0 < end <= first:  # a finished run takes no step
        return {}
    sharding = partitioning.rows_sharding(mesh)
    batches: dict[Any, tuple[int, Any]] = {}
    later = shapes_at or (change for change in source.changes if change > first)
    for step in (first, *(step for step in later if step < end or end <= 0)):
        # One row has the shapes and dtypes of all; the source knows how many rows there are.
        rows = source.rows_at(step)
        batch = jax.tree.map(
            lambda leaf, rows=rows: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype, sharding=sharding),
            source.batch(step, slice(0, 1)),
        )
        batches.setdefault(_shape(batch), (step, batch))
    # The first entry is the first batch's shape, which the loop compiles itself.
    return dict(list(batches.values())[1:])


def _shape(batch: Any) -> Any:
    # With the type, since phases of equal shapes compile programs of their own.
    return type(batch), tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch))
