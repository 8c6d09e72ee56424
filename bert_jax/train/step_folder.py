"""The folder of a workdir's checkpoints: where Orbax writes steps, where they are read, and how they leave."""

import itertools
from collections.abc import Callable, Collection

import jax

from bert_jax.storage.location import Location, is_stored, move_folder, remove_folder

REMOVED = "removed"  # the folder of steps that are no longer kept and wait for deletion
DAMAGED = "damaged"  # the folder of steps that cannot be read


class StepFolder:
    """A folder in which Orbax itself writes and removes steps: on a disk, or in Google Cloud Storage.

    directory   where complete steps are read
    written     where Orbax writes them: the same, unless stated otherwise
    """

    def __init__(self, directory: Location, written: Location | None = None) -> None:
        self.directory, self.written = directory, written or directory

    @property
    def damaged(self) -> Location:
        """Where damaged steps go."""
        # In a store, Orbax removes every folder next to the steps that has no mark.
        return (self.directory.parent if is_stored(self.directory) else self.directory) / DAMAGED

    def publish(self, step: int, wait_for_save: Callable[[], None], kept: Callable[[], Collection[int]]) -> None:
        """Starts to bring a step to `directory` as soon as Orbax has saved it. kept() returns the steps that stay."""

    def wait(self) -> None:
        """Waits until the last step is in `directory`. Raises what prevented that, once."""

    def remove(self, step: int) -> None:
        """Removes a step of which Orbax will be told to remove its own."""

    def set_aside(self, step: int) -> Location:
        """Moves a damaged step to damaged/STEP (or STEP-2, ...), and returns where it is now."""
        names = itertools.chain([str(step)], (f"{step}-{number}" for number in itertools.count(2)))
        if not is_stored(self.damaged):
            self.damaged.mkdir(exist_ok=True)
        target = next(path for name in names if not (path := self.damaged / name).exists())
        move_folder(self.directory / str(step), target)
        return target

    def remove_old(self) -> None:
        """Deletes steps that are no longer kept. They were renamed first: a visible step is complete after any kill."""
        if jax.process_index() == 0 and not is_stored(self.written):  # where Orbax deletes without renaming
            remove_folder(self.written / REMOVED)

    def close(self) -> None:
        """Frees what the folder has opened."""
