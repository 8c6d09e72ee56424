"""Holds a folder in an object store for one run: FOLDER/holder.json, with a lease and no lock.

The store grants one of several requests that expect the same version of the object (storage/conditional.py), so two
runs cannot take the folder at the same time, and a holder that was suspended and replaced can neither renew its lease
nor remove the other's object.
"""

import contextlib
import threading

from bert_jax.command import RunAgain, UserError
from bert_jax.storage import holder
from bert_jax.storage.conditional import open_objects
from bert_jax.storage.holder import HOLDER_FILE, Hold, Report, Seen
from bert_jax.storage.remote import first_line, is_denied


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
            why = f"{self.folder / HOLDER_FILE}: {first_line(error)}. Check credentials and network"
            raise (UserError(why) if is_denied(error) else RunAgain(why)) from None

    def remove(self) -> None:
        with contextlib.suppress(OSError), self._writing:  # an object that stays delays the next run at most
            seen = self._look()
            if seen is not None and seen.content == self._record.encoded():
                self._objects.write(HOLDER_FILE, None, seen.version)

    def _touch(self) -> None:
        with contextlib.suppress(OSError), self._writing:
            seen = self._look()
            if seen is not None and seen.content == self._record.encoded():
                self._objects.write(HOLDER_FILE, seen.content, seen.version)

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
