"""Holds a workdir for one run, so that a second run started on it is refused. Process 0 holds it for all processes."""

import contextlib
from collections.abc import Callable, Iterator

from bert_jax.command import UserError
from bert_jax.progress import print_note
from bert_jax.storage import holder
from bert_jax.storage.location import Location, check_access
from bert_jax.train import distributed

CheckHeld = Callable[[], None]


@contextlib.contextmanager
def held_workdir(workdir: Location) -> Iterator[CheckHeld]:
    """Holds a workdir while it is open, and yields a function to call before anything is written.

    That function raises storage.holder.NoLongerHeld if another run has replaced this one, which can happen to a run
    that was suspended. Raises UserError for a workdir that another run holds, or that cannot be one.
    """
    check_workdir(workdir)
    if not distributed.is_primary():
        yield _held_by_process_0
        return
    with holder.hold(workdir, print_note) as mine:
        yield mine.check


def check_workdir(workdir: Location) -> None:
    """Raises UserError for a workdir that is a file, or in a bucket that this process cannot read."""
    check_access(workdir)
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir {workdir} is a file; name a folder")


def _held_by_process_0() -> None:
    """Another process checks, and its failure ends this one."""
