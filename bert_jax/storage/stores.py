"""The object stores that hold workdirs, and what differs between them: packages, credentials, and their errors."""

import errno
import functools
import importlib.util
import os
from pathlib import PurePath
from typing import Any, NamedTuple

from bert_jax.command import RunAgain, UserError, install_hint
from bert_jax.storage.remote import first_line


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
