"""The checkpoints of a workdir: Orbax behind one file.

Orbax writes a step under a temporary name, in the background, and renames it at the end, so a half-written
one is never seen. Beside the caller's meta each step keeps a fingerprint of every tensor, computed where the
tensor lives when it is saved and again when it is read.
"""

import contextlib
import itertools
import logging
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from bert_jax.command import RunAgain, UserError
from bert_jax.model.paths import unflatten
from bert_jax.storage.local import read_json, write_json
from bert_jax.train import preservation
from bert_jax.train.integrity import DamagedCheckpoint, describe, ignore_closed_loops, os_error_code, signature
from bert_jax.train.restore import AVERAGE, META, OPTIMIZER, PARAMS, named_leaves, read_into, read_meta

REMOVED = "removed"  # where steps that are no longer kept go, to be deleted
DAMAGED = "damaged"  # where steps go that cannot be read
BEST_FILE = "best.json"  # beside the steps: which of them is the best, by what
EVALUATION = "evaluation"  # in a step's meta: what was measured at that step


class Restored(NamedTuple):
    params: PyTree
    optimizer_state: PyTree
    average: PyTree | None
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one workdir, written asynchronously.

    The newest `keep` stay (0: all), those of steps that `keep_every` divides (0: none), and the one that is best by
    the held-out metric `best` (empty: none; eval_loss, eval_mlm_accuracy ...), which best.json beside them names.
    Every process of a run makes one and calls each method at the same point. Use it in a `with`, or close it.
    """

    def __init__(self, directory: str | Path, keep: int, keep_every: int = 0, best: str = "") -> None:
        self.best = preservation.Best(best, {}) if best else None
        policy = preservation.policy(keep, keep_every, self.best)
        ignore_closed_loops()
        self._quiet = _OneMessage()
        logging.getLogger("absl").addFilter(self._quiet)
        self.directory = Path(directory).absolute()
        # float32 weights hardly compress (by 8%), and zstd took nearly half of a save's processor time.
        trees = {item: ocp.PyTreeCheckpointHandler(use_compression=False) for item in (PARAMS, OPTIMIZER, AVERAGE)}
        self._manager = _Manager(
            self.directory,
            item_handlers={**trees, META: ocp.JsonCheckpointHandler()},
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy, cleanup_tmp_directories=True, todelete_subdir=REMOVED
            ),
        )
        self._saving: int | None = None
        self._replaced: list[int] = []
        self._remove_old()
        if self.best:
            for step, evaluation in self.evaluations().items():
                self.best.note(step, evaluation)
            if (file := self.directory / BEST_FILE).exists():  # may know of a step that was measured once it was saved
                self.best.recall(read_json(file), self.steps())

    def save(
        self,
        step: int,
        params: PyTree,
        optimizer_state: PyTree | None,
        meta: Mapping[str, Any],
        average: PyTree | None = None,
    ) -> None:
        """Begins to save; returns once the tensors may change (be donated). `meta` holds JSON values.

        What was measured at the step is meta["evaluation"]. A step that was saved already stays as it is. An
        optimizer_state of None is left out: a checkpoint to start from, not to go on from. So is an average of None.
        A failure of the save before is raised here or by wait: OSError for a full disk, naming the step, the older
        checkpoints whole.
        """
        while self._replaced:
            self._manager.delete(self._replaced.pop())  # the newest first, so that those that stand are of one run
        if step in self._manager.all_steps():
            return
        trees = {PARAMS: params, OPTIMIZER: optimizer_state, AVERAGE: average}
        named = {item: named_leaves(tree) for item, tree in trees.items() if tree is not None}
        document = {
            "meta": dict(meta),
            "tensors": {item: describe(tensors) for item, tensors in named.items()},
        }
        items = {item: ocp.args.PyTreeSave(unflatten(tensors)) for item, tensors in named.items()}
        signed = document | {"sha256": signature(document)}
        composite = ocp.args.Composite(**items, **{META: ocp.args.JsonSave(signed)})
        self.wait()  # for the save before, so that a failure of it is raised from here
        self._remove_old()
        if self.best:
            self.best.note(step, meta.get(EVALUATION, {}))
        self._saving = step
        with self._disk_explained():
            self._manager.save(step, args=composite, force=True)

    def measured(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Takes over what was measured at a step that was saved before that; where it makes it the best, for good."""
        if self.best:
            self.best.note(step, evaluation)
            self.write_best()

    def replace_after(self, step: int) -> list[int]:
        """Has the next save delete the checkpoints of later steps, none of which is the best any more; returns them."""
        self._replaced = [each for each in self.steps() if each > step]
        if self.best:
            for each in self._replaced:
                self.best.values.pop(each, None)
        return list(self._replaced)

    def steps(self) -> list[int]:
        """The steps that are whole, ascending; not one that is still being written."""
        return sorted(ocp.utils.checkpoint_steps(self.directory))

    def latest_step(self) -> int | None:
        """The newest whole step, None when there is none."""
        return max(self.steps(), default=None)

    def meta(self, step: int) -> dict[str, Any]:
        """What was said of a step when it was saved. Raises DamagedCheckpoint."""
        return read_meta(self.directory / str(step))["meta"]

    def evaluations(self) -> dict[int, dict[str, float]]:
        """What was measured at each step before it was saved; not of those whose meta is damaged."""
        found = {}
        for step in self.steps():
            with contextlib.suppress(DamagedCheckpoint):
                found[step] = self.meta(step).get(EVALUATION, {})
        return found

    def newest_meta(self) -> dict[str, Any] | None:
        """What was said of the newest step of which that can still be read; None when there is none."""
        for step in reversed(self.steps()):
            with contextlib.suppress(DamagedCheckpoint):
                return self.meta(step)
        return None

    def restore_newest(
        self,
        params: PyTree,
        optimizer_state: PyTree,
        average: PyTree | None = None,
        among: Collection[int] | None = None,
    ) -> tuple[int, Restored] | None:
        """The newest step (of those in `among`, if given) that is whole, and its number; None when there is none.

        See `restore` for the arguments.
        Damaged ones before it are moved to damaged/, which a line on stderr says. Raises UserError, and moves nothing,
        when all are damaged.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps() if among is None else sorted(among)):
            try:
                restored = self.restore(step, params, optimizer_state, average)
            except DamagedCheckpoint as error:
                damaged[step] = error.why
                if jax.process_count() > 1 and step != min(self.steps()):
                    self._leave_aside(step, error.why)
                continue
            for bad, why in damaged.items():
                self._set_aside(bad, f"{why}; going on from step {step}")
            return step, restored
        if damaged:
            newest = max(damaged)
            raise UserError(
                f"every checkpoint in {self.directory} is damaged (steps {', '.join(map(str, sorted(damaged)))}; "
                f"{newest}: {damaged[newest]}). Put a good copy in the place of one, or name another --workdir "
                "to start anew"
            )
        return None

    def restore(self, step: int, params: PyTree, optimizer_state: PyTree, average: PyTree | None = None) -> Restored:
        """Reads a step straight into the memory that the shardings name, and verifies it.

        `params`, `optimizer_state` and `average` are trees of jax.ShapeDtypeStruct with shardings, of the structure
        wanted back (optax's NamedTuples included). An average of None is not read; one that the step does not
        hold comes back as None. Raises UserError for a tensor that is missing, extra, or
        of another shape or dtype (named), and for damaged files (naming the checkpoint and the one before).
        """
        directory = self.directory / str(step)
        document = read_meta(directory)
        tensors = document["tensors"]
        if OPTIMIZER not in tensors:
            raise UserError(
                f"checkpoint {directory} holds parameters only, nothing to go on from. "
                f"Start a new workdir with --config.init_from={self.directory.parent}"
            )
        if AVERAGE not in tensors:
            average = None
        return Restored(
            params=read_into(directory, PARAMS, tensors[PARAMS], params),
            optimizer_state=read_into(directory, OPTIMIZER, tensors[OPTIMIZER], optimizer_state),
            average=None if average is None else read_into(directory, AVERAGE, tensors[AVERAGE], average),
            meta=document["meta"],
        )

    def wait(self) -> None:
        """Until the last save is on disk. Raises what made it fail, as `save` says."""
        with self._disk_explained():
            self._manager.wait_until_finished()
        if self._saving is not None:
            self.write_best()
        self._saving = None

    def write_best(self) -> None:
        """Has best.json name the best of the steps that are whole."""
        if self.best and jax.process_index() == 0 and (best := self.best.among(self.steps())) is not None:
            write_json(self.directory / BEST_FILE, self.best.described(best))

    def close(self) -> None:
        """Waits, then frees the background threads."""
        try:
            self.wait()
            self._remove_old()
        finally:
            self._manager.close()
            logging.getLogger("absl").removeFilter(self._quiet)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception) and jax.process_count() > 1:
            return  # it ends all processes, and closing would wait for those that have not failed
        self.close()

    def _set_aside(self, step: int, why: str) -> None:
        """Moves a damaged step out of the way, to damaged/STEP (or STEP-2 ...), and says so; one process does."""
        target = self._move_aside(step)
        print(f"checkpoint {step} is damaged and was moved to {target}: {why}", file=sys.stderr, flush=True)
        self._manager.reload()
        if self.best:
            self.best.values.pop(step, None)

    def _leave_aside(self, step: int, why: str) -> NoReturn:
        """Ends a run of several processes, of which one alone may have met the damage: they would part ways."""
        with contextlib.suppress(FileNotFoundError):  # another process has done it
            self._move_aside(step)
        raise RunAgain(
            f"checkpoint {self.directory / str(step)} is damaged and was moved to {self.directory / DAMAGED}: {why}. "
            "Run the same command on every host to go on from the one before"
        )

    def _move_aside(self, step: int) -> Path:
        folder = self.directory / DAMAGED
        names = itertools.chain([str(step)], (f"{step}-{number}" for number in itertools.count(2)))
        folder.mkdir(exist_ok=True)
        target = next(path for name in names if not (path := folder / name).exists())
        return (self.directory / str(step)).rename(target)

    def _remove_old(self) -> None:
        """Deletes what is no longer kept. It was renamed first: a step that stands is whole, whenever we are killed."""
        if jax.process_index() == 0:
            shutil.rmtree(self.directory / REMOVED, ignore_errors=True)

    @contextlib.contextmanager
    def _disk_explained(self) -> Iterator[None]:
        """Turns the storage library's text of an operating-system error back into the OSError that it was."""
        try:
            yield
        except ValueError as error:
            if (code := os_error_code(error)) is not None:
                step = "" if self._saving is None else str(self._saving)
                raise OSError(code, os.strerror(code), str(self.directory / step)) from error
            raise


class _Manager(ocp.CheckpointManager):
    """Asks nothing of jax's preemption service: whoever asks tells it a step, and train/distributed.py counts its own.

    With Orbax's numbers among ours, processes would agree to stop at a step that none of them comes to.
    """

    def reached_preemption(self, step: int) -> bool:
        return False


class _OneMessage(logging.Filter):
    """Drops the stack traces that Orbax's threads log of a failure which they also raise to the caller."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and "orbax" in record.pathname)
