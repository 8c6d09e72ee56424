"""Holds a workdir for one run, so that a second run started on it is refused. Process 0 holds it for all processes."""

import contextlib
from collections.abc import Callable, Iterator

import jax

from bert_jax.command import UserError
from bert_jax.progress import print_note
from bert_jax.storage import holder
from bert_jax.storage.location import Location, store_errors
from bert_jax.storage.stores import S3, check_access, store_of
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
    """Raises UserError for a workdir that is a file, in a bucket that this process cannot read, or in S3 if the run has
    several processes.
    """
    if store_of(workdir) is S3 and jax.process_count() > 1:
        raise UserError(
            f"--workdir {workdir}: a run of several processes cannot keep its checkpoints in S3, because each process "
            "stages its part of a checkpoint on its own disk. Use gs://BUCKET/NAME, or a folder that all hosts share"
        )
    check_access(workdir)
    with store_errors(workdir, f"read {workdir}"):
        if workdir.exists() and not workdir.is_dir():
            raise UserError(f"--workdir {workdir} is a file; name a folder")


def _held_by_process_0() -> None:
    """Another process checks, and its failure ends this one."""
