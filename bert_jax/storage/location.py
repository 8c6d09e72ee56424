"""Folders of runs on disk, in Google Cloud Storage (gs://) and in Amazon S3 (s3://), by the interface of pathlib.

`location` turns what the user wrote into a path. The first part describes the stores: packages, credentials, and what
their errors mean. The rest reads, writes and moves files and folders.

A store has no folders, appends nothing and renames by copying, but shows an object only once it is complete. So files
in a store are written whole, and a folder exists as long as something is in it. Orbax uses the same paths (etils) and
the same packages.
"""

import contextlib
import errno
import functools
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeAlias

from etils import epath

from bert_jax.errors import RunAgain, UserError, install_hint
from bert_jax.storage import files
from bert_jax.storage.remote import first_line, is_denied


class Store(NamedTuple):
    """One kind of store."""

    scheme: str
    name: str
    package: str  # with which etils, and so Orbax, reads and writes it
    extra: str  # which installs that package
    protocol: str  # as fsspec calls it


GOOGLE = Store("gs://", "Google Cloud Storage", "gcsfs", "gcs", "gcs")
S3 = Store("s3://", "Amazon S3", "s3fs", "s3", "s3")
STORES = (GOOGLE, S3)
_ANSWER_SECONDS = 30
_accessible = set[str]()  # buckets, and folders of S3, that check_access has found


def store_of(address: str | PurePath) -> Store | None:
    """Returns the store of an address; None for a path on disk, or another scheme."""
    return next((store for store in STORES if str(address).startswith(store.scheme)), None)


def bucket_and_name(path: str | PurePath) -> tuple[str, str]:
    """Returns the bucket of a path in a store, and the path within it."""
    bucket, _, name = str(path).partition("://")[2].partition("/")
    return bucket, name


def file_system(path: PurePath) -> Any:
    """Returns fsspec's file system of a path in a store, which threads share."""
    store = store_of(path)
    assert store is not None
    return _file_system(store.protocol)


@functools.lru_cache
def _file_system(protocol: str) -> Any:
    import fsspec

    return fsspec.filesystem(protocol)


def prepare(store: Store, address: str) -> None:
    """Makes the libraries ready for an address in a store. Raises UserError where they are missing."""
    if importlib.util.find_spec(store.package) is None:
        hint = install_hint(store.extra)
        raise UserError(f"{address} is in {store.name}, which needs the package {store.package}: {hint}")
    import fsspec

    # Otherwise etils prefers TensorFlow, if it is installed, and fsspec does not see what others write.
    os.environ.setdefault("EPATH_USE_TF", "false")
    fsspec.config.conf.setdefault(store.protocol, {}).setdefault("use_listings_cache", False)


def check_access(path: PurePath) -> None:
    """Raises UserError unless the bucket of a path exists and this process may list it, and RunAgain if the store does
    not answer. Does nothing on disk."""
    store = store_of(path)
    if store is None:
        return
    bucket, name = bucket_and_name(path)
    checked = str(path) if store is S3 else store.scheme + bucket  # S3's policies often name a part of a bucket only
    if checked not in _accessible:
        if store is S3:
            _check_s3(path, bucket, name)
        else:
            _check_google(path, bucket)
        _accessible.add(checked)


def _check_google(path: PurePath, bucket: str) -> None:
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError
    from google.cloud import storage

    try:
        next(iter(storage.Client().list_blobs(bucket, max_results=1, timeout=_ANSWER_SECONDS)), None)
    except exceptions.NotFound:
        raise _no_bucket(path, bucket) from None
    except (exceptions.Forbidden, exceptions.Unauthorized):
        raise UserError(
            f"{path}: these credentials may not read {GOOGLE.scheme}{bucket}. Reading a run needs the role "
            "roles/storage.objectViewer, training also roles/storage.objectUser and storage.buckets.get"
        ) from None
    except GoogleAuthError as error:
        raise UserError(
            f"{path}: no credentials for Google Cloud ({first_line(error)}). Run `gcloud auth application-default "
            "login`, or set GOOGLE_APPLICATION_CREDENTIALS"
        ) from None
    except (exceptions.ServerError, exceptions.TooManyRequests, exceptions.RetryError, OSError) as error:
        raise RunAgain(_no_answer(path, error)) from None
    except exceptions.GoogleAPIError as error:
        raise UserError(_no_answer(path, error)) from None


def _check_s3(path: PurePath, bucket: str, name: str) -> None:
    from botocore import exceptions

    try:
        file_system(path).call_s3(
            "list_objects_v2", Bucket=bucket, Prefix=f"{name}/", MaxKeys=1, timeout=_ANSWER_SECONDS
        )
    except FileNotFoundError:
        raise _no_bucket(path, bucket) from None
    except PermissionError as error:
        raise UserError(
            f"{path}: these credentials may not read {S3.scheme}{bucket} ({first_line(error)}). Reading a run needs "
            "s3:ListBucket and s3:GetObject, training also s3:PutObject and s3:DeleteObject"
        ) from None
    except exceptions.NoCredentialsError:
        raise UserError(
            f"{path}: no credentials for AWS. Run `aws configure`, or set AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        ) from None
    except (exceptions.BotoCoreError, OSError) as error:
        network = exceptions.ConnectionError | exceptions.HTTPClientError | ConnectionError | TimeoutError
        again = isinstance(error, network)
        again |= getattr(error, "errno", None) in (errno.EBUSY, errno.EIO)  # of s3fs: 503 and 500
        raise (RunAgain if again else UserError)(_no_answer(path, error)) from None


def _no_bucket(path: PurePath, bucket: str) -> UserError:
    return UserError(f"{path}: the bucket {bucket} does not exist. Create it, or check the address")


def _no_answer(path: PurePath, error: Exception) -> str:
    return f"{path}: {first_line(error)}. Check the address and the network"


Location: TypeAlias = Path | epath.Path  # a path on disk, or one in a store

# Packages whose errors are those of requests.
_CLIENTS = ("aiobotocore", "aiohttp", "botocore", "gcsfs", "google", "requests", "urllib3")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Codes of tensorstore's errors (abseil.io/docs/cpp/guides/status-codes).
_STATUS = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED|ABORTED)\b"
)
_copies: list["tempfile.TemporaryDirectory[str]"] = []  # of folders in stores, until the process ends


def location(address: str | PurePath) -> Location:
    """Returns the path that an address names: one of STORES' schemes in the store, anything else on disk.

    Raises UserError for other schemes, an address without a bucket, and where the packages for stores are missing.
    """
    if isinstance(address, epath.Path) and store_of(address) is not None:
        return address
    text = location_address(address)
    scheme = re.match(r"[a-z][a-z0-9+.-]+://", text)
    if scheme is None:
        return Path(address)
    if (store := store_of(text)) is None:
        known = " and ".join(store.scheme for store in STORES)
        raise UserError(
            f"{text}: runs are kept on disks and in {known}, not in {scheme[0]}. Use a local folder, or "
            f"{STORES[0].scheme}BUCKET/NAME (docs/resuming.md)"
        )
    bucket, name = bucket_and_name(text.rstrip("/"))
    if not bucket or not name:
        raise UserError(f"{text} names no folder in a bucket. Use {store.scheme}BUCKET/NAME")
    prepare(store, text)
    return epath.Path(text.rstrip("/"))


def location_address(address: str | PurePath) -> str:
    """Returns an address as text, also one that a path of pathlib holds, which joins double slashes."""
    text = str(address)
    return re.sub(r"^([a-z][a-z0-9+.-]+):/(?=[^/])", r"\1://", text) if isinstance(address, PurePath) else text


def is_stored(path: PurePath) -> bool:
    """Whether a path is in a store."""
    return not isinstance(path, Path)


def absolute(path: Location) -> Location:
    """Returns the absolute path; one in a store is absolute."""
    return path.absolute() if isinstance(path, Path) else path


def is_store_failure(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that a store refused or did not answer, and nothing about an object."""
    while error is not None:
        package = type(error).__module__.split(".")[0]
        if isinstance(error, MemoryError) or package in ("jax", "jaxlib"):
            return False  # of a device, although jax's have the codes of _STATUS, too
        missing = isinstance(error, FileNotFoundError)
        of_os = isinstance(error, OSError) and not missing and error.errno not in _DISK_FULL
        if of_os or package in _CLIENTS or _STATUS.search(str(error)):
            return True
        error = error.__cause__
    return False


@contextlib.contextmanager
def store_errors(path: PurePath, what: str, then: str = "Run the same command again") -> Iterator[None]:
    """Explains the errors of a store in one line: cannot `what`, why, and what to do. Those of a disk pass.

    Raises UserError where the store denies permission, and RunAgain where it refuses otherwise or does not answer.
    """
    try:
        yield
    except (UserError, RunAgain):
        raise
    except Exception as error:
        if is_stored(path) and is_store_failure(error):
            why = f"cannot {what}: {first_line(error)}"
            if is_denied(error):
                raise UserError(f"{why}. Check what the credentials permit (docs/resuming.md)") from error
            raise RunAgain(f"{why}. {then}") from error
        raise


def write_file(path: Location, content: bytes) -> None:
    """Writes a file that appears complete or not at all. Its folder must exist on disk; in a store it is only a name.

    Raises the errors of `store_errors`.
    """
    if isinstance(path, Path):
        return files.write_atomic(path, content)
    with store_errors(path, f"write {path}"):
        path.write_bytes(content)


def write_json(path: Location, value: Any) -> None:
    """Writes a JSON document as `write_file` does."""
    write_file(path, files.json_bytes(value))


def read_json(path: Location) -> dict[str, Any]:
    """Reads the object in a JSON file. Raises UserError if the file is missing, damaged or holds something else."""
    if isinstance(path, Path):
        return files.read_json(path)
    try:
        with store_errors(path, f"read {path}"):
            return files.parse_json(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise UserError(f"no {path.name} in {path.parent}. Check the path") from error


def remove_folder(path: Location) -> None:
    """Removes a folder with everything in it, if it exists."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.rmtree(missing_ok=True)


def replace_folder(target: Location, save: Callable[[Path], None]) -> None:
    """Makes a folder hold the files that `save` writes into the folder it is given, and no others.

    On disk, the folder appears complete or not at all. In a store, files of the same content stay as they are, so that
    whoever reads them meanwhile sees no change; a kill can leave some of the files.
    """
    if isinstance(target, Path):
        remove_folder(target)
        with files.atomic_folder(target) as unfinished:
            save(unfinished)
        return
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        wanted = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    with store_errors(target, f"write {target}"):
        present = {path.name for path in target.iterdir()} if target.exists() else set()
        for name in present - wanted.keys():
            (target / name).unlink(missing_ok=True)
        for name, content in wanted.items():
            if name not in present or (target / name).read_bytes() != content:
                write_file(target / name, content)


def move_folder(source: Location, target: Location) -> None:
    """Renames a folder to a name that does not exist. In a store this copies it, and a kill can leave both."""
    if isinstance(source, Path):
        source.rename(target)
    else:
        with store_errors(source, f"move {source}"):
            store, inside, names = _files_below(source)
            store.copy(names, [f"{target}{name.removeprefix(inside)}" for name in names])
            remove_folder(source)


def upload_folder(source: Path, target: Location) -> None:
    """Copies all files below a folder on disk to one in a store, whatever that held before. A kill can leave some."""
    remove_folder(target)
    paths = [path for path in sorted(source.rglob("*")) if path.is_file()]
    names = [f"{target}/{path.relative_to(source).as_posix()}" for path in paths]
    file_system(target).put([str(path) for path in paths], names)


def download_folder(source: Location, target: Path) -> None:
    """Copies all files below a folder in a store to one on disk, which appears only if there are any.

    Raises UserError for a full disk.
    """
    store, inside, names = _files_below(source)
    try:
        store.get(names, [f"{target}{name.removeprefix(inside)}" for name in names])
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise UserError(
                f"{target} has no space for a copy of {source}. Free some, or set TMPDIR to a folder with more"
            ) from error
        raise


def copy_folder(source: Location, target: Location) -> None:
    """Copies a folder of files to one that does not exist; both on disk, or both in a store."""
    if isinstance(target, Path):
        shutil.copytree(source, target)
        return
    with store_errors(source, f"copy {source}"):
        for name, content in read_files(source.iterdir()):
            write_file(target / name, content)


def local_folder(path: Location) -> Path:
    """Returns a folder of files on disk: the folder itself, or a copy of what is in the store now.

    The copy stays until the process ends. A folder that does not exist has an empty copy.
    """
    if isinstance(path, Path):
        return path
    copy = tempfile.TemporaryDirectory(prefix="bert_jax-")
    _copies.append(copy)
    target = Path(copy.name) / path.name
    target.mkdir()
    with store_errors(path, f"read {path}"):
        for name, content in read_files(path.iterdir() if path.exists() else ()):
            (target / name).write_bytes(content)
    return target


def read_files(paths: Iterable[Location]) -> list[tuple[str, bytes]]:
    """Returns name and content of each file; without those that disappear meanwhile."""
    contents = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            contents.append((path.name, path.read_bytes()))
    return contents


def _files_below(folder: Location) -> tuple[Any, str, list[str]]:
    """Returns the file system of a folder in a store, its name there, and the names of all files below it."""
    store, inside = file_system(folder), "/".join(bucket_and_name(folder))
    return store, inside, store.find(inside)
