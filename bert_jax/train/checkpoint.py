"""Saves, restores, lists and keeps a workdir's checkpoints; holds the workdir for one run.

A step is written in the background and appears whole or not at all, whenever the process is killed:

on a disk      Orbax writes it under a temporary name and renames it at the end.
in gs://       A folder cannot be renamed, so Orbax writes commit_success.txt last; a step without it is not complete.
in s3://       Orbax writes the step to the local disk; then its files are uploaded, commit_success.txt last.

train/orbax_io.py reads and verifies a step.
"""

import contextlib
import copy
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from bert_jax.errors import RunAgain, UserError
from bert_jax.progress import print_note
from bert_jax.storage import hold
from bert_jax.storage.files import scratch_folder
from bert_jax.storage.hold import NoLongerHeld
from bert_jax.storage.location import (
    S3,
    Location,
    absolute,
    check_access,
    find_store,
    is_stored,
    location,
    move_folder,
    read_json,
    remove_folder,
    store_errors,
    upload_folder,
    write_file,
    write_json,
)
from bert_jax.train import distributed
from bert_jax.train.evaluation import Best, lower_is_better
from bert_jax.train.orbax_io import (
    AVERAGE,
    MARK,
    OPTIMIZER,
    PARAMS,
    TEMPORARY,
    DamagedCheckpoint,
    Writer,
    is_staged,
    read_meta,
    read_tree,
    saved_steps,
)

# Next to the steps:
BEST_FILE = "best.json"  # which one is the best, and by which metric
REMOVED = "removed"  # the folder of steps that are being deleted
DAMAGED = "damaged"  # the folder of steps that cannot be read
EVALUATION = "evaluation"  # the key of a step's held-out metrics in its metadata

CheckHeld = Callable[[], None]


class Restored(NamedTuple):
    """A step that was read: its trees, with shardings, and its metadata."""

    params: PyTree
    optimizer_state: PyTree
    average: PyTree | None
    meta: dict[str, Any]


class Checkpoints:
    """A workdir's checkpoints, written asynchronously. Use it in a `with`, or close it.

    Every process of a run creates one and calls its methods at the same points.

    Args:
        keep: the number of newest steps to keep; 0: all.
        keep_every: also keeps the multiples of this number; 0: none.
        best: also keeps the best step by this held-out metric, e.g. eval_loss, and names it in best.json; empty: none.
        check_held: raises an error if another run has the workdir.
    """

    def __init__(
        self,
        directory: str | PurePath,
        keep: int,
        keep_every: int = 0,
        best: str = "",
        check_held: CheckHeld = lambda: None,
    ) -> None:
        self.best = Best(best, {}) if best else None
        self.directory = absolute(location(directory))
        self._keep, self._keep_every, self._check_held = keep, keep_every, check_held
        self._opened = contextlib.ExitStack()
        self._writer = self._opened.enter_context(Writer())
        # Orbax writes here: into the checkpoints' folder, or for S3 into a local one whose files `_finish` uploads.
        self._written: Location = self.directory
        if is_staged(self.directory):
            self._written = self._opened.enter_context(scratch_folder()) / "checkpoints"
        self._saving: int | None = None
        self._finishing: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.durable_seconds: float | None = None  # from asking for the last complete save until nothing could lose it
        # The complete steps, equal in all processes. Steps that a run which replaces this one saves are never added.
        self._known = set(saved_steps(self.directory))
        # A run holds its workdir, so nobody is still writing what is removed here.
        _remove_unfinished(self.directory, self._known)
        if self.best:
            for step, evaluation in self.evaluations().items():
                self.best.note(step, evaluation)
            if (file := self.directory / BEST_FILE).exists():  # may name a step that was measured after it was saved
                noted = read_json(file)
                if noted.get("metric") == best and noted.get("step") in self._known:
                    self.best.values.setdefault(noted["step"], noted["value"])

    def save(
        self,
        step: int,
        params: PyTree,
        optimizer_state: PyTree | None,
        meta: Mapping[str, Any],
        average: PyTree | None = None,
    ) -> None:
        """Starts to save a step; returns once the tensors may change (be donated). An existing step stays as it is.

        Args:
            optimizer_state: None for a checkpoint that can initialize a run but not resume one.
            meta: JSON values; meta["evaluation"] holds the step's held-out metrics.
            average: the parameters' moving average, if any.

        Raises:
            Exception: the failure of the previous save, as from `wait`. An OSError for a full disk names the step.
                Older checkpoints stay whole.
        """
        asked = time.monotonic()
        # One save at a time. The failure of the last one is raised before another begins.
        self.wait()
        # Not by a listing of the folder, which may differ between processes for a moment.
        if step in self._known:
            return
        if not is_stored(self._written):
            _remove_unfinished(self._written, saved_steps(self._written))  # of a save that failed
        # Before the save, since `_finish` asks which step is the best.
        if self.best:
            self.best.note(step, meta.get(EVALUATION, {}))
        self._saving = step
        trees = {PARAMS: params, OPTIMIZER: optimizer_state, AVERAGE: average}
        with self._explained(step, self._written):
            self._writer.start(
                self._written / str(step),
                {item: tree for item, tree in trees.items() if tree is not None},
                copy.deepcopy(dict(meta)),  # it is written by a thread while the run changes its sums
            )
        # A daemon, so that a process which must not wait for this save (see __exit__) can still exit.
        self._finishing = threading.Thread(
            target=self._finish, args=(step, asked), name="finish checkpoint", daemon=True
        )
        self._finishing.start()

    def measured(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Records an evaluation made after its step was saved; updates best.json."""
        if self.best:
            self.best.note(step, evaluation)
            self.write_best()

    def steps(self) -> list[int]:
        """Returns the complete steps in ascending order, without an unfinished one."""
        return sorted(self._known)  # not by a listing, which takes many requests in a store

    def latest_step(self) -> int | None:
        """Returns the newest complete step, or None."""
        return max(self.steps(), default=None)

    def meta(self, step: int) -> dict[str, Any]:
        """Returns a step's metadata.

        Raises:
            DamagedCheckpoint: it cannot be read.
        """
        return read_meta(self.directory / str(step))["meta"]

    def evaluations(self) -> dict[int, dict[str, float]]:
        """Returns the saved evaluations by step, except for steps with damaged metadata."""
        evaluations = {}
        for step in self.steps():
            with contextlib.suppress(DamagedCheckpoint):
                evaluations[step] = self.meta(step).get(EVALUATION, {})
        return evaluations

    def newest_meta(self) -> dict[str, Any] | None:
        """Returns the newest readable metadata, or None."""
        for step in reversed(self.steps()):
            with contextlib.suppress(DamagedCheckpoint):
                return self.meta(step)
        return None

    def restore_newest(
        self,
        params: PyTree,
        optimizer_state: PyTree,
        average: PyTree | None = None,
    ) -> tuple[int, Restored] | None:
        """Restores the newest undamaged step and returns it with its number, or None; takes the arguments of `restore`.

        Newer damaged steps are moved to damaged/ and reported on stderr.

        Raises:
            UserError: all steps are damaged; none has been moved.
            RunAgain: with several processes, the newest step is damaged and was moved, and there is another.
        """
        damaged: dict[int, str] = {}
        steps = self.steps()
        for step in reversed(steps):
            try:
                restored = restore(self.directory / str(step), params, optimizer_state, average)
            except DamagedCheckpoint as error:
                damaged[step] = error.why
                if jax.process_count() > 1 and step != steps[0]:
                    # The other processes may have read the step, and would resume from it.
                    with contextlib.suppress(FileNotFoundError):  # another process has moved it
                        self._set_aside(step)
                    raise RunAgain(
                        f"checkpoint {self.directory / str(step)} is damaged and was moved to "
                        f"{self.directory / DAMAGED}: {error.why}. Run the same command on every host to resume from "
                        "the checkpoint before it"
                    ) from error
                continue
            # Only now, since nothing is moved if all steps are damaged.
            for bad, why in damaged.items():
                target = self._set_aside(bad)
                text = f"checkpoint {bad} is damaged and was moved to {target}: {why}; resuming from step {step}"
                print_note(f"warning: {text}")
            return step, restored
        if damaged:
            newest = max(damaged)
            raise UserError(
                f"every checkpoint in {self.directory} is damaged (steps {', '.join(map(str, sorted(damaged)))}; "
                f"{newest}: {damaged[newest]}). Replace one with a good copy, or name another --workdir to start again"
            )
        return None

    def wait(self) -> None:
        """Waits until the last save is on disk, or in the store.

        Raises:
            Exception: the failure of that save, once, as `save` describes.
        """
        if self._finishing is not None:
            self._finishing.join()
        # Both are cleared before anything is raised, so that a failure is raised once and the next save may begin.
        saved, self._saving = self._saving, None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        # Only now, since best.json must never name a step that is not complete.
        if saved is not None:
            self.write_best()

    def write_best(self) -> None:
        """Makes best.json name the best of the complete steps."""
        if self.best and distributed.is_primary() and (step := self.best.among(self.steps())) is not None:
            metric, better = self.best.metric, "lower" if lower_is_better(self.best.metric) else "higher"
            document = {"step": step, "metric": metric, "value": self.best.values[step], "better": better}
            write_json(self.directory / BEST_FILE, document)

    def close(self) -> None:
        """Waits for the last save, then frees the background threads."""
        try:
            self.wait()
        finally:
            self._opened.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After NoLongerHeld the folder is another run's, which has removed the step that was being saved. With several
        # processes an error ends all of them, and closing would wait for those that have not failed.
        ignored = Exception if jax.process_count() > 1 else NoLongerHeld
        if kind is None or not issubclass(kind, ignored):
            self.close()

    def _finish(self, step: int, asked: float) -> None:
        """Completes a save in a thread: waits for Orbax, uploads a step to S3, and removes old steps."""
        # `wait` raises any error of this thread.
        try:
            with self._explained(step, self._written):
                self._writer.wait()
            if self._written != self.directory:
                # All files but the mark, then the mark: whoever sees it sees a whole step.
                staged, stored = self._written / str(step), self.directory / str(step)
                assert isinstance(staged, Path)
                (staged / MARK).unlink()
                self._check_held()  # the upload replaces files that another run may have put there
                with self._explained(step, self.directory):
                    upload_folder(staged, stored)
                    self._check_held()  # again, since an upload may take minutes
                    write_file(stored / MARK, f"Checkpoint commit was successful to {stored}".encode())
                shutil.rmtree(staged)
            self.durable_seconds = time.monotonic() - asked
            # Old steps go last, so that a complete one exists at any instant. `save` joins this thread before it reads
            # what changes here.
            self._known.add(step)
            steps = sorted(self._known)
            best = self.best.among(steps) if self.best else None
            for old in steps[: -self._keep] if self._keep else ():
                if old != best and not (self._keep_every and old % self._keep_every == 0):
                    self._remove(old)
        except BaseException as error:
            self._failure = error

    def _remove(self, step: int) -> None:
        """Removes a step, which is complete or gone whenever the process is killed."""
        self._known.discard(step)
        if not distributed.is_primary():
            return
        # First the one operation after which no reader takes the step for complete: a rename, or the mark's deletion.
        folder = self.directory / str(step)
        if isinstance(folder, Path):
            (self.directory / REMOVED).mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # somebody has deleted it
                folder.rename(self.directory / REMOVED / folder.name)
            remove_folder(self.directory / REMOVED)
            return
        with store_errors(self.directory, f"remove step {step} from {self.directory}"):
            (folder / MARK).unlink(missing_ok=True)
            remove_folder(folder)

    def _set_aside(self, step: int) -> Location:
        """Moves a damaged step to damaged/STEP (or STEP-2, ...), and returns its new place."""
        folder = self.directory / DAMAGED
        if not is_stored(folder):
            folder.mkdir(exist_ok=True)
        # An earlier run may have moved a damaged step with the same number, which it then saved again.
        suffixes = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
        target = next(path for suffix in suffixes if not (path := folder / f"{step}{suffix}").exists())
        move_folder(self.directory / str(step), target)
        self._known.discard(step)
        if self.best:
            self.best.values.pop(step, None)
        return target

    def _explained(self, step: int, folder: Location) -> contextlib.AbstractContextManager[None]:
        """Explains why a step cannot be written to a store; errors of a disk pass."""
        then = "Run the same command again to resume from the checkpoint before it"
        return store_errors(folder, f"write checkpoint {step} in {self.directory}", then)


def _remove_unfinished(directory: Location, steps: Collection[int]) -> None:
    """Removes the remains of interrupted saves and removals next to the complete steps."""
    if not distributed.is_primary():
        return
    # On a disk, a folder with a plain number is complete. In a store, one without a mark is not.
    complete = set(map(str, steps))
    with store_errors(directory, f"read {directory}"):
        for path in list(directory.iterdir()) if directory.is_dir() else ():
            unfinished = path.name.isdecimal() and path.name not in complete
            if unfinished or path.name == REMOVED or TEMPORARY in path.name:
                remove_folder(path)


def restore(directory: Location, params: PyTree, optimizer_state: PyTree, average: PyTree | None = None) -> Restored:
    """Reads WORKDIR/checkpoints/STEP straight into sharded memory, and verifies it.

    Args:
        directory: the step's folder, which stays as it is.
        params, optimizer_state, average: trees of jax.ShapeDtypeStruct with shardings, in the structure to return
            (including optax's NamedTuples). An average of None is not read.

    Returns:
        The trees and the metadata; the average is None if the step has none.

    Raises:
        UserError: a tensor is missing, extra, or has another shape or dtype.
        DamagedCheckpoint: files are damaged.
    """
    document = read_meta(directory)
    tensors = document["tensors"]
    # convert and export write such steps (workdir.write_params).
    if OPTIMIZER not in tensors:
        raise UserError(
            f"checkpoint {directory} holds parameters but no optimizer state, so training cannot resume from it. "
            f"Start a new workdir with --config.init_from={directory.parent.parent}"
        )
    if AVERAGE not in tensors:  # the run kept none; a new one can begin at these parameters
        average = None
    return Restored(
        params=read_tree(directory, PARAMS, tensors[PARAMS], params),
        optimizer_state=read_tree(directory, OPTIMIZER, tensors[OPTIMIZER], optimizer_state),
        average=None if average is None else read_tree(directory, AVERAGE, tensors[AVERAGE], average),
        meta=document["meta"],
    )


@contextlib.contextmanager
def held_workdir(workdir: Location) -> Iterator[CheckHeld]:
    """Holds a workdir for one run while it is open, and yields a function to call before anything is written.

    Process 0 holds it for all processes. The function raises storage.hold.NoLongerHeld if another run has replaced
    this one, which can happen after a suspension.

    Raises:
        UserError: another run holds the workdir, or `check_workdir` refuses it.
    """
    check_workdir(workdir)
    if not distributed.is_primary():
        yield lambda: None  # process 0 checks, and its failure ends this one
        return
    with hold.hold(workdir, print_note) as mine:
        yield mine.check


def check_workdir(workdir: Location) -> None:
    """Checks that a run can keep its checkpoints in a workdir.

    Raises:
        UserError: it is a file, in an unreadable bucket, or, with several processes, in S3.
    """
    if find_store(workdir) is S3 and jax.process_count() > 1:
        raise UserError(
            f"--workdir {workdir}: a run of several processes cannot keep its checkpoints in S3, because each process "
            "stages its part of a checkpoint on its own disk. Use gs://BUCKET/NAME, or a folder that all hosts share"
        )
    check_access(workdir)
    with store_errors(workdir, f"read {workdir}"):
        if workdir.exists() and not workdir.is_dir():
            raise UserError(f"--workdir {workdir} is a file; name a folder")
