"""Holds a folder in an object store for one run: FOLDER/holder.json, with a lease and no lock.

The store grants one of several requests that expect the same generation of the object (a precondition of the request,
cloud.google.com/storage/docs/request-preconditions), so two runs cannot take the folder at the same time, and a holder
that was suspended and replaced can neither renew its lease nor remove the other's object. Tensorstore, which Orbax
reads and writes arrays with, makes these requests and repeats those that fail.
"""

import contextlib
import threading

import tensorstore

from bert_jax.command import UserError
from bert_jax.storage import holder
from bert_jax.storage.holder import HOLDER_FILE, Hold, Report, Seen
from bert_jax.storage.location import Location, bucket_and_name
from bert_jax.storage.remote import first_line

_ABSENT = b"\x02"  # what tensorstore calls the generation of an object that does not exist
_ANSWER_SECONDS = 15.0  # for a request with its repetitions; a renewal and the wait for it are shorter than a lease


def open_objects(folder: Location) -> tensorstore.KvStore:
    """Returns the objects of a folder in a store by name, whether it exists or not."""
    bucket, name = bucket_and_name(folder)
    return tensorstore.KvStore.open({"driver": "gcs", "bucket": bucket, "path": f"{name}/"}).result()


class StoredHold(Hold):
    """A folder in an object store that this process holds. See Hold."""

    def _between_renewals(self) -> float:
        return holder.TIMES.renew_stored

    def _take(self, report: Report) -> None:
        self._objects = open_objects(self.folder)
        self._writing = threading.Lock()
        try:
            while not self._write(self._wait_for_end(False, report, holder.TIMES.poll_stored)):
                pass  # another run was faster
        except OSError as error:
            raise UserError(
                f"{self.folder / HOLDER_FILE}: {first_line(error)}. Check credentials and network"
            ) from None

    def remove(self) -> None:
        with contextlib.suppress(OSError), self._writing:  # an object that stays delays the next run at most
            seen = self._look()
            if seen is not None and seen.content == self._record.encoded():
                self._request(None, seen.version)

    def _touch(self) -> None:
        with contextlib.suppress(OSError), self._writing:
            seen = self._look()
            if seen is not None and seen.content == self._record.encoded():
                self._request(seen.content, seen.version)

    def _close(self) -> None:
        pass

    def _look(self) -> Seen | None:
        try:
            found = self._objects.read(HOLDER_FILE).result(timeout=_ANSWER_SECONDS)
        except (ValueError, TimeoutError) as error:  # ValueError: whatever the store refuses
            raise OSError(f"cannot read: {error}") from error
        return Seen(found.value, found.stamp.generation) if found.state == "value" else None

    def _write(self, replaced: Seen | None) -> bool:
        """Writes the record in place of what was seen; returns False if the object has changed since."""
        self._request(self._record.encoded(), _ABSENT if replaced is None else replaced.version)
        # Not the answer decides: of a request that is repeated because its answer was lost, the second one fails.
        seen = self._look()
        return seen is not None and seen.content == self._record.encoded()

    def _request(self, content: bytes | None, expected: bytes) -> None:
        """Writes the object, or removes it, if it still has the expected generation."""
        try:
            self._objects.write(HOLDER_FILE, content, if_equal=expected).result(timeout=_ANSWER_SECONDS)
        except (ValueError, TimeoutError) as error:
            raise OSError(f"cannot write: {error}") from error
