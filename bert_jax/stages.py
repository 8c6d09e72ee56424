"""Runs the commands of the quickstart one after another, and records the time and results of each stage."""

import contextlib
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from bert_jax.command import Stopped, UserError
from bert_jax.storage.local import write_json
from bert_jax.train.metrics import duration

RECORD = "quickstart.json"
LOG_WIDTH = 110  # of tables if the output is not a terminal


class Stages:
    """A folder and its RECORD: the completed stages, with seconds and figures, and whether all are complete.

    Raises UserError for a folder whose stages are all complete, and for one with other contents.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.console = Console(highlight=False, soft_wrap=True)
        if not self.console.is_terminal:
            self.console.width = LOG_WIDTH
        self.record: dict[str, Any] = {"finished": False, "stages": {}}
        if (self.folder / RECORD).exists():
            self.record = json.loads((self.folder / RECORD).read_text(encoding="utf-8"))
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise UserError(
                f"{self.folder} already exists and is not the output of a quickstart; choose another --output"
            )
        if self.record["finished"]:
            raise UserError(
                f"{self.folder} holds a finished quickstart (see {self.folder / RECORD}); to run it again, choose "
                f"another --output, or first run: rm -r {self.folder}"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.save()

    def path(self, name: str) -> str:
        """The path of a file in the folder, as an argument of a command."""
        return str(self.folder / name)

    def exists(self, name: str) -> bool:
        """Whether an earlier run has made a file already; prints a line if so."""
        if found := (self.folder / name).exists():
            self.console.print(f"already exists: {self.path(name)}")
        return found

    def save(self) -> None:
        write_json(self.folder / RECORD, self.record)

    @contextlib.contextmanager
    def stage(self, name: str, description: str) -> Iterator[dict[str, Any]]:
        """Times a stage. The caller puts its `figures` into the dict, which is recorded if the stage succeeds."""
        self.console.rule(f"[bold]{name}", align="left")
        self.console.print(description)
        entry: dict[str, Any] = {"figures": ""}
        started = time.monotonic()
        yield entry
        earlier = self.record["stages"].get(name, {}).get("seconds", 0.0)
        entry["seconds"] = round(earlier + time.monotonic() - started, 1)
        self.record["stages"][name] = entry
        self.save()
        self.console.print(f"[green]{entry['figures']}[/]  ({duration(entry['seconds'])})\n")

    def run(self, *arguments: str) -> None:
        """Prints and runs bert-jax with these arguments; its output is shown.

        Raises UserError if it fails, and Stopped after SIGTERM, which is forwarded to it.
        """
        with self._started(arguments) as process:
            code = process.wait()
        if code:
            raise UserError(f"exit code {code} from: {_command_line(arguments)}; its output is above")

    def run_and_kill(self, *arguments: str, when: Callable[[], bool]) -> None:
        """Runs a command as `run` does, and sends it SIGKILL when `when()` is true.

        Raises UserError if it ends before that.
        """
        with self._started(arguments) as process:
            while not when():
                if process.poll() is not None:
                    line = _command_line(arguments)
                    raise UserError(f"exit code {process.returncode} before it could be killed, from: {line}")
                time.sleep(0.1)
            process.kill()
        if self.console.is_terminal:
            self.console.show_cursor()  # a killed progress bar leaves the cursor hidden

    @contextlib.contextmanager
    def _started(self, arguments: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
        self.console.print(f"$ {_command_line(arguments)}", style="bold cyan", markup=False)
        self.console.file.flush()  # before the output of the command
        earlier = signal.signal(signal.SIGTERM, _stop)
        process = subprocess.Popen([sys.executable, "-m", "bert_jax", *arguments])
        try:
            yield process
            process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, earlier)


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise Stopped("SIGTERM: run the same command again to resume the stage that was stopped")


def _command_line(arguments: tuple[str, ...]) -> str:
    return f"bert-jax {shlex.join(arguments)}"
