"""What long jobs say: progress, information and warnings, through the logger "bert_jax".

Lines go to stderr, unless the program configures this logger: with a handler of its own, its lines go there and to the
handlers of the root logger; a level above INFO shows only warnings. On a terminal, progress is a bar.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_SECONDS_BETWEEN_LINES = 15.0
_SECONDS_BETWEEN_UPDATES = 0.5


LOGGER = logging.getLogger("bert_jax")
WARNING = "warning: "  # begins lines of this level, and stands before them on stderr


class _Stderr(logging.Handler):
    """Writes lines to what sys.stderr is at the time, which a progress bar or a notebook may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        mark = WARNING if record.levelno >= logging.WARNING else ""
        print(f"{mark}{record.getMessage()}", file=sys.stderr, flush=True)


def _logger() -> logging.Logger:
    """Returns the logger; the first call gives it the handler for stderr, unless the program has configured it."""
    # jax's libraries give the root logger a handler, so it does not tell whether the program configured anything.
    if not LOGGER.handlers:
        LOGGER.addHandler(_Stderr())
        LOGGER.propagate = False
        if LOGGER.level == logging.NOTSET:
            LOGGER.setLevel(logging.INFO)
    return LOGGER


def print_note(line: str, quiet: bool = False) -> None:
    """Logs one line of information, or a warning if it begins so."""
    if not quiet:
        level = logging.WARNING if line.startswith(WARNING) else logging.INFO
        _logger().log(level, "%s", line.removeprefix(WARNING))


def is_quiet() -> bool:
    """Whether progress and information are not shown."""
    return not _logger().isEnabledFor(logging.INFO)


@contextlib.contextmanager
def quietly(quiet: bool = True) -> Iterator[None]:
    """Shows only warnings while a `with` block runs, if `quiet`."""
    logger = _logger()
    level = logger.level
    if quiet:
        logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(level)


def is_watched() -> bool:
    """Whether a person reads stderr while the program runs, on a terminal or in a notebook."""
    return sys.stderr.isatty() or type(sys.stderr).__module__.partition(".")[0] == "ipykernel"


class Reporter:
    """Shows a job's progress while its `with` block runs: share, rates, memory of all processes, time left.

        with Reporter("counting", rows, ["rows"]) as reporter:
            reporter.advance(100, 100)  # 100 rows more are done, and are counted in the rate, rows/s

    Args:
        total: The value of `done` at the end.
        rates: A name for each amount that `advance` and `update` take: "MB" is shown as MB/s.
    """

    def __init__(self, job: str, total: int | float, rates: Sequence[str], quiet: bool = False) -> None:
        self._job = job
        self._total = max(total, 1)
        self._rates = rates
        self._quiet = quiet = quiet or is_quiet()
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

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def skip(self, before: int | float) -> None:
        """Sets how much an earlier run has done, which took no time in this one and is in none of the amounts."""
        self._before = before

    def advance(self, done: int | float, *amounts: int | float) -> None:
        """Adds to the done part and to the amounts."""
        self._done += done
        self._amounts = [total + amount for total, amount in zip(self._amounts, amounts, strict=True)]
        self.update(self._done, *self._amounts)

    def update(self, done: int | float, *amounts: int | float) -> None:
        """Sets the done part and the amounts so far; cheap enough to call for every document."""
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
            # The time left follows from the speed of this run alone.
            share, here = min(done / self._total, 1.0), (done - self._before) / self._total
            left = f"{seconds * (1 - share) / here:.0f} s left" if here > 0 else "time left unknown"
            print_note(f"{self._job}: {share:6.1%}  {status}  {left}")


def _memory() -> int:
    """Returns the resident bytes of this process and its workers."""
    import psutil  # takes 8 ms, which short jobs avoid

    here, total = psutil.Process(), 0
    for process in [here, *here.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue  # it has ended
    return total


def _new_bar() -> "Progress":
    # Takes 50 ms, which programs without a terminal avoid.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[status]}")
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)


def _short(rate: float) -> str:
    return f"{rate:.2f}" if rate < 10 else f"{rate:.1f}" if rate < 100 else f"{rate:,.0f}"
