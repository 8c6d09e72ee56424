"""Stages the checkpoints of a workdir in S3 on disk, because Orbax writes to disks and to Google Cloud Storage only.

Orbax saves a step into a folder of this machine. Then a thread uploads its files, and the mark of a complete step
last. A step is removed in the opposite order, so a kill at any instant leaves no step that counts as complete and is
not. Nothing that a killed process had staged is used again.

On disk, steps that are in the store are folders without tensors: Orbax decides by their names which steps are kept.
"""

import contextlib
import shutil
import threading
from collections.abc import Callable, Collection

from bert_jax.storage.location import Location, remove_folder, store_errors, upload_folder, write_file
from bert_jax.storage.scratch import scratch_folder
from bert_jax.train.held_workdir import CheckHeld
from bert_jax.train.integrity import saved_steps
from bert_jax.train.orbax_workarounds import BEGUN, MARK
from bert_jax.train.step_folder import StepFolder


class StagedFolder(StepFolder):
    """The steps of one folder of checkpoints in S3, and their places on disk in `written`. Used by one process.

    check_held   raises an error if another run has the workdir; called before a step is uploaded, and before
                 it is marked
    """

    def __init__(self, stored: Location, check_held: CheckHeld) -> None:
        self._opened = contextlib.ExitStack()
        super().__init__(stored, self._opened.enter_context(scratch_folder()) / "checkpoints")
        self._check_held = check_held
        self._uploading: threading.Thread | None = None
        self._failure: BaseException | None = None
        with self._explained("read"):
            self._remove_incomplete()
            self._known = set(saved_steps(stored))  # those of a run that replaces this one are never among them
            self.written.mkdir()
            for step in self._known:
                self._note_stored(step)

    def publish(self, step: int, wait_for_save: Callable[[], None], kept: Callable[[], Collection[int]]) -> None:
        """Starts to upload a step once Orbax has saved it, and then to remove the steps that it does not keep."""
        self._uploading = threading.Thread(
            target=self._upload, args=(step, wait_for_save, kept), name="upload checkpoint", daemon=True
        )
        self._uploading.start()

    def wait(self) -> None:
        """Waits until the last step is in the store. Raises the failure of its upload, once."""
        if self._uploading is not None:
            self._uploading.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def remove(self, step: int) -> None:
        """Removes a step from the store."""
        with self._explained(f"remove step {step} from"):
            (self.directory / str(step) / MARK).unlink(missing_ok=True)
            remove_folder(self.directory / str(step))
        self._known.discard(step)

    def set_aside(self, step: int) -> Location:
        """Moves a damaged step in the store, and forgets its place on disk."""
        target = super().set_aside(step)
        shutil.rmtree(self.written / str(step))
        self._known.discard(step)
        return target

    def close(self) -> None:
        """Removes everything on disk."""
        self._opened.close()

    def _upload(self, step: int, wait_for_save: Callable[[], None], kept: Callable[[], Collection[int]]) -> None:
        try:
            wait_for_save()
        except Exception:
            return  # the thread that trains waits for the save as well, and raises this
        staged, stored = self.written / str(step), self.directory / str(step)
        try:
            with self._explained(f"write checkpoint {step} in"):
                (staged / MARK).unlink(missing_ok=True)  # Orbax writes one on disk, too
                self._check_held()  # the upload replaces what another run may have put there
                upload_folder(staged, stored)
                self._check_held()
                write_file(stored / MARK, f"Checkpoint commit was successful to {stored}".encode())
            self._known.add(step)
            for item in staged.iterdir():
                if item.is_dir():
                    shutil.rmtree(item)
            for removed in sorted(self._known - set(kept())):
                self.remove(removed)
        except BaseException as error:
            self._failure = error

    def _note_stored(self, step: int) -> None:
        """Makes the place on disk of a step that is in the store. Orbax reads when it was saved."""
        (self.written / str(step)).mkdir()
        with contextlib.suppress(FileNotFoundError):
            (self.written / str(step) / BEGUN).write_bytes((self.directory / str(step) / BEGUN).read_bytes())

    def _remove_incomplete(self) -> None:
        """Removes what an interrupted upload or removal has left."""
        complete = saved_steps(self.directory)
        for step in self.directory.iterdir() if self.directory.is_dir() else ():
            if step.name.isdecimal() and int(step.name) not in complete:
                remove_folder(step)

    def _explained(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Explains why the store cannot be used."""
        then = "Run the same command again to resume from the newest complete checkpoint"
        return store_errors(self.directory, f"{what} {self.directory}", then)
