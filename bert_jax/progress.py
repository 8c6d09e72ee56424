"""Progress of a long job, on stderr: a bar on a terminal, else a line from time to time."""

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_SECONDS_BETWEEN_LINES = 15.0
_SECONDS_BETWEEN_UPDATES = 0.5


def print_note(line: str, quiet: bool = False) -> None:
    """Prints one line of information or a warning on stderr."""
    if not quiet:
        print(line, file=sys.stderr, flush=True)


def is_watched() -> bool:
    """Whether somebody reads stderr while the program runs: on a terminal, or in a notebook."""
    return sys.stderr.isatty() or type(sys.stderr).__module__.partition(".")[0] == "ipykernel"


class Reporter:
    """Shows the progress of a job while its `with` block runs: share, rates, memory of all processes, time left.

    `total` is what `update` counts up to, and `rates` name the amounts that it gets: "MB" is shown as MB/s. On a
    terminal it is a bar, else a line four times a minute; with quiet=True there is no output.
    """

    def __init__(self, job: str, total: int | float, rates: Sequence[str], quiet: bool = False) -> None:
        self._job = job
        self._total = max(total, 1)
        self._rates = rates
        self._quiet = quiet
        self._started = self._last_shown = time.monotonic()
        self._interval = _SECONDS_BETWEEN_LINES
        self._done: float = 0
        self._before: float = 0
        self._amounts = [0.0] * len(rates)
        self._bar: Progress | None = None
        if not quiet and sys.stderr.isatty():
            self._interval = _SECONDS_BETWEEN_UPDATES
            self._bar = _new_bar()
            self._task = self._bar.add_task(job, total=self._total, status="")

    def __enter__(self) -> "Reporter":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def skip(self, before: int | float) -> None:
        """Sets how much of what is done took no time, because an earlier run did it; the amounts never hold it."""
        self._before = before

    def advance(self, done: int | float, *amounts: int | float) -> None:
        """Adds to the part that is done and to the amounts."""
        self._done += done
        self._amounts = [total + amount for total, amount in zip(self._amounts, amounts, strict=True)]
        self.update(self._done, *self._amounts)

    def update(self, done: int | float, *amounts: int | float) -> None:
        """Sets how much of the total is done, and the amounts so far; cheap enough to call for every document."""
        now = time.monotonic()
        if self._quiet or now - self._last_shown < self._interval:
            return
        self._last_shown = now
        seconds = max(now - self._started, 1e-3)
        speeds = (f"{_short(amount / seconds)} {name}/s" for name, amount in zip(self._rates, amounts, strict=True))
        status = "  ".join([*speeds, f"{_memory() / 1e6:.0f} MB of memory"])
        if self._bar:
            self._bar.update(self._task, completed=done, status=status)
        else:
            share, here = min(done / self._total, 1.0), (done - self._before) / self._total
            left = f"{seconds * (1 - share) / here:.0f} s left" if here > 0 else "time left unknown"
            print(f"{self._job}: {share:6.1%}  {status}  {left}", file=sys.stderr, flush=True)


def _memory() -> int:
    """Resident bytes of this process and its workers."""
    import psutil  # takes 8 ms, which short jobs avoid

    here, total = psutil.Process(), 0
    for process in [here, *here.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total


def _new_bar() -> "Progress":
    # Takes 50 ms, which programs without a terminal avoid.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[status]}")
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)


def _short(rate: float) -> str:
    return f"{rate:.2f}" if rate < 10 else f"{rate:.1f}" if rate < 100 else f"{rate:,.0f}"
