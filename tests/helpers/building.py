"""Runs jobs of build_examples for tests, and reads their outputs."""

import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.build import build
from data_prep.build_options import BuildOptions

ROOT = Path(__file__).parent.parent.parent
# Seconds after which a job hangs: no test waits that long for a sound one, on however busy a machine.
PATIENCE = 300.0


def contents(directory: Path) -> dict[str, str]:
    """A hash of every file of an output, by name."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


# Enough units, each long enough, that a job can be stopped between them on any machine.
MANY_UNITS: dict[str, Any] = {"seq_len": 64, "eval_fraction": 0.1, "unit_mb": 0.01, "dupe_factor": 100}


def build_here(corpus: Path, vocab_dir: Path, folder: Path) -> Path:
    """The output of one process, which every engine must equal."""
    build(BuildOptions(corpus, vocab_dir, folder / "out", workers=1, **MANY_UNITS))
    return folder / "out"


def with_engine(engine: str, corpus: Path, vocab_dir: Path, folder: Path) -> dict:
    """The arguments of `build` for the same output by two workers of an engine."""
    files = {"input": str(corpus), "tokenizer": vocab_dir, "output": folder / "out"}
    return files | MANY_UNITS | {"workers": 2, "engine": engine}


def command_line(arguments: dict) -> list[str]:
    flags = [f"--{name}={value}" for name, value in arguments.items()]
    return [sys.executable, "-m", "bert_jax", "build-examples", *flags]


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the job did not get this far in time"
        time.sleep(0.001)


def finished_units(output: Path) -> int:
    return len(list(output.with_name(output.name + ".incomplete").glob("job/units/*.json")))


def begin(arguments: dict) -> subprocess.Popen:
    """Starts the command in its own process group, as a shell does, and waits until it has finished another unit."""
    before = finished_units(arguments["output"])
    # Where tests run in the background Ctrl-C is ignored, and a child would inherit that.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            command_line(arguments), cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    wait_for(lambda: finished_units(arguments["output"]) > before or process.poll() is not None)
    assert process.poll() is None, process.communicate()[1]
    return process


def end(process: subprocess.Popen) -> tuple[int, str]:
    """The exit status of a command and its last line."""
    _, told = process.communicate(timeout=PATIENCE)
    return process.returncode, told.strip().splitlines()[-1]
