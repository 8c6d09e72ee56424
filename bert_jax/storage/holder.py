"""Lets one run at a time hold a folder: another run learns who holds it, and replaces a holder that has died.

FOLDER/holder.json names the holder. Two signs show whether it is alive:

lock    of the file (storage/local.py), which ends with the holder's process. Another process of the same machine always
        sees it, unless the file system has no locks.
lease   A thread of the holder renews the file's modification time every few seconds (`Times`). NFS, Lustre and mounted
        buckets may have no locks, or may not show them to other machines. There, a run takes the folder over once it
        has watched the file for a minute without a renewal. It compares no clocks of different machines.

A holder that was suspended for longer than its lease may have been replaced, so it calls `Hold.check` before it writes.

Only `_open`, `_look` and the methods `_take`, `_renew` and `remove` of `Hold` touch the file. In an object store, each
would be one request with a precondition on the generation of the object, and the lease would be the only sign.
"""

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, NamedTuple

from bert_jax.command import UserError
from bert_jax.storage.local import try_lock

HOLDER_FILE = "holder.json"
_BYTES = 512  # of the file, whoever holds it: a record is written in one piece and replaces another one completely

Report = Callable[[str], None]


class Held(UserError):
    """Another run holds the folder."""


class NoLongerHeld(UserError):
    """Another run has replaced this one as the holder of the folder."""


@dataclass(frozen=True)
class Times:
    """How long things take, in seconds."""

    renew: float = 5.0  # between two renewals of the lease
    lease: float = 60.0  # longer than a busy machine or a file server keeps a thread waiting
    ending: float = 3.0  # for a killed process, which keeps its lock until its memory is freed
    settle: float = 2.0  # without locks, two runs may write the file at the same moment; the last one holds the folder
    poll: float = 0.2  # between two looks at the file


TIMES = Times()


@dataclass(frozen=True)
class Record:
    """The content of holder.json: a process and where its process number is valid."""

    host: str
    process: int
    since: str
    boot: str  # identifies a machine from one start to the next
    pid_namespace: str  # of the process number: containers of one machine count their processes separately
    id: str

    @classmethod
    def of_this_process(cls) -> "Record":
        host = socket.gethostname()[:100]
        return cls(
            host=host,
            process=os.getpid(),
            since=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            boot=_boot_id() or host,
            pid_namespace=_pid_namespace(),
            id=os.urandom(8).hex(),
        )

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"

    def encoded(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).ljust(_BYTES - 1).encode() + b"\n"

    def has_ended(self, here: "Record", locked: bool) -> bool:
        """Whether the process is known to have ended. locked: `here` has the lock that it would have."""
        if self.boot != here.boot:
            return False
        return locked or (self.pid_namespace == here.pid_namespace and not _is_running(self.process))


class _Seen(NamedTuple):
    """holder.json as it was found; any two differ if the holder renewed it, or changed, between them."""

    content: bytes
    inode: int
    modified: int  # nanoseconds

    @property
    def record(self) -> Record | None:
        """Returns what the file says; None: it is empty or damaged, because its writer was interrupted."""
        try:
            return Record(**json.loads(self.content))
        except (ValueError, TypeError):
            return None


class Hold:
    """A folder that this process holds, until `release`. Raises Held if another run holds it.

    report   prints a line, if finding out whether another run is alive takes as long as its lease
    record   what the file says; this process, if not given
    """

    def __init__(self, folder: Path, report: Report, record: Record | None = None) -> None:
        self.folder, self._path = folder, folder / HOLDER_FILE
        self.thread = threading.get_ident()
        self._record, self._renew_seconds = record or Record.of_this_process(), TIMES.renew
        self._file = self._take(report)
        self._ended = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="holder", daemon=True)
        self._renewing.start()

    def check(self) -> None:
        """Raises NoLongerHeld if another run has replaced this one. Call it before writing into the folder."""
        if why := self._why_lost():
            raise NoLongerHeld(why)

    def release(self) -> None:
        """Lets the next run have the folder."""
        self._ended.set()
        self._renewing.join()
        self.remove()
        self._file.close()

    def remove(self) -> None:
        """Removes the file, unless it is another run's by now."""
        if not self._why_lost():
            with contextlib.suppress(OSError):  # a file that stays delays the next run at most
                self._path.unlink(missing_ok=True)

    def _take(self, report: Report) -> IO[bytes]:
        while True:
            file, locked = _open(self._path)
            with contextlib.ExitStack() as closing:
                closing.callback(file.close)
                if _wait_for_end(self._path, self._record, locked, report):
                    os.pwrite(file.fileno(), self._record.encoded(), 0)
                    os.truncate(file.fileno(), _BYTES)
                    os.fsync(file.fileno())
                    if not locked:
                        time.sleep(TIMES.settle)
                    if (seen := _look(self._path)) is not None:
                        if seen.content != self._record.encoded():
                            raise _held(self.folder, seen.record)
                        closing.pop_all()
                        return file

    def _renew(self) -> None:
        while not self._ended.wait(self._renew_seconds):
            if self._why_lost():
                return  # a renewal would be one of the other run's
            with contextlib.suppress(OSError):  # of a file server that fails for a moment: the next one may succeed
                os.utime(self._file.fileno())

    def _why_lost(self) -> str:
        """Returns a message if this run does not hold the folder any more; an empty string if it does.

        As long as the file cannot be read, it does: what is about to be written will fail as well.
        """
        try:
            seen = _look(self._path)
        except OSError:
            return ""
        stopped = "this run has stopped and wrote nothing more"
        if seen is None:
            return f"{self._path} was removed during training; {stopped}. Run the same command again to resume"
        if seen.content == self._record.encoded():
            return ""
        who = seen.record or "another run"
        return (
            f"{self.folder} was taken over by {who}, because this run did not show for {TIMES.lease:g} s that it was "
            f"alive; {stopped}. Wait until the other run ends, or stop it and run the same command again to resume"
        )


_held_here: dict[Path, Hold] = {}


@contextlib.contextmanager
def hold(folder: Path, report: Report) -> Iterator[Hold]:
    """Holds a folder, which is created; a function called meanwhile, in the same thread, may hold it again.

    Raises Held, which names the holder, if another run holds it. A folder into which nothing was written is removed.
    """
    key = Path(os.path.realpath(folder))
    outer = _held_here.get(key)
    if outer is not None and outer.thread == threading.get_ident():
        yield outer
        return
    is_new = not folder.exists()
    try:
        mine = Hold(folder, report)
        _held_here[key] = mine
        try:
            yield mine
        finally:
            del _held_here[key]
            mine.release()
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def release_all() -> None:
    """Lets other runs have all folders that this process holds. Call it only where the process ends at once."""
    for each in list(_held_here.values()):
        each.remove()


def _open(path: Path) -> tuple[IO[bytes], bool]:
    """Opens and locks holder.json. Returns False in addition if the file system has no locks. Raises Held."""
    until = time.monotonic() + TIMES.ending
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as closing:
            try:
                file = closing.enter_context(os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b"))
                locked = try_lock(file)
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    closing.pop_all()
                    return file, locked
            except FileNotFoundError:
                pass  # the previous holder has just removed it
            except BlockingIOError:
                seen = _look(path)
                if seen is not None and time.monotonic() > until:
                    raise _held(path.parent, seen.record) from None
        time.sleep(TIMES.poll / 4)


def _wait_for_end(path: Path, here: Record, locked: bool, report: Report) -> bool:
    """Waits until the run that holder.json names is known to have ended. Raises Held if it is alive.

    Returns False if the file has been removed meanwhile.
    """
    if (first := _look(path)) is None:
        return False
    holder = first.record
    if not first.content or (holder is not None and holder.has_ended(here, locked)):
        return True
    who = holder or "another run"
    report(f"{path.parent} was held by {who}; waiting for up to {TIMES.lease:g} s to see whether it still trains")
    until = time.monotonic() + TIMES.lease
    while time.monotonic() < until:
        time.sleep(TIMES.poll)
        if (seen := _look(path)) is None:
            return False
        if seen != first:
            raise _held(path.parent, seen.record or holder)
    return True


def _look(path: Path) -> _Seen | None:
    """Returns holder.json, or None if there is none. It opens the file, because NFS then asks the server."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            return _Seen(file.read(), status.st_ino, status.st_mtime_ns)
    except FileNotFoundError:
        return None


def _held(folder: Path, holder: Record | None) -> Held:
    who = f"another run: {holder}" if holder else "another run"
    return Held(f"{folder} is held by {who}. Wait until it ends or stop it, or choose another --workdir")


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    return True


def _boot_id() -> str:
    """Returns what Linux calls this start of the machine; an empty string on other systems."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
