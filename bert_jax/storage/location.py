"""Folders of runs on disk and in Google Cloud Storage (gs://), behind the interface of pathlib.

A store has no folders, appends nothing and renames by copying, but shows an object only once it is complete. So files
in a store are written whole, and a folder exists as long as something is in it. Orbax uses the same paths (etils) and
the same packages (gcsfs, google-cloud-storage), which the extra `gcs` installs.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from etils import epath

from bert_jax.command import RunAgain, UserError, install_hint
from bert_jax.storage import local
from bert_jax.storage.remote import first_line

Location: TypeAlias = Path | epath.Path  # a path on disk, or one in a store

SCHEME = "gs://"
_CREDENTIALS = "Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS"
_CLIENTS = ("aiohttp", "gcsfs", "google", "requests", "urllib3")  # packages whose errors are those of requests
# Codes of tensorstore's errors (abseil.io/docs/cpp/guides/status-codes).
_STATUS = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED|ABORTED)\b"
)
_accessible = set[str]()  # buckets that check_access has found
_copies: list["tempfile.TemporaryDirectory[str]"] = []  # of folders in stores, until the process ends


def location(address: str | PurePath) -> Location:
    """Returns the path that an address names: a gs:// address in the store, anything else on disk.

    Raises UserError for other schemes, an address without a bucket, and where the packages for stores are missing.
    """
    if isinstance(address, epath.Path) and str(address).startswith(SCHEME):
        return address
    text = location_address(address)
    scheme = re.match(r"[a-z][a-z0-9+.-]+://", text)
    if scheme is None:
        return Path(address)
    if scheme[0] != SCHEME:
        raise UserError(
            f"{text}: runs are kept on disks and in {SCHEME}, not in {scheme[0]}. Use a local folder, or "
            f"{SCHEME}BUCKET/NAME (docs/resuming.md)"
        )
    bucket, _, name = text.removeprefix(SCHEME).rstrip("/").partition("/")
    if not bucket or not name:
        raise UserError(f"{text} names no folder in a bucket. Use gs://BUCKET/NAME")
    _prepare(text)
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


def check_access(path: Location) -> None:
    """Raises UserError unless the bucket of a path exists and this process may list it. Does nothing on disk."""
    bucket = bucket_and_name(path)[0] if is_stored(path) else ""
    if not bucket or bucket in _accessible:
        return
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError
    from google.cloud import storage

    try:
        next(iter(storage.Client().list_blobs(bucket, max_results=1, timeout=30)), None)
    except exceptions.NotFound:
        raise UserError(f"{path}: the bucket {bucket} does not exist. Create it, or check the address") from None
    except (exceptions.Forbidden, exceptions.Unauthorized):
        raise UserError(
            f"{path}: these credentials may not read {SCHEME}{bucket}. Reading a run needs the role "
            "roles/storage.objectViewer, training also roles/storage.objectUser and storage.buckets.get"
        ) from None
    except GoogleAuthError as error:
        raise UserError(f"{path}: no credentials for Google Cloud ({first_line(error)}). {_CREDENTIALS}") from None
    except (exceptions.GoogleAPIError, OSError) as error:
        raise UserError(f"{path}: {first_line(error)}. Check the address and the network") from None
    _accessible.add(bucket)


def is_store_failure(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that a store refused or did not answer, and nothing about an object."""
    while error is not None:
        of_os = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        if of_os or type(error).__module__.split(".")[0] in _CLIENTS or _STATUS.search(str(error)):
            return True
        error = error.__cause__
    return False


def bucket_and_name(path: PurePath) -> tuple[str, str]:
    """Returns the bucket of a path in a store, and the path within it."""
    bucket, _, name = str(path).removeprefix(SCHEME).partition("/")
    return bucket, name


def write_file(path: Location, content: bytes) -> None:
    """Writes a file that appears complete or not at all. Its folder must exist on disk; in a store it is only a name.

    Raises RunAgain where a store does not answer.
    """
    if isinstance(path, Path):
        return local.write_atomic(path, content)
    try:
        path.write_bytes(content)
    except Exception as error:
        if is_store_failure(error):
            raise RunAgain(f"cannot write {path}: {first_line(error)}. Run the same command again") from error
        raise


def write_json(path: Location, value: Any) -> None:
    """Writes a JSON document as `write_file` does."""
    write_file(path, local.json_bytes(value))


def read_json(path: Location) -> dict[str, Any]:
    """Reads the object in a JSON file. Raises UserError if the file is missing, damaged or holds something else."""
    try:
        return local.parse_json(path.read_bytes(), str(path))
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
        with local.atomic_folder(target) as unfinished:
            save(unfinished)
        return
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        wanted = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
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
        import fsspec

        fsspec.filesystem("gcs").mv(str(source), str(target), recursive=True)


def copy_folder(source: Location, target: Location) -> None:
    """Copies a folder of files to one that does not exist; both on disk, or both in a store."""
    if isinstance(target, Path):
        shutil.copytree(source, target)
        return
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
    for name, content in read_files(path.iterdir() if path.exists() else ()):
        (target / name).write_bytes(content)
    return target


def read_files(paths: Iterable[Location]) -> list[tuple[str, bytes]]:
    """Returns name and content of each file; without those that disappear meanwhile."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found.append((path.name, path.read_bytes()))
    return found


def _prepare(address: str) -> None:
    """Makes the libraries ready for addresses in stores. Raises UserError where they are missing."""
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f"{address} is in Google Cloud Storage, which needs the package gcsfs: {install_hint('gcs')}")
    import fsspec

    # Otherwise etils prefers TensorFlow, if it is installed, and fsspec does not see what others write.
    os.environ.setdefault("EPATH_USE_TF", "false")
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
