"""Objects in a store that are read with their version, and written only if they still have it.

The store grants one of several requests that expect the same version: a generation in Google Cloud Storage
(cloud.google.com/storage/docs/request-preconditions), an ETag in S3
(docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-requests.html).
"""

import random
from typing import Any, NamedTuple, Protocol, runtime_checkable

import tensorstore

from bert_jax.storage.location import Location
from bert_jax.storage.remote import first_line
from bert_jax.storage.stores import S3, bucket_and_name, file_system, store_of

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
