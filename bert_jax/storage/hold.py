"""Lets one run at a time hold a folder, on disk or in an object store. `hold` is the entry point.

FOLDER/holder.json names the holder. From it another run learns who holds the folder, and takes over if the holder has
ended, as it has if this run is a later attempt of the same job of a scheduler. On disk, a lock on this file ends with
the holder's process, and a lease shows other machines that it is alive. In an object store there is only the lease,
whose age the store's clock tells, kept by requests that expect the object's version (`GoogleObjects`, `S3Objects`). A
holder that was suspended may have been replaced, so it calls `Hold.check` before it writes.
"""

import contextlib
import dataclasses
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias, cast

import tensorstore

from bert_jax.errors import RunAgain, UserError
from bert_jax.storage.files import try_lock
from bert_jax.storage.location import S3, Location, bucket_and_name, file_system, find_store
from bert_jax.storage.remote import first_line, is_denied, with_causes

HOLDER_FILE = "holder.json"
RECORD_BYTES = 512  # size of every record, so that one written in place replaces another one completely

Report = Callable[[str], None]


@dataclass(frozen=True)
class Record:
    """The content of holder.json: a process, and the machine and namespace in which its number is valid."""

    host: str
    process: int
    since: str
    boot: str  # identifies a machine from one start to the next
    pid_namespace: str  # containers on one machine number their processes separately
    id: str
    job: str = ""  # the scheduler's, which starts it again; empty: unknown
    attempt: int = 0  # how often it has been started again

    @classmethod
    def of_this_process(cls) -> "Record":
        # Cut, so that the record fits into RECORD_BYTES.
        host = socket.gethostname()[:100]
        boot, pid_namespace = host, ""
        with contextlib.suppress(OSError):  # only Linux has these files
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or host
        with contextlib.suppress(OSError):
            pid_namespace = os.readlink("/proc/self/ns/pid")
        since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        job, attempt = scheduled(os.environ)
        return cls(host, os.getpid(), since, boot, pid_namespace, os.urandom(8).hex(), job, attempt)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"

    def encoded(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).ljust(RECORD_BYTES - 1).encode() + b"\n"

    def has_ended(self, here: "Record", locked: bool) -> bool:
        """Whether the process has certainly ended. `locked`: `here` got the lock, which a live process would hold."""
        # A scheduler ends an attempt of a job before it starts the next one.
        if self.job and self.job == here.job and self.attempt < here.attempt:
            return True
        # Another machine's processes cannot be seen here, and its locks may not show.
        if self.boot != here.boot:
            return False
        if not locked and self.pid_namespace == here.pid_namespace:
            try:
                # Signal 0 only asks whether the process exists. Its number may belong to a new process by now, so only
                # the answer "no such process" is certain.
                os.kill(self.process, 0)
            except ProcessLookupError:
                return True
            except PermissionError:  # it runs as another user
                pass
        return locked


def scheduled(environment: Mapping[str, str]) -> tuple[str, int]:
    """Returns the job and the attempt of a process, as JobSet and Slurm number them; ("", 0) if they are unknown.

    JobSet writes both into labels and annotations, from which the manifest sets the variables (docs/scaling.md).
    """
    for kind, parts, attempt in (
        ("jobset", ("JOBSET_UID", "JOBSET_NAME"), "JOBSET_RESTART_ATTEMPT"),
        ("slurm", ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID"), "SLURM_RESTART_COUNT"),
    ):
        number = environment.get(attempt, "0")  # Slurm sets its count at the first restart
        if parts[1] in environment and number.isdecimal():
            return ":".join((kind, *(environment.get(part, "") for part in parts)))[-100:], int(number)
    return "", 0


class Held(UserError):
    """Another run holds the folder."""


class NoLongerHeld(UserError):
    """Another run has replaced this one as the folder's holder."""


@dataclass(frozen=True)
class Times:
    """Durations in seconds."""

    renew: float = 5.0  # between two renewals of the lease
    renew_stored: float = 15.0  # ... in an object store, where each is a request that costs money
    lease: float = 60.0  # longer than a busy machine or a file server keeps a thread waiting
    ending: float = 3.0  # for a killed process, which keeps its lock until its memory is freed
    settle: float = 2.0  # without locks, two runs may write the file at the same moment; the last one holds the folder
    poll: float = 0.2  # between two looks at the file
    poll_stored: float = 1.0  # ... in an object store


TIMES = Times()


class Seen(NamedTuple):
    """holder.json or another object as it was read. Two differ if it was written or renewed between them."""

    content: bytes
    version: Any  # inode and modification time; in a store the object's generation or ETag

    @property
    def record(self) -> Record | None:
        """The record in holder.json; None if it is empty or damaged, because its writer was interrupted."""
        try:
            return Record(**json.loads(self.content))
        except (ValueError, TypeError):
            return None


class Hold:
    """A folder that this process holds until `release`.

    A thread renews the lease: the modification time of holder.json. The file system's locks may be missing, or may not
    show on other machines (NFS, Lustre, mounted buckets). There a run takes the folder over once it has watched the
    file for a minute without a renewal, so clocks of different machines are never compared.

    Args:
        report: prints a line if it takes as long as a lease to find out whether another run is alive.
        record: the content of holder.json; by default, this process.

    Raises:
        Held: another run holds the folder.
    """

    def __init__(self, folder: Location, report: Report, record: Record | None = None) -> None:
        self.folder = folder
        self.thread = threading.get_ident()
        self._record = record or Record.of_this_process()
        self._renew_seconds = TIMES.renew if isinstance(folder, Path) else TIMES.renew_stored
        self._closing = contextlib.ExitStack()  # closes the locked file
        self._take(report)
        self._ended = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="holder", daemon=True)
        self._renewing.start()

    def check(self) -> None:
        """Checks that this run still holds the folder. Call it before you write into the folder.

        Raises:
            NoLongerHeld: another run has replaced this one, or holder.json was removed.
        """
        if why := self._why_lost():
            raise NoLongerHeld(why)

    def release(self) -> None:
        """Lets the next run have the folder."""
        # The thread ends first, so that no renewal follows the removal. The lock is released last, so that the file
        # removed is not the next holder's.
        self._ended.set()
        self._renewing.join()
        self.remove()
        self._closing.close()

    def remove(self) -> None:
        """Removes holder.json, unless it names another run by now."""
        if not self._why_lost():
            with contextlib.suppress(OSError):  # a file that stays delays the next run at most
                self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return Path(self.folder / HOLDER_FILE)

    def _take(self, report: Report) -> None:
        while True:
            file, locked = self._open()
            with contextlib.ExitStack() as closing:
                closing.callback(file.close)  # unless the folder is taken: closing it releases the lock
                # None: holder.json was removed meanwhile, so a new file, with another lock, may have its name.
                if self._wait_for_end(locked, report, TIMES.poll) is None:
                    continue
                # Written in place: a new file would have another lock than the one that other runs wait for.
                os.pwrite(file.fileno(), self._record.encoded(), 0)
                # A damaged file may be longer than a record.
                os.truncate(file.fileno(), RECORD_BYTES)
                os.fsync(file.fileno())
                # Without locks, another run may have read the file before this write. Whoever wrote last holds it.
                if not locked:
                    time.sleep(TIMES.settle)
                if (seen := self._look()) is not None:
                    if seen.content != self._record.encoded():
                        raise self._held(seen.record)
                    self._file, self._closing = file, closing.pop_all()
                    return

    def _open(self) -> tuple[IO[bytes], bool]:
        """Opens and locks holder.json; also returns whether the file system has locks. Raises Held."""
        until = time.monotonic() + TIMES.ending
        while True:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as closing:
                try:
                    descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
                    file = closing.enter_context(os.fdopen(descriptor, "r+b"))
                    locked = try_lock(file)
                    # The holder may have removed the file between our open and our lock, and a lock on a removed file
                    # keeps nobody out.
                    if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                        closing.pop_all()
                        return file, locked
                except FileNotFoundError:
                    pass  # the previous holder has just removed it
                except BlockingIOError:
                    if (seen := self._look()) is not None and time.monotonic() > until:
                        raise self._held(seen.record) from None
            time.sleep(TIMES.poll / 4)

    def _renew(self) -> None:
        # After the other run has replaced this one, a renewal would prolong the other's lease.
        while not self._ended.wait(self._renew_seconds) and not self._why_lost():
            self._touch()

    def _touch(self) -> None:
        """Renews the lease once, if the file or the store can be reached."""
        with contextlib.suppress(OSError):  # a file server may fail for a moment, and the next renewal succeed
            # By the descriptor, so that a file that has replaced this one is not renewed.
            os.utime(self._file.fileno())

    def _look(self) -> Seen | None:
        """Reads holder.json; None if it does not exist. Raises OSError if it cannot be read."""
        try:
            with self._path.open("rb") as file:  # NFS asks its server when a file is opened
                status = os.fstat(file.fileno())
                return Seen(file.read(), (status.st_ino, status.st_mtime_ns))
        except FileNotFoundError:
            return None

    def _age(self) -> float:
        """Returns the seconds since the last renewal, as far as a clock knows them; at least 0."""
        return 0.0  # a machine's clock may differ from the file server's

    def _held(self, holder: Record | None) -> Held:
        who = f"another run: {holder}" if holder else "another run"
        return Held(f"{self.folder} is held by {who}. Wait until it ends or stop it, or choose another --workdir")

    def _wait_for_end(self, locked: bool, report: Report, poll: float) -> Seen | None:
        """Waits until the run in holder.json is known to have ended. Raises Held if it is alive.

        Returns:
            holder.json, or None if it does not exist or has been removed meanwhile.
        """
        if (first := self._look()) is None:
            return None
        holder = first.record
        # `_open` creates an empty file, which names no holder.
        if not first.content or (holder is not None and holder.has_ended(self._record, locked)):
            return first
        who, seconds = holder or "another run", TIMES.lease - self._age()
        if seconds <= 0:
            return first
        report(f"{self.folder} was held by {who}; waiting for up to {seconds:.0f} s to see whether it still trains")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(poll)
            if (seen := self._look()) is None:
                return None
            if seen != first:
                raise self._held(seen.record or holder)
        return first

    def _why_lost(self) -> str:
        """Explains why this run does not hold the folder any more; empty if it does.

        It still does if the file cannot be read: the next write will fail as well.
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
    """A folder in an object store that this process holds, with a lease and no lock; see `Hold`.

    If several requests expect the same version of an object, the store grants one. So two runs cannot take the folder
    at the same time, and a suspended holder, once replaced, can neither renew its lease nor remove the new holder's
    object.
    """

    def _take(self, report: Report) -> None:
        self._objects = open_objects(self.folder)
        # `release_all` may remove the object while the thread renews it. A renewal between the look and the removal
        # would change the version, and the store would refuse the removal.
        self._writing = threading.Lock()
        written = False
        try:
            # Another run may be faster. Only a look afterwards tells whose record the store granted.
            while not written:
                seen = self._wait_for_end(False, report, TIMES.poll_stored)
                self._objects.write(HOLDER_FILE, self._record.encoded(), seen and seen.version)
                seen = self._look()
                written = seen is not None and seen.content == self._record.encoded()
        except OSError as error:
            why = f"{self.folder / HOLDER_FILE}: {first_line(error)}. Check credentials and network"
            raise (UserError(why) if is_denied(error) else RunAgain(why)) from None

    def remove(self) -> None:
        self._replace(None)  # an object that stays delays the next run at most

    def _touch(self) -> None:
        self._replace(self._record.encoded())

    def _replace(self, content: bytes | None) -> None:
        """Writes or removes the object, if it is still this run's and the store can be reached."""
        with contextlib.suppress(OSError), self._writing:
            seen = self._look()
            if seen is not None and seen.content == self._record.encoded():
                self._objects.write(HOLDER_FILE, content, seen.version)

    def _look(self) -> Seen | None:
        return self._objects.read(HOLDER_FILE)

    def _age(self) -> float:
        return max(self._objects.age(HOLDER_FILE), 0.0)


_held_here: dict[str, Hold] = {}


@contextlib.contextmanager
def hold(folder: Location, report: Report) -> Iterator[Hold]:
    """Creates and holds a folder. The thread that holds it may call this again, and gets the same hold.

    A new folder is removed at the end if it is empty.

    Raises:
        Held: another run holds the folder. The message names it.
    """
    # Links and relative paths to one folder must find the same hold: a second lock in this process would be refused.
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
    """Lets other runs have all folders that this process holds. Call it only if the process ends at once."""
    for held in list(_held_here.values()):
        held.remove()


# Objects in a store. They are read with their version, and written only if they still have it.
#
# The version is a generation in Google Cloud Storage (cloud.google.com/storage/docs/request-preconditions), an ETag in
# S3 (docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-requests.html).

_ABSENT = b"\x02"  # tensorstore's generation for an object that does not exist
_ANSWER_SECONDS = 15.0  # for a request with its repetitions; a renewal and the wait for it are shorter than a lease
_NOT_GRANTED = ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey")  # S3's codes for another version
_NONCE_BITS = 64


@contextlib.contextmanager
def _os_errors(action: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turns a client's errors into OSError, except FileNotFoundError for a missing object."""
    try:
        yield
    except FileNotFoundError:
        raise
    except kinds as error:
        raise OSError(f"cannot {action}: {first_line(error)}") from error


class GoogleObjects:
    """Objects by tensorstore, with which Orbax reads and writes arrays. It repeats requests that fail."""

    def __init__(self, store: Any, folder: Location | None = None) -> None:
        self._store, self._folder = store, folder

    def age(self, name: str) -> float:
        """Returns the seconds since an object was written, by the store's clock; 0 if it is gone or does not answer."""
        if self._folder is None:
            return 0.0
        bucket, folder = bucket_and_name(self._folder)
        with contextlib.suppress(Exception):  # of several packages; without an answer, the caller waits for a lease
            headers, content = file_system(self._folder).call("GET", "b/{}/o/{}", bucket, f"{folder}/{name}")
            now = parsedate_to_datetime(headers.get("Date") or headers["date"])
            return (now - datetime.fromisoformat(json.loads(content)["updated"])).total_seconds()
        return 0.0

    def read(self, name: str) -> Seen | None:
        """Reads an object.

        Returns:
            None if the object does not exist.

        Raises:
            OSError: the store refuses or does not answer.
        """
        with _os_errors("read", ValueError, TimeoutError):  # ValueError: the store refuses
            answer = self._store.read(name).result(timeout=_ANSWER_SECONDS)
        return Seen(answer.value, answer.stamp.generation) if answer.state == "value" else None

    def write(self, name: str, content: bytes | None, expected: Any) -> None:
        """Writes an object if its version is the expected one.

        Nothing is returned, because the answer may mislead: if it is lost, the client repeats the request, and the
        second one fails although the first one succeeded. Read the object to learn which write won.

        Args:
            content: None removes the object.
            expected: None if the object should not exist yet.

        Raises:
            OSError: the store refuses or does not answer.
        """
        with _os_errors("write", ValueError, TimeoutError):
            condition = _ABSENT if expected is None else expected
            self._store.write(name, content, if_equal=condition).result(timeout=_ANSWER_SECONDS)


class S3Objects:
    """Objects by s3fs, with the interface of GoogleObjects. Its client repeats requests that fail.

    An ETag is a hash of the content. So that equal contents, such as two renewals of a lease, have different versions,
    each write appends random white space, which a read removes.
    """

    def __init__(self, files: Any, bucket: str, folder: str) -> None:
        self._files, self._bucket, self._folder = files, bucket, folder

    def age(self, name: str) -> float:
        with contextlib.suppress(OSError, KeyError):
            answer = self._request("read", "head_object", name)
            now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
            return cast(float, (now - answer["LastModified"]).total_seconds())
        return 0.0

    def read(self, name: str) -> Seen | None:
        from fsspec.asyn import sync

        try:
            answer = self._request("read", "get_object", name)
            with _os_errors("read", Exception):  # a connection that ends early raises errors of several packages
                content = sync(self._files.loop, answer["Body"].read, timeout=_ANSWER_SECONDS)
        except FileNotFoundError:
            return None
        return Seen(content[:-_NONCE_BITS], answer["ETag"])

    def write(self, name: str, content: bytes | None, expected: Any) -> None:
        arguments: dict[str, Any] = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected}
        if content is not None:
            # One space or tab for each random bit.
            nonce = format(random.SystemRandom().getrandbits(_NONCE_BITS), f"0{_NONCE_BITS}b")
            arguments["Body"] = content + nonce.replace("0", " ").replace("1", "\t").encode()
        try:
            self._request("write", "delete_object" if content is None else "put_object", name, **arguments)
        except OSError as error:  # s3fs has translated the error with S3's code, which is now a cause
            answers = [getattr(cause, "response", None) for cause in with_causes(error)]
            codes = [answer.get("Error", {}).get("Code") for answer in answers if isinstance(answer, dict)]
            if not any(code in _NOT_GRANTED for code in codes):
                raise

    def _request(self, action: str, method: str, name: str, **arguments: Any) -> Any:
        """Sends a request of S3's interface. Raises OSError."""
        from botocore.exceptions import BotoCoreError

        key = f"{self._folder}/{name}"
        with _os_errors(action, BotoCoreError, OSError):
            return self._files.call_s3(method, Bucket=self._bucket, Key=key, timeout=_ANSWER_SECONDS, **arguments)


Objects: TypeAlias = GoogleObjects | S3Objects


def open_objects(folder: Location) -> Objects:
    """Opens the objects of a folder in a store, by name, whether the folder exists or not."""
    bucket, name = bucket_and_name(folder)
    if find_store(folder) is S3:
        return S3Objects(file_system(folder), bucket, name)
    store = tensorstore.KvStore.open({"driver": "gcs", "bucket": bucket, "path": f"{name}/"}).result()
    return GoogleObjects(store, folder)
