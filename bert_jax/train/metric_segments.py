"""Keeps the log lines of a run whose workdir is in an object store, where nothing can be appended to a file.

WORKDIR/metrics/START-SEGMENT.jsonl holds lines as metrics.jsonl does. Every start of the run has a number; its first
segment begins with the lines that it keeps of earlier starts, whose segments it then removes. Readers take the newest
start, so lines that a resumed run repeats are dropped by one write; those that it keeps are therefore in one segment,
however many they are.
"""

import collections
import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from bert_jax.storage.location import Location, store_errors, write_file

FOLDER = "metrics"
SECONDS = 60.0  # between two writes, unless the run saves
SEGMENT_BYTES = 1 << 20  # the last segment is written again with its new lines until it has this many bytes
_READERS = 16  # at once: each request takes a round trip


class Segments:
    """The segments of one start of a run. `kept` are the lines of earlier starts that remain."""

    def __init__(self, workdir: Location, kept: Sequence[str]) -> None:
        self._folder = workdir / FOLDER
        with store_errors(workdir, f"write {self._folder}"):
            older = _by_start(workdir)
            self._start, self._number, self._lines = max(older, default=0) + 1, 0, list(kept)
            self._write()
            for path in [path for paths in older.values() for path in paths]:
                path.unlink(missing_ok=True)

    def append(self, line: str) -> None:
        """Adds a line, which is written a minute later, or by `flush`."""
        self._lines.append(line)
        self._unwritten = True
        if time.monotonic() - self._written >= SECONDS:
            self.flush()

    def flush(self) -> None:
        """Returns once all lines are in the store. No later start repeats those before a checkpoint."""
        if self._unwritten:
            self._write()

    def close(self, flush: bool = True) -> None:
        """Writes all lines, or drops those that are not written where another run has the workdir by now."""
        if flush:
            self.flush()

    def _write(self) -> None:
        content = "".join(line + "\n" for line in self._lines).encode()
        write_file(self._folder / f"{self._start:06d}-{self._number:06d}.jsonl", content)
        self._written, self._unwritten = time.monotonic(), False
        if len(content) > SEGMENT_BYTES:
            self._number, self._lines = self._number + 1, []


def read_segments(workdir: Location) -> list[str]:
    """Returns the lines of the newest start; none for a run that has logged nothing yet."""
    with store_errors(workdir, f"read {workdir / FOLDER}"):
        while starts := _by_start(workdir):
            with contextlib.suppress(FileNotFoundError), ThreadPoolExecutor(_READERS) as readers:
                contents = list(readers.map(lambda path: path.read_bytes(), sorted(starts[max(starts)])))
                return b"".join(contents).decode().splitlines()
            # The run was started again between the listing and the reading, so there is a newer start.
        return []


def _by_start(workdir: Location) -> dict[int, list[Location]]:
    """Returns the segments by the number of the start that wrote them."""
    folder, found = workdir / FOLDER, collections.defaultdict[int, list[Location]](list)
    for path in folder.iterdir() if folder.exists() else ():
        start, _, number = path.stem.partition("-")
        if path.suffix == ".jsonl" and start.isdecimal() and number.isdecimal():
            found[int(start)].append(path)
    return found
