"""Folders of runs on disk, in Google Cloud Storage (gs://) and in Amazon S3 (s3://), by the interface of pathlib.

`location` turns an address into a path. The first part describes the stores: packages, credentials and errors. The
second reads, writes and moves files and folders. A store has no folders, appends nothing and renames by copying, but
shows an object only once it is complete. So files in a store are written whole, and a folder exists as long as
something is in it. Orbax uses the same paths (etils) and the same packages. At the end are models of the Hugging Face
Hub (hf:NAME).
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
from typing import Any, Literal, NamedTuple, TypeAlias

from etils import epath

from bert_jax.errors import RunAgain, UserError, install_hint
from bert_jax.storage import files
from bert_jax.storage.files import is_pickle, pickle_error
from bert_jax.storage.remote import first_line, is_denied, with_causes


class Store(NamedTuple):
    """One kind of store."""

    scheme: str
    name: str
    package: str  # with which etils, and so Orbax, reads and writes it
    extra: str  # which installs that package
    protocol: str  # fsspec's name for it
    reading: str  # permission to read a run
    training: str  # ... and in addition for training
    cloud: str  # the name of its credentials
    login: str  # how to get them


GOOGLE = Store(
    *("gs://", "Google Cloud Storage", "gcsfs", "gcs", "gcs"),
    reading="the role roles/storage.objectViewer",
    training="roles/storage.objectUser and storage.buckets.get",
    cloud="Google Cloud",
    login="Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
)
S3 = Store(
    *("s3://", "Amazon S3", "s3fs", "s3", "s3"),
    reading="s3:ListBucket and s3:GetObject",
    training="s3:PutObject and s3:DeleteObject",
    cloud="AWS",
    login="Run `aws configure`, or set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
)
STORES = (GOOGLE, S3)
_ANSWER_SECONDS = 30
_accessible = set[str]()  # buckets, and folders in S3, that check_access has listed


def find_store(address: str | PurePath) -> Store | None:
    """The address's store, or None if it is on disk or has another scheme."""
    return next((store for store in STORES if str(address).startswith(store.scheme)), None)


def bucket_and_name(path: str | PurePath) -> tuple[str, str]:
    """Splits a path in a store into its bucket and the name within it."""
    bucket, _, name = str(path).partition("://")[2].partition("/")
    return bucket, name


def file_system(path: PurePath) -> Any:
    """Returns fsspec's file system for a path in a store. Threads share it, unlike fsspec's own instances."""
    store = find_store(path)
    assert store is not None
    return _file_system(store.protocol)


@functools.lru_cache
def _file_system(protocol: str) -> Any:
    import fsspec

    return fsspec.filesystem(protocol)


def check_access(path: PurePath) -> None:
    """Lists a path's bucket. Does nothing on disk.

    Raises:
        UserError: the bucket does not exist, or this process may not list it.
        RunAgain: the store does not answer.
    """
    store = find_store(path)
    if store is None:
        return
    bucket, name = bucket_and_name(path)
    checked = str(path) if store is S3 else store.scheme + bucket  # S3's policies often name only a part of a bucket
    if checked in _accessible:
        return
    # For each store: a request, and the errors for a missing bucket, denied permission, missing credentials, no answer,
    # and everything else that its packages raise.
    denied: Any
    silent: Any
    if store is S3:
        from botocore import exceptions as boto

        def list_object() -> None:
            query = {"Bucket": bucket, "Prefix": f"{name}/", "MaxKeys": 1}
            file_system(path).call_s3("list_objects_v2", timeout=_ANSWER_SECONDS, **query)

        missing, denied, anonymous = FileNotFoundError, PermissionError, boto.NoCredentialsError
        silent = boto.ConnectionError, boto.HTTPClientError, ConnectionError, TimeoutError
        other = boto.BotoCoreError, OSError
    else:
        from google.api_core import exceptions as google
        from google.auth.exceptions import GoogleAuthError
        from google.cloud import storage

        def list_object() -> None:
            next(iter(storage.Client().list_blobs(bucket, max_results=1, timeout=_ANSWER_SECONDS)), None)

        missing, denied, anonymous = google.NotFound, (google.Forbidden, google.Unauthorized), GoogleAuthError
        silent = google.ServerError, google.TooManyRequests, google.RetryError, OSError
        other = google.GoogleAPIError, OSError
    # From the narrowest to the widest: OSError, in the last one, includes most of S3's errors.
    try:
        list_object()
    except missing:
        raise UserError(f"{path}: the bucket {bucket} does not exist. Create it, or check the address") from None
    except denied as error:
        raise UserError(
            f"{path}: these credentials may not read {store.scheme}{bucket} ({first_line(error)}). Reading a run needs "
            f"{store.reading}, training also {store.training}"
        ) from None
    except anonymous as error:
        raise UserError(f"{path}: no credentials for {store.cloud} ({first_line(error)}). {store.login}") from None
    except (*silent, *other) as error:
        # s3fs translates the statuses 503 and 500 into these numbers.
        again = isinstance(error, silent) or getattr(error, "errno", None) in (errno.EBUSY, errno.EIO)
        message = f"{path}: {first_line(error)}. Check the address and the network"
        raise (RunAgain if again else UserError)(message) from None
    _accessible.add(checked)


Location: TypeAlias = Path | epath.Path  # a path on disk, or one in a store

# Packages that send requests to stores.
_CLIENTS = ("aiobotocore", "aiohttp", "botocore", "gcsfs", "google", "requests", "urllib3")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Codes in tensorstore's errors (abseil.io/docs/cpp/guides/status-codes).
_STATUS = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED|ABORTED)\b"
)
_copies: list["tempfile.TemporaryDirectory[str]"] = []  # local copies of stored folders, until the process ends


def location(address: str | PurePath) -> Location:
    """Turns an address into a path: in the store if it has a scheme from STORES, otherwise on disk.

    Raises:
        UserError: another scheme, an address without a bucket or a name, or a missing package.
    """
    if isinstance(address, epath.Path) and find_store(address) is not None:
        return address
    text = location_address(address)
    scheme = re.match(r"[a-z][a-z0-9+.-]+://", text)
    if scheme is None:
        return Path(address)
    if (store := find_store(text)) is None:
        known = " and ".join(store.scheme for store in STORES)
        raise UserError(
            f"{text}: runs are kept on disks and in {known}, not in {scheme[0]}. Use a local folder, or "
            f"{STORES[0].scheme}BUCKET/NAME (docs/resuming.md)"
        )
    problem = ""
    if not all(bucket_and_name(text.rstrip("/"))):
        problem = f"names no folder in a bucket. Use {store.scheme}BUCKET/NAME"
    elif importlib.util.find_spec(store.package) is None:
        problem = f"is in {store.name}, which needs the package {store.package}: {install_hint(store.extra)}"
    if problem:
        raise UserError(f"{text} {problem}")
    import fsspec

    # Otherwise etils prefers TensorFlow, if it is installed, and fsspec does not see what others write.
    os.environ.setdefault("EPATH_USE_TF", "false")
    fsspec.config.conf.setdefault(store.protocol, {}).setdefault("use_listings_cache", False)
    return epath.Path(text.rstrip("/"))


def location_address(address: str | PurePath) -> str:
    """Returns an address as text; restores the double slash that pathlib joins."""
    text = str(address)
    return re.sub(r"^([a-z][a-z0-9+.-]+):/(?=[^/])", r"\1://", text) if isinstance(address, PurePath) else text


def is_stored(path: PurePath) -> bool:
    """Whether a path is in a store."""
    return not isinstance(path, Path)


def absolute(path: Location) -> Location:
    """Makes a path on disk absolute. A path in a store already is."""
    return path.absolute() if isinstance(path, Path) else path


def is_store_failure(error: BaseException | None) -> bool:
    """Whether an error or its cause comes from a store's refusal or silence, and says nothing about an object."""
    for cause in with_causes(error):
        package = type(cause).__module__.split(".")[0]
        if isinstance(cause, MemoryError) or package in ("jax", "jaxlib"):
            return False  # a device's error, although jax's errors have the codes in _STATUS, too
        # A missing file and a full local disk are OSErrors too, but the store has answered or was not involved.
        missing = isinstance(cause, FileNotFoundError)
        of_os = isinstance(cause, OSError) and not missing and cause.errno not in _DISK_FULL
        if of_os or package in _CLIENTS or _STATUS.search(str(cause)):
            return True
    return False


@contextlib.contextmanager
def store_errors(path: PurePath, action: str, then: str = "Run the same command again") -> Iterator[None]:
    """Explains a store's error in one line. Errors from a disk pass unchanged.

    Args:
        action: completes "cannot ...", e.g. "write gs://bucket/file".
        then: the advice at the end of the line.

    Raises:
        UserError: the store denies permission.
        RunAgain: the store refuses for another reason, or does not answer.
    """
    try:
        yield
    except (UserError, RunAgain):
        raise
    except Exception as error:
        if not is_stored(path) or not is_store_failure(error):
            raise
        why = f"cannot {action}: {first_line(error)}"
        if is_denied(error):
            raise UserError(f"{why}. Check what the credentials permit (docs/resuming.md)") from error
        raise RunAgain(f"{why}. {then}") from error


def write_file(path: Location, content: bytes) -> None:
    """Writes a file that appears complete or not at all. On disk its folder must exist; in a store it is only a name.

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
    """Reads a JSON file that holds an object.

    Raises:
        UserError: the file is missing, is not valid JSON, or holds another type.
    """
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
    """Replaces a folder's files by new ones, which `save` writes into a folder that it is given.

    On disk, the folder appears complete or not at all. In a store, a kill can leave some of the files. Unchanged files
    are not written again there, so that their readers notice nothing.
    """
    if isinstance(target, Path):
        # atomic_folder replaces no finished folder.
        remove_folder(target)
        with files.atomic_folder(target) as unfinished:
            save(unfinished)
        return
    with tempfile.TemporaryDirectory() as folder:
        with files.naming_temporary():
            save(Path(folder))
        contents = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    with store_errors(target, f"write {target}"):
        present = {path.name for path in target.iterdir()} if target.exists() else set()
        for name in present - contents.keys():
            (target / name).unlink(missing_ok=True)
        for name, content in contents.items():
            if name not in present or (target / name).read_bytes() != content:
                write_file(target / name, content)


def move_folder(source: Location, target: Location) -> None:
    """Renames a folder to a name that does not exist. In a store this copies it, and a kill can leave both."""
    if isinstance(source, Path):
        source.rename(target)
        return
    with store_errors(source, f"move {source}"):
        store, names, relative = _files_below(source)
        store.copy(names, [f"{target}{name}" for name in relative])
        remove_folder(source)


def upload_folder(source: Path, target: Location) -> None:
    """Replaces a folder in a store by all files below a folder on disk. A kill can leave some of the files."""
    remove_folder(target)
    add_files(source, target)


def add_files(source: Path, target: Location) -> None:
    """Uploads all files below a folder on disk into a folder in a store, next to those that it has."""
    paths = [path for path in sorted(source.rglob("*")) if path.is_file()]
    names = [f"{target}/{path.relative_to(source).as_posix()}" for path in paths]
    file_system(target).put([str(path) for path in paths], names)


def download_folder(source: Location, target: Path) -> None:
    """Copies all files below a stored folder to disk. Without any file, `target` is not created.

    Raises:
        UserError: the disk is full.
    """
    store, names, relative = _files_below(source)
    try:
        store.get(names, [f"{target}{name}" for name in relative])
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise UserError(
            f"{target} has no space for a copy of {source}. Free some, or set TMPDIR to a folder with more"
        ) from error


def _files_below(folder: Location) -> tuple[Any, list[str], list[str]]:
    """Lists a stored folder: its file system, the files' full names, and their names after the folder's."""
    store, inside = file_system(folder), "/".join(bucket_and_name(folder))
    names = store.find(inside)
    return store, names, [name.removeprefix(inside) for name in names]


def copy_folder(source: Location, target: Location) -> None:
    """Copies a folder of files to one that does not exist; both on disk, or both in a store."""
    if isinstance(target, Path):
        shutil.copytree(source, target)
        return
    with store_errors(source, f"copy {source}"):
        for name, content in _read_files(source.iterdir()):
            write_file(target / name, content)


def local_folder(path: Location) -> Path:
    """Returns a folder of files on disk: the folder itself, or a copy of its present state in the store.

    The copy stays until the process ends. A folder that does not exist has an empty copy.
    """
    if isinstance(path, Path):
        return path
    copy = tempfile.TemporaryDirectory(prefix="bert_jax-")
    _copies.append(copy)
    target = Path(copy.name) / path.name
    target.mkdir()
    with store_errors(path, f"read {path}"), files.naming_temporary():
        for name, content in _read_files(path.iterdir() if path.exists() else ()):
            (target / name).write_bytes(content)
    return target


def _read_files(paths: Iterable[Location]) -> Iterator[tuple[str, bytes]]:
    """Yields each file's name and content; skips files that disappear meanwhile."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # another process may remove a listed file
            yield path.name, path.read_bytes()


# Models on the Hugging Face Hub by their names, such as bert-base-uncased or BAAI/bge-small-en-v1.5.


PREFIX = "hf:"  # before a model's name, if a command takes a checkpoint or a tokenizer
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER = (
    "config.json",  # which may name the tokenizer's class
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model"),
)
FLAX_FILE = "flax_model.msgpack"  # read if there are no safetensors
# The files to download; a repository may also hold a model in other formats, which are large.
_FILES = {
    "tokenizer": _TOKENIZER,
    "checkpoint": (
        *("model*.safetensors", "model.safetensors.index.json", "adapter_*", "task.json"),
        *("README.md", "modules.json", "sentence_*_config.json", "config_sentence_transformers.json"),
        *("*_Pooling/*", "*_Normalize/*"),
        *_TOKENIZER,
    ),
}


def model_address(source: str | PurePath) -> str | PurePath:
    """Returns hf:NAME for the name of a model on the Hub, and anything else as it is.

    A path that exists is no such name, unless it has the prefix hf: already.
    """
    name = str(source)
    if name.startswith(PREFIX) or isinstance(source, PurePath) or Path(name).exists() or not _NAME.fullmatch(name):
        return source
    return PREFIX + name


def named_folder(address: str | PurePath, kind: Literal["checkpoint", "tokenizer"] = "checkpoint") -> str | PurePath:
    """Downloads a model on the Hub to the Hub's cache and returns its folder; returns a path as it is.

    A name needs no hf: before it unless a path of the same name exists (model_address).

    Args:
        kind: checkpoint: the whole model; tokenizer: no weights.

    Raises:
        UserError: no model has this name, the download fails, or the model has pickled weights only.
    """
    name = str(model_address(address))
    # hf://... names files on the Hub, not a model.
    if not name.startswith(PREFIX) or "://" in name:
        return address
    name = name.removeprefix(PREFIX)
    if not _NAME.fullmatch(name):
        raise UserError(f"{address} is not the name of a model on the Hugging Face Hub. Use hf:NAME or hf:ORG/NAME")
    from huggingface_hub import HfApi, errors, snapshot_download

    local = f"no {kind} at {name}"
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_FILES[kind])))
        # A download without weights succeeds: the repository may have none that are read here, or, without a network,
        # the cache may hold the tokenizer alone. The list of the repository's files tells which.
        if kind == "checkpoint" and not any(folder.glob("*.safetensors")):
            local = f"the cache has the tokenizer of {name} but no weights"
            try:
                files = HfApi().list_repo_files(name)
            except errors.HfHubHTTPError:
                raise
            except Exception as error:  # the connection's package has errors of its own
                raise OSError(first_line(error)) from error
            if FLAX_FILE in files:
                return Path(snapshot_download(name, allow_patterns=[*_FILES[kind], FLAX_FILE]))
            # The message should name the weights, not another pickle such as training_args.bin.
            if pickle := min(filter(is_pickle, files), key=lambda file: ("model" not in file, file), default=""):
                config = folder / "config.json"
                raise pickle_error(address, pickle, read_json(config) if config.is_file() else {})
        return folder
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise UserError(
            f"no {kind} at {name}, and no model of that name on the Hugging Face Hub. Check the name; a private "
            "model needs HF_TOKEN"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            problem = (
                f"cannot download {name} to the cache of the Hugging Face Hub: {error.strerror or error}. Free some "
                "space, correct its mode, or set HF_HOME to another folder"
            )
        else:
            problem = (
                f"{local}, and the Hugging Face Hub cannot be reached ({first_line(error)}). Download the model where "
                f"there is a network (hf download {name} --local-dir DIR) and give DIR"
            )
        raise UserError(problem) from None
