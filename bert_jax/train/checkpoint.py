"""Saves, restores and keeps the checkpoints of a workdir, through Orbax.

Orbax writes a step in the background under a temporary name and renames it at the end, so a half-written step is never
visible. In an object store, which cannot rename a folder, the file commit_success.txt is written last, and a step
without one is not complete; steps in S3 are staged on disk (train/staging.py). Each step also holds the caller's
metadata and a fingerprint of every tensor (train/integrity.py), which is computed where the tensor lives when it is
saved and again when it is read.
"""

import contextlib
import copy
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple, NoReturn

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from bert_jax.command import RunAgain, UserError
from bert_jax.model.paths import unflatten
from bert_jax.storage.holder import NoLongerHeld
from bert_jax.storage.location import (
    Location,
    absolute,
    is_stored,
    location,
    read_json,
    store_errors,
    write_json,
)
from bert_jax.train.held_out import Best
from bert_jax.train.held_workdir import CheckHeld
from bert_jax.train.integrity import (
    AVERAGE,
    META,
    OPTIMIZER,
    PARAMS,
    DamagedCheckpoint,
    describe,
    named_leaves,
    read_meta,
    read_tree,
    saved_steps,
    signature,
)
from bert_jax.train.orbax_workarounds import (
    Manager,
    OneMessage,
    ignore_closed_loops,
    is_staged,
    os_error_code,
    tree_handler,
)
from bert_jax.train.staging import StagedFolder
from bert_jax.train.step_folder import REMOVED, StepFolder

BEST_FILE = "best.json"  # next to the steps: which one is the best, and by which metric
EVALUATION = "evaluation"  # the key in a step's metadata of what was measured at that step

_policies = ocp.checkpoint_managers


class Restored(NamedTuple):
    params: PyTree
    optimizer_state: PyTree
    average: PyTree | None
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one workdir, written asynchronously.

    It keeps the newest `keep` steps (0: all), the multiples of `keep_every` (0: none), and the step that is best by
    the held-out metric `best` (empty: none; eval_loss, eval_mlm_accuracy, ...), which best.json names. Every process
    of a run creates one and calls each method at the same point. Use it in a `with`, or close it.

    check_held   raises an error if another run has the workdir; called before a step in S3 is uploaded, and
                 before it is marked as complete
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
        policy = _preservation_policy(keep, keep_every, self.best)
        ignore_closed_loops()
        self._quiet = OneMessage()
        logging.getLogger("absl").addFilter(self._quiet)
        self.directory = absolute(location(directory))
        staged = is_staged(self.directory)
        self._folder = StagedFolder(self.directory, check_held) if staged else StepFolder(self.directory)
        trees = {item: tree_handler() for item in (PARAMS, OPTIMIZER, AVERAGE)}
        self._manager = Manager(
            self._folder.written,
            item_handlers={**trees, META: ocp.JsonCheckpointHandler()},
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy, cleanup_tmp_directories=True, todelete_subdir=REMOVED
            ),
        )
        self._saving: int | None = None
        self._replaced: list[int] = []
        self._folder.remove_old()
        if self.best:
            for step, evaluation in self.evaluations().items():
                self.best.note(step, evaluation)
            if (file := self.directory / BEST_FILE).exists():  # may name a step that was measured after it was saved
                self.best.recall(read_json(file), self.steps())

    def save(
        self,
        step: int,
        params: PyTree,
        optimizer_state: PyTree | None,
        meta: Mapping[str, Any],
        average: PyTree | None = None,
    ) -> None:
        """Starts to save a step; returns once the tensors may change (be donated). `meta` holds JSON values.

        meta["evaluation"] is what was measured at the step. A step that exists already is left as it is. Without an
        optimizer_state the checkpoint can initialize a run but not resume one; an average of None is left out.
        Raises the failure of the previous save, as `wait` does: OSError for a full disk, which names the step; older
        checkpoints are then whole.
        """
        while self._replaced:
            later = self._replaced.pop()  # the newest first: the steps that remain are always of one run
            self._folder.remove(later)
            self._manager.delete(later)
        if step in self._manager.all_steps():
            return
        trees = {PARAMS: params, OPTIMIZER: optimizer_state, AVERAGE: average}
        named = {item: named_leaves(tree) for item, tree in trees.items() if tree is not None}
        document = {
            # A copy, because it is written by a thread while the run changes its sums.
            "meta": copy.deepcopy(dict(meta)),
            "tensors": {item: describe(tensors) for item, tensors in named.items()},
        }
        items = {item: ocp.args.PyTreeSave(unflatten(tensors)) for item, tensors in named.items()}
        signed = document | {"sha256": signature(document)}
        composite = ocp.args.Composite(**items, **{META: ocp.args.JsonSave(signed)})
        self.wait()  # raises the failure of the previous save
        self._folder.remove_old()
        if self.best:
            self.best.note(step, meta.get(EVALUATION, {}))
        self._saving = step
        with self._disk_errors_restored():
            self._manager.save(step, args=composite, force=True)
        self._folder.publish(step, self._manager.wait_until_finished, self._manager.all_steps)

    def measured(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Records what was measured at a step that had been saved before; updates best.json."""
        if self.best:
            self.best.note(step, evaluation)
            self.write_best()

    def replace_after(self, step: int) -> list[int]:
        """Makes the next save delete the checkpoints of later steps, and returns those; none of them is best now."""
        self._replaced = [each for each in self.steps() if each > step]
        if self.best:
            for each in self._replaced:
                self.best.values.pop(each, None)
        return list(self._replaced)

    def steps(self) -> list[int]:
        """Returns the complete steps in ascending order, without one that is still being written."""
        return saved_steps(self.directory)

    def latest_step(self) -> int | None:
        """Returns the newest complete step, or None."""
        return max(self.steps(), default=None)

    def meta(self, step: int) -> dict[str, Any]:
        """Returns the metadata with which a step was saved. Raises DamagedCheckpoint."""
        return read_meta(self.directory / str(step))["meta"]

    def evaluations(self) -> dict[int, dict[str, float]]:
        """Returns what was measured at each step before it was saved, except for steps with damaged metadata."""
        found = {}
        for step in self.steps():
            with contextlib.suppress(DamagedCheckpoint):
                found[step] = self.meta(step).get(EVALUATION, {})
        return found

    def newest_meta(self) -> dict[str, Any] | None:
        """Returns the metadata of the newest step that has readable metadata, or None."""
        for step in reversed(self.steps()):
            with contextlib.suppress(DamagedCheckpoint):
                return self.meta(step)
        return None

    def restore_newest(
        self,
        params: PyTree,
        optimizer_state: PyTree | Callable[[int], PyTree],
        average: PyTree | None = None,
        among: Collection[int] | None = None,
    ) -> tuple[int, Restored] | None:
        """Restores the newest undamaged step (of those in `among`, if given) and returns it with its number, or None.

        The arguments are those of `restore`; optimizer_state may be a function of the step. Newer damaged steps are
        moved to damaged/ and a line on stderr reports it. Raises UserError, and moves nothing, when all steps are
        damaged. With several processes it moves the newest damaged step, unless that is the only one, and raises
        RunAgain.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps() if among is None else sorted(among)):
            try:
                wanted = optimizer_state(step) if callable(optimizer_state) else optimizer_state
                restored = self.restore(step, params, wanted, average)
            except DamagedCheckpoint as error:
                damaged[step] = error.why
                if jax.process_count() > 1 and step != min(self.steps()):
                    self._move_and_run_again(step, error.why)
                continue
            for bad, why in damaged.items():
                self._set_aside(bad, f"{why}; resuming from step {step}")
            return step, restored
        if damaged:
            newest = max(damaged)
            raise UserError(
                f"every checkpoint in {self.directory} is damaged (steps {', '.join(map(str, sorted(damaged)))}; "
                f"{newest}: {damaged[newest]}). Replace one with a good copy, or name another --workdir to start again"
            )
        return None

    def restore(self, step: int, params: PyTree, optimizer_state: PyTree, average: PyTree | None = None) -> Restored:
        """Reads a step straight into the memory that the shardings name, and verifies it.

        `params`, `optimizer_state` and `average` are trees of jax.ShapeDtypeStruct with shardings, in the structure to
        return (including optax's NamedTuples). An average of None is not read; one that the step does not hold is
        returned as None. Raises UserError for a tensor that is missing, extra, or of another shape or dtype, and
        DamagedCheckpoint for damaged files.
        """
        return restore(self.directory / str(step), params, optimizer_state, average)

    def wait(self) -> None:
        """Waits until the last save is on disk, or in the store. Raises its failure, as `save` describes."""
        with self._disk_errors_restored():
            self._manager.wait_until_finished()
        self._folder.wait()
        if self._saving is not None:
            self.write_best()
        self._saving = None

    def write_best(self) -> None:
        """Makes best.json name the best of the complete steps."""
        if self.best and jax.process_index() == 0 and (best := self.best.among(self.steps())) is not None:
            write_json(self.directory / BEST_FILE, self.best.described(best))

    def close(self) -> None:
        """Waits for the last save, then frees the background threads."""
        try:
            self.wait()
            self._folder.remove_old()
        finally:
            self._manager.close()
            self._folder.close()
            logging.getLogger("absl").removeFilter(self._quiet)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, NoLongerHeld):
            return  # the folder is another run's, which has removed what was being saved
        if kind is not None and issubclass(kind, Exception) and jax.process_count() > 1:
            return  # the error ends all processes, and closing would wait for those that have not failed
        self.close()

    def _set_aside(self, step: int, why: str) -> None:
        """Moves a damaged step away and reports it."""
        target = self._folder.set_aside(step)
        print(f"checkpoint {step} is damaged and was moved to {target}: {why}", file=sys.stderr, flush=True)
        self._manager.reload()
        if self.best:
            self.best.values.pop(step, None)

    def _move_and_run_again(self, step: int, why: str) -> NoReturn:
        """Ends a run of several processes: only one may have seen the damage, so they would resume from two steps."""
        with contextlib.suppress(FileNotFoundError):  # another process has moved it
            self._folder.set_aside(step)
        raise RunAgain(
            f"checkpoint {self.directory / str(step)} is damaged and was moved to {self._folder.damaged}: {why}. "
            "Run the same command on every host to resume from the checkpoint before it"
        )

    @contextlib.contextmanager
    def _disk_errors_restored(self) -> Iterator[None]:
        """Turns the storage library's text of an operating-system error back into an OSError; explains a store's."""
        written = self._folder.written
        then = "Run the same command again to resume from the checkpoint before it"
        with store_errors(written, f"write checkpoint {self._saving} in {written}", then):
            try:
                yield
            except ValueError as error:
                if is_stored(written) or (code := os_error_code(error)) is None:
                    raise
                step = "" if self._saving is None else str(self._saving)
                raise OSError(code, os.strerror(code), str(written / step)) from error


def restore(directory: Location, params: PyTree, optimizer_state: PyTree, average: PyTree | None = None) -> Restored:
    """Reads WORKDIR/checkpoints/STEP as Checkpoints.restore does, and leaves the workdir as it is."""
    document = read_meta(directory)
    tensors = document["tensors"]
    if OPTIMIZER not in tensors:
        raise UserError(
            f"checkpoint {directory} holds parameters but no optimizer state, so training cannot resume from it. "
            f"Start a new workdir with --config.init_from={directory.parent.parent}"
        )
    if AVERAGE not in tensors:
        average = None
    return Restored(
        params=read_tree(directory, PARAMS, tensors[PARAMS], params),
        optimizer_state=read_tree(directory, OPTIMIZER, tensors[OPTIMIZER], optimizer_state),
        average=None if average is None else read_tree(directory, AVERAGE, tensors[AVERAGE], average),
        meta=document["meta"],
    )


def _preservation_policy(keep: int, keep_every: int, best: Best | None) -> Any:
    """Returns Orbax's policy: the newest `keep` steps (0: all), the multiples of `keep_every` (0: none), the best."""
    parts: list[_policies.PreservationPolicy] = [_policies.LatestN(keep or None)]
    if keep_every:
        parts.append(_policies.EveryNSteps(keep_every))
    if best is not None:
        parts.append(best)
    return _policies.AnyPreservationPolicy(parts)
