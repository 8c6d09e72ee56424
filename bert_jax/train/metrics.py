"""Writes a run's metrics.jsonl, TensorBoard events, and a progress line with an ETA.

Nothing can be appended to a file in an object store. A workdir there has WORKDIR/metrics/START-SEGMENT.jsonl instead,
with lines as in metrics.jsonl. Every start of the run has a number. Its first segment begins with the lines kept from
earlier starts, whose segments are then removed. Readers take the newest start, so one write drops all lines repeated by
a resumed run; the lines it keeps are therefore in one segment, however many they are.
"""

import collections
import contextlib
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from bert_jax.progress import is_quiet, print_note
from bert_jax.storage.files import scratch_folder, write_atomic
from bert_jax.storage.location import Location, is_stored, store_errors, write_file

METRICS_FILE = "metrics.jsonl"
EVENTS_SECONDS = 120.0  # TensorBoard sees events at least as often
# Values that a line has of the process where they are largest; with several processes, NAME_process is its number.
OF_HOSTS = ("data_wait_share", "step_seconds", "peak_memory_gb")
# Values that no two runs share.
TIMED = (
    *("time", "tokens_per_second", "mfu", "checkpoint_seconds", "goodput", *OF_HOSTS),
    *(f"{name}_process" for name in OF_HOSTS),
)
FOLDER = "metrics"  # holds the segments
SECONDS = 60.0  # between two writes, unless the run saves
SEGMENT_BYTES = 1 << 20  # the last segment is rewritten with its new lines until it has this many bytes
_READERS = 16  # threads, since each request takes a round trip


class Segments:
    """A start's segments; `kept` holds its lines from earlier starts."""

    def __init__(self, workdir: Location, kept: Sequence[str]) -> None:
        self._folder = workdir / FOLDER
        with store_errors(workdir, f"write {self._folder}"):
            older = _by_start(workdir)
            self._start, self._number, self._lines = max(older, default=0) + 1, 0, list(kept)
            # This start's first segment is complete before older ones go, so readers always find a whole log. They take
            # the highest start, so segments that a kill leaves behind do no harm.
            self._write()
            for path in itertools.chain(*older.values()):
                path.unlink(missing_ok=True)

    def append(self, line: str) -> None:
        """Adds a line, which is written a minute later, or by `flush`."""
        self._lines.append(line)
        self._unwritten = True
        if time.monotonic() - self._written >= SECONDS:
            self.flush()

    def flush(self) -> None:
        """Returns once all lines are in the store. No later start repeats the lines before a checkpoint."""
        if self._unwritten:
            self._write()

    def close(self, flush: bool = True) -> None:
        """Writes all lines, or drops the unwritten ones if another run has the workdir by now."""
        if flush:
            self.flush()

    def _write(self) -> None:
        # An object is replaced as a whole, so the last segment is written again with its new lines. Its number is
        # padded, so that names sort in the order of segments.
        content = "".join(line + "\n" for line in self._lines).encode()
        write_file(self._folder / f"{self._start:06d}-{self._number:06d}.jsonl", content)
        self._written, self._unwritten = time.monotonic(), False
        if len(content) > SEGMENT_BYTES:
            self._number, self._lines = self._number + 1, []


def read_segments(workdir: Location) -> list[str]:
    """Returns the lines of the newest start; none if the run has logged nothing yet."""
    with store_errors(workdir, f"read {workdir / FOLDER}"):
        while starts := _by_start(workdir):
            with contextlib.suppress(FileNotFoundError), ThreadPoolExecutor(_READERS) as readers:
                contents = list(readers.map(lambda path: path.read_bytes(), sorted(starts[max(starts)])))
                return b"".join(contents).decode().splitlines()
            # The run was started again between the listing and the reading, so there is a newer start.
        return []


def _by_start(workdir: Location) -> dict[int, list[Location]]:
    """Returns the segments by start number."""
    folder, segments = workdir / FOLDER, collections.defaultdict[int, list[Location]](list)
    for path in folder.iterdir() if folder.exists() else ():
        start, _, number = path.stem.partition("-")
        if path.suffix == ".jsonl" and start.isdecimal() and number.isdecimal():
            segments[int(start)].append(path)
    return segments


class _Events:
    """TensorBoard events in WORKDIR/tensorboard; for a store they are written to the local disk and uploaded.

    An object is replaced as a whole, so a file there ends at SEGMENT_BYTES, and the next one begins.
    """

    def __init__(self, workdir: Location) -> None:
        self._opened, self._number = contextlib.ExitStack(), 0
        self._target = workdir / "tensorboard"
        self._folder = self._target
        if is_stored(workdir):
            self._folder = self._opened.enter_context(scratch_folder())
        Path(self._folder).mkdir(exist_ok=True)
        self._begin()

    def _begin(self) -> None:
        # The number keeps names apart; TensorBoard reads files in the order of their names.
        self._number += 1
        suffix = f".{self._number:04d}" if self._folder != self._target else ""
        self._writer = EventsWriter(str(self._folder / "events"), suffix)
        self._flushed = time.monotonic()

    def write(self, event: Event) -> None:
        self._writer.write_event(event)
        if time.monotonic() - self._flushed > EVENTS_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._writer.flush()
        self._flushed = time.monotonic()
        if self._folder == self._target:
            return
        newest = max(Path(self._folder).glob("events.*"))
        content = newest.read_bytes()
        write_file(self._target / newest.name, content)
        if len(content) > SEGMENT_BYTES:
            self._writer.close()
            newest.unlink()
            self._begin()

    def close(self, flush: bool = True) -> None:
        """Ends the events; without `flush`, nothing more is written to a store."""
        with self._opened:
            try:
                if flush:
                    self.flush()
            finally:
                self._writer.close()


class MetricsWriter:
    """Appends to metrics.jsonl and TensorBoard events, in process 0 only.

    If the run resumes, it drops the lines after `start_step`, since the run repeats those steps. In an object store
    the lines are in segments.
    """

    def __init__(self, workdir: Location, start_step: int) -> None:
        self._active = jax.process_index() == 0
        if not self._active:
            return
        self._workdir = workdir
        self._begin([line for line in read_metrics(workdir) if line["step"] <= start_step] if start_step else [])
        # tensorboardX's SummaryWriter writes in a thread. A full disk ends that thread, its queue fills up, and the run
        # waits for ever. So this writes the same events itself.
        self._events = _Events(workdir)
        # TensorBoard hides an earlier process's events at this step and later.
        first = start_step + 1
        self._events.write(Event(step=first, file_version="brain.Event:2"))
        self._events.write(Event(step=first, session_log=SessionLog(status=SessionLog.START)))

    def _begin(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Begins a log with these lines, in place of the one on disk or in the store."""
        texts = [json.dumps(line) for line in lines]
        stored = not isinstance(self._workdir, Path)
        self._log = Segments(self._workdir, texts) if stored else _File(self._workdir / METRICS_FILE, texts)

    def write(self, step: int, values: dict[str, float | None]) -> None:
        if not self._active:
            return
        line = {"step": step, "time": round(time.time(), 3)} | {name: _plain(value) for name, value in values.items()}
        self._log.append(json.dumps(line))
        # TensorBoard has the step and the time in the event itself, and no value for None.
        for name, value in line.items():
            if isinstance(value, float) and name != "time":
                self._events.write(Event(step=step, wall_time=time.time(), summary=scalar(name, value)))

    def correct(self, step: int, values: dict[str, float | None], append: bool = False) -> None:
        """Replaces values in the last line if it belongs to this step; TensorBoard keeps the earlier ones.

        If it does not, `append` writes a line with only these values.
        """
        if not self._active:
            return
        # No line of a log can change in place, so a corrected one begins the log again.
        self._log.flush()
        *earlier, last = read_metrics(self._workdir) or [{}]
        corrected = last | {name: _plain(value) for name, value in values.items()}
        if last.get("step") != step:
            if append:
                self.write(step, values)
        elif corrected != last:
            # All lines are in `earlier` and `corrected`: the log was flushed before it was read.
            self._log.close(flush=False)
            self._begin([*earlier, corrected])

    def flush(self) -> None:
        """Returns once all lines would survive a kill. Call it before a checkpoint is saved."""
        if self._active:
            self._log.flush()

    def close(self, flush: bool = True) -> None:
        """Ends the log; without `flush`, nothing more is written to a store."""
        if self._active:
            self._log.close(flush)
            self._events.close(flush)


class _File:
    """A metrics.jsonl on disk, beginning with the `kept` lines; it has the interface of Segments."""

    def __init__(self, path: Path, kept: Sequence[str]) -> None:
        # Atomically: a kill meanwhile leaves the whole log of before.
        write_atomic(path, "".join(line + "\n" for line in kept).encode())
        self._file = path.open("a", encoding="utf-8")

    def append(self, line: str) -> None:
        # The system has each line, so it survives a kill of the process. `flush` makes it survive one of the machine.
        self._file.write(line + "\n")
        self._file.flush()

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self, flush: bool = True) -> None:
        self._file.close()


def read_metrics(workdir: Location) -> list[dict[str, Any]]:
    """Returns the log lines of a workdir, from its metrics.jsonl (see read_lines) or its segments; [] without a log."""
    # A workdir on disk may be a copy of one in a store, or the reverse: the log of its own kind comes first.
    path = workdir / METRICS_FILE
    if is_stored(workdir):
        return _parse(read_segments(workdir)) or (read_lines(path) if path.exists() else [])
    return read_lines(path) if path.exists() else _parse(read_segments(workdir))


def copy_metrics(workdir: Location, target: Location) -> None:
    """Copies a workdir's log to another workdir in the same place, which then has no other log."""
    if isinstance(workdir, Path):
        shutil.copy(workdir / METRICS_FILE, Path(target) / METRICS_FILE)
    else:
        Segments(target, read_segments(workdir))


def read_lines(path: Location) -> list[dict[str, Any]]:
    """Returns the lines of a metrics.jsonl, without a last line cut short by a crash."""
    return _parse(path.read_text(encoding="utf-8").splitlines())


def _parse(text: Sequence[str]) -> list[dict[str, Any]]:
    # `extend` keeps the lines before the one that cannot be parsed, which is the last.
    lines: list[dict[str, Any]] = []
    with contextlib.suppress(json.JSONDecodeError):
        lines.extend(map(json.loads, text))
    return lines


class ProgressLine:
    """Shows progress in process 0: a bar on a terminal, elsewhere a plain line every `seconds_between_lines`.

    A kept line, such as an evaluation's, is always printed; on a terminal it stays above the bar.
    """

    def __init__(self, description: str, seconds_between_lines: float = 30.0) -> None:
        console = Console(stderr=True, soft_wrap=True)
        if console.is_jupyter:  # plain lines: rich would make each a block of HTML, and a bar there is never erased
            console = Console(stderr=True, soft_wrap=True, force_jupyter=False, force_terminal=False)
        self._console = console if jax.process_index() == 0 and not is_quiet() else None
        self._between = seconds_between_lines
        self._last = -math.inf
        self._description = description
        self._bar = None
        if self._console and console.is_terminal:
            texts = TextColumn("{task.description}"), TextColumn("ETA {task.fields[eta]}  {task.fields[note]}")
            columns = SpinnerColumn(), texts[0], BarColumn(bar_width=20), TimeElapsedColumn(), texts[1]
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task(description, total=1.0, eta="-", note="")
            self._bar.start()

    def update(
        self, step: int, fraction: float, eta_seconds: float | None, values: dict[str, float | None], keep: bool = False
    ) -> None:
        """Shows the step, the fraction done, the ETA and the values, except NaN (metrics of absent targets)."""
        present = {name: value for name, value in values.items() if value is None or not math.isnan(value)}
        note = "  ".join([f"step {step}", *(f"{name} {_short(value)}" for name, value in present.items())])
        eta = duration(eta_seconds) if eta_seconds is not None else "-"
        if self._bar:
            self._bar.update(self._task, completed=fraction, eta=eta, note=note)
            if keep:
                self.report(note)
        elif self._console and (keep or time.monotonic() - self._last >= self._between or fraction >= 1):
            self._last = time.monotonic()
            print_note(f"{self._description} {fraction:4.0%}  ETA {eta}  {note}")

    def note(self, text: str) -> None:
        """Shows why the run waits: next to the bar on a terminal, elsewhere on its own line."""
        if self._bar:
            self._bar.update(self._task, note=text)
        else:
            self.report(text)

    def report(self, text: str) -> None:
        """Logs a line, which stays above the bar."""
        print_note(text, quiet=jax.process_index() != 0)

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()


def duration(seconds: float) -> str:
    """Formats seconds: 1:02:03 for 3723."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 0.01 else f"{value:.3f}"


def _plain(value: float | None) -> float | int | None:
    """Rounds a value for JSON, which has no NaN and no infinities: None."""
    # Nine digits distinguish any two float32 values.
    if value is None or isinstance(value, int):
        return value
    return float(f"{float(value):.9g}") if math.isfinite(value) else None
