"""Lets one run at a time hold a folder, on disk or in an object store.

`hold` is the entry point. FOLDER/holder.json names the holder; another run learns from it who holds the folder, and
takes over from a holder that has ended. Two signs show whether a holder is alive:

lock    of the file (storage/files.py); it ends with the holder's process. Another process of the same machine always
        sees it, unless the file system has no locks.
lease   A thread of the holder renews the file's modification time every few seconds (`Times`). NFS, Lustre and
        mounted buckets may have no locks, or may not show them to other machines. There, a run takes the folder over
        once it has watched the file for a minute without a renewal. It compares no clocks of different machines.

A holder that was suspended for longer than its lease may have been replaced, so it calls `Hold.check` before it writes.
In an object store there is no lock: `StoredHold` writes, renews and removes the object by requests that expect its
version, of which the store grants only one. `Objects`, at the end, sends them.
"""

import contextlib
import dataclasses
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, runtime_checkable

import tensorstore

from bert_jax.errors import RunAgain, UserError
from bert_jax.storage.files import try_lock
from bert_jax.storage.location import S3, Location, bucket_and_name, file_system, store_of
from bert_jax.storage.remote import first_line, is_denied

RECORD_BYTES = 512  # of any record: it is written in one piece and replaces another one completely


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
        return json.dumps(dataclasses.asdict(self)).ljust(RECORD_BYTES - 1).encode() + b"\n"

    def has_ended(self, here: "Record", locked: bool) -> bool:
        """Whether the process is known to have ended. locked: `here` has the lock that it would have."""
        if self.boot != here.boot:
            return False
        return locked or (self.pid_namespace == here.pid_namespace and not _is_running(self.process))


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


HOLDER_FILE = "holder.json"

Report = Callable[[str], None]


class Held(UserError):
    """Another run holds the folder."""


class NoLongerHeld(UserError):
    """Another run has replaced this one as the holder of the folder."""


@dataclass(frozen=True)
class Times:
    """How long things take, in seconds."""

    renew: float = 5.0  # between two renewals of the lease
    renew_stored: float = 15.0  # ... in an object store, where each is a request that costs money
    lease: float = 60.0  # longer than a busy machine or a file server keeps a thread waiting
    ending: float = 3.0  # for a killed process, which keeps its lock until its memory is freed
    settle: float = 2.0  # without locks, two runs may write the file at the same moment; the last one holds the folder
    poll: float = 0.2  # between two looks at the file
    poll_stored: float = 1.0  # ... in an object store


TIMES = Times()


class Seen(NamedTuple):
    """holder.json as it was found; any two differ if the holder renewed it, or changed, between them."""

    content: bytes
    version: Any  # inode and modification time; of an object in a store, its generation

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

    def __init__(self, folder: Location, report: Report, record: Record | None = None) -> None:
        self.folder = folder
        self.thread = threading.get_ident()
        self._record, self._renew_seconds = record or Record.of_this_process(), self._between_renewals()
        self._take(report)
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
        self._close()

    def remove(self) -> None:
        """Removes the file, unless it is another run's by now."""
        if not self._why_lost():
            with contextlib.suppress(OSError):  # a file that stays delays the next run at most
                self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return Path(self.folder / HOLDER_FILE)

    def _between_renewals(self) -> float:
        return TIMES.renew

    def _take(self, report: Report) -> None:
        while True:
            file, locked = _open(self._path)
            with contextlib.ExitStack() as closing:
                closing.callback(file.close)  # unless the folder is taken: closing it releases the lock
                if self._wait_for_end(locked, report, TIMES.poll) is not None:
                    # Written in place, because a new file would have another lock than the one that others wait for.
                    os.pwrite(file.fileno(), self._record.encoded(), 0)
                    os.truncate(file.fileno(), RECORD_BYTES)
                    os.fsync(file.fileno())
                    if not locked:
                        time.sleep(TIMES.settle)
                    if (seen := self._look()) is not None:
                        if seen.content != self._record.encoded():
                            raise _held(self.folder, seen.record)
                        closing.pop_all()
                        self._file = file
                        return

    def _renew(self) -> None:
        while not self._ended.wait(self._renew_seconds):
            if self._why_lost():
                return  # a renewal would be one of the other run's
            self._touch()

    def _touch(self) -> None:
        """Renews the lease once, if the file or the store can be reached."""
        with contextlib.suppress(OSError):  # of a file server that fails for a moment: the next one may succeed
            os.utime(self._file.fileno())

    def _close(self) -> None:
        self._file.close()

    def _look(self) -> Seen | None:
        """Returns holder.json, or None if there is none. Raises OSError if it cannot be read."""
        return _look(self._path)

    def _wait_for_end(self, locked: bool, report: Report, poll: float) -> Seen | None:
        """Waits until the run that holder.json names is known to have ended, and returns the file. Raises Held if not.

        Returns None if the file does not exist, or has been removed meanwhile.
        """
        if (first := self._look()) is None:
            return None
        holder = first.record
        if not first.content or (holder is not None and holder.has_ended(self._record, locked)):
            return first
        who = holder or "another run"
        report(f"{self.folder} was held by {who}; waiting for up to {TIMES.lease:g} s to see whether it still trains")
        until = time.monotonic() + TIMES.lease
        while time.monotonic() < until:
            time.sleep(poll)
            if (seen := self._look()) is None:
                return None
            if seen != first:
                raise _held(self.folder, seen.record or holder)
        return first

    def _why_lost(self) -> str:
        """Returns a message if this run does not hold the folder any more; an empty string if it does.

        As long as the file cannot be read, it does: what is about to be written will fail as well.
        """
        try:
            seen = self._look()
        except OSError:
            return ""
        stopped = "this run has stopped and wrote nothing more"
        if seen is None:
            file = self.folder / HOLDER_FILE
            return f"{file} was removed during training; {stopped}. Run the same command again to resume"
        if seen.content == self._record.encoded():
            return ""
        who = seen.record or "another run"
        return (
            f"{self.folder} was taken over by {who}, because this run did not show for {TIMES.lease:g} s that it was "
            f"alive; {stopped}. Wait until the other run ends, or stop it and run the same command again to resume"
        )


class StoredHold(Hold):
    """A folder in an object store that this process holds, with a lease and no lock. See Hold.

    The store grants one of several requests that expect the same version of the object. So two runs cannot take the
    folder at the same time, and a holder that was suspended and replaced can neither renew its lease nor remove the
    other's object.
    """

    def _between_renewals(self) -> float:
        return TIMES.renew_stored

    def _take(self, report: Report) -> None:
        self._objects = open_objects(self.folder)
        self._writing = threading.Lock()
        try:
            while not self._write(self._wait_for_end(False, report, TIMES.poll_stored)):
                pass  # another run was faster
        except OSError as error:
            why = f"{self.folder / HOLDER_FILE}: {first_line(error)}. Check credentials and network"
            raise (UserError(why) if is_denied(error) else RunAgain(why)) from None

    def remove(self) -> None:
        self._replace(None)  # an object that stays delays the next run at most

    def _touch(self) -> None:
        self._replace(self._record.encoded())

    def _replace(self, content: bytes | None) -> None:
        """Writes or removes the object, if it is this run's and the store can be reached."""
        with contextlib.suppress(OSError), self._writing:
            seen = self._look()
            if seen is not None and seen.content == self._record.encoded():
                self._objects.write(HOLDER_FILE, content, seen.version)

    def _close(self) -> None:
        pass

    def _look(self) -> Seen | None:
        found = self._objects.read(HOLDER_FILE)
        return None if found is None else Seen(*found)

    def _write(self, replaced: Seen | None) -> bool:
        """Writes the record in place of what was seen; returns False if the object has changed since."""
        self._objects.write(HOLDER_FILE, self._record.encoded(), None if replaced is None else replaced.version)
        seen = self._look()
        return seen is not None and seen.content == self._record.encoded()


_held_here: dict[str, Hold] = {}


@contextlib.contextmanager
def hold(folder: Location, report: Report) -> Iterator[Hold]:
    """Holds a folder, which is created; a function called meanwhile, in the same thread, may hold it again.

    Raises Held, which names the holder, if another run holds it. A folder into which nothing was written is removed.
    """
    key = os.path.realpath(folder) if isinstance(folder, Path) else str(folder)
    outer = _held_here.get(key)
    if outer is not None and outer.thread == threading.get_ident():
        yield outer
        return
    is_new = isinstance(folder, Path) and not folder.exists()
    try:
        mine = (Hold if isinstance(folder, Path) else StoredHold)(folder, report)
        _held_here[key] = mine
        try:
            yield mine
        finally:
            del _held_here[key]
            mine.release()
    finally:
        if is_new and isinstance(folder, Path):
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


def _look(path: Path) -> Seen | None:
    """Returns holder.json, or None if there is none. It opens the file, because NFS then asks the server."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            return Seen(file.read(), (status.st_ino, status.st_mtime_ns))
    except FileNotFoundError:
        return None


def _held(folder: Location, holder: Record | None) -> Held:
    who = f"another run: {holder}" if holder else "another run"
    return Held(f"{folder} is held by {who}. Wait until it ends or stop it, or choose another --workdir")


# Objects in a store that are read with their version, and written only if they still have it.
#
# The store grants one of several requests that expect the same version: a generation in Google Cloud Storage
# (cloud.google.com/storage/docs/request-preconditions), an ETag in S3
# (docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-requests.html).

_ABSENT = b"\x02"  # what tensorstore calls the generation of an object that does not exist
_ANSWER_SECONDS = 15.0  # for a request with its repetitions; a renewal and the wait for it are shorter than a lease
_NOT_GRANTED = ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey")  # S3's codes for another version
_NONCE_BITS = 64


class Object(NamedTuple):
    """An object as it was read."""

    content: bytes
    version: Any


@runtime_checkable
class Objects(Protocol):
    """The objects of a folder in a store. Both methods raise OSError where the store refuses or does not answer."""

    def read(self, name: str) -> Object | None:
        """Returns an object; None: it does not exist."""

    def write(self, name: str, content: bytes | None, expected: Any) -> None:
        """Writes an object, or removes it (None), if its version is the expected one (None: it does not exist).

        Nothing is returned, because an answer would not decide: of a request that is repeated because its answer was
        lost, the second one fails.
        """


def open_objects(folder: Location) -> Objects:
    """Returns the objects of a folder in a store by name, whether it exists or not."""
    bucket, name = bucket_and_name(folder)
    if store_of(folder) is S3:
        return S3Objects(file_system(folder), bucket, name)
    return GoogleObjects(tensorstore.KvStore.open({"driver": "gcs", "bucket": bucket, "path": f"{name}/"}).result())


class GoogleObjects:
    """Objects by tensorstore, which Orbax reads and writes arrays with. It repeats requests that fail."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def read(self, name: str) -> Object | None:
        try:
            found = self._store.read(name).result(timeout=_ANSWER_SECONDS)
        except (ValueError, TimeoutError) as error:  # ValueError: whatever the store refuses
            raise OSError(f"cannot read: {error}") from error
        return Object(found.value, found.stamp.generation) if found.state == "value" else None

    def write(self, name: str, content: bytes | None, expected: Any) -> None:
        condition = _ABSENT if expected is None else expected
        try:
            self._store.write(name, content, if_equal=condition).result(timeout=_ANSWER_SECONDS)
        except (ValueError, TimeoutError) as error:
            raise OSError(f"cannot write: {error}") from error


class S3Objects:
    """Objects by s3fs, whose client repeats requests that fail.

    An ETag is a hash of the content. So that equal contents, as of two renewals of a lease, have different versions,
    each write appends random white space, which a read removes.
    """

    def __init__(self, files: Any, bucket: str, folder: str) -> None:
        self._files, self._bucket, self._folder = files, bucket, folder

    def read(self, name: str) -> Object | None:
        from fsspec.asyn import sync

        try:
            answer = self._request("read", "get_object", name)
        except FileNotFoundError:
            return None
        try:
            content = sync(self._files.loop, answer["Body"].read, timeout=_ANSWER_SECONDS)
        except Exception as error:  # a connection that ends early has errors of several packages
            raise OSError(f"cannot read: {first_line(error)}") from error
        return Object(content[:-_NONCE_BITS], answer["ETag"])

    def write(self, name: str, content: bytes | None, expected: Any) -> None:
        condition = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected}
        try:
            if content is None:
                self._request("remove", "delete_object", name, **condition)
            else:
                nonce = format(random.SystemRandom().getrandbits(_NONCE_BITS), f"0{_NONCE_BITS}b")
                blank = nonce.replace("0", " ").replace("1", "\t").encode()
                self._request("write", "put_object", name, Body=content + blank, **condition)
        except OSError as error:
            if _code(error) not in _NOT_GRANTED:
                raise

    def _request(self, what: str, method: str, name: str, **arguments: Any) -> Any:
        """Sends a request of S3's interface. Raises OSError."""
        from botocore.exceptions import BotoCoreError

        key = f"{self._folder}/{name}"
        try:
            return self._files.call_s3(method, Bucket=self._bucket, Key=key, timeout=_ANSWER_SECONDS, **arguments)
        except FileNotFoundError:
            raise
        except (BotoCoreError, OSError) as error:
            raise OSError(f"cannot {what}: {error}") from error


def _code(error: BaseException | None) -> str | None:
    """Returns S3's code for an error, which s3fs has translated."""
    while error is not None:
        if isinstance(answer := getattr(error, "response", None), dict):
            return str(answer.get("Error", {}).get("Code"))
        error = error.__cause__
    return None
