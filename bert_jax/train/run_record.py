"""Records the starts of a run in run.json: command, time, host, devices, versions, commit and configuration.

    {"starts": [{"time": ..., "step": 0, "command": ..., ..., "configuration": {...}}, ...]}

A resumed run adds a start. config.json says what the checkpoints hold, and opens them; run.json says how they came
about, and nothing reads it but reports and model cards.
"""

import contextlib
import datetime
import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import bert_jax
from bert_jax.config import TrainConfig, from_flags
from bert_jax.config.options import keys
from bert_jax.storage.location import Location, write_json
from bert_jax.train import distributed
from bert_jax.train.run import Run

RUN_FILE = "run.json"
PROGRAMS = {"__main__.py": "python -m bert_jax", "bert-jax": "bert-jax"}  # by the name of the file that runs


def record_start(run: Run, provenance: Mapping[str, Any], step: int, differences: Sequence[str]) -> None:
    """Adds a start to WORKDIR/run.json, in process 0.

    Args:
        provenance: the run's (train/workdir.py), with its resolved configuration and versions.
        step: the step at which it starts.
        differences: from the checkpoint that it resumes, one line each.
    """
    if not distributed.is_primary():
        return
    requested = run.requested or run.config
    before = _values(from_flags(type(requested), run.recipe) if run.recipe else type(requested)())
    after = _values(requested)
    start = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "step": step,
        "command": command(),
        "host": socket.gethostname(),
        "processes": jax.process_count(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "versions": provenance["versions"],
        "commit": commit(),
        "configuration": {
            "recipe": run.recipe,
            "changed": {key: value for key, value in after.items() if key not in before or before[key] != value},
            "given": after,
            "resolved": provenance["configuration"],
        },
        "differences": list(differences),
    }
    write_json(run.workdir / RUN_FILE, {"starts": [*read_starts(run.workdir), start]})


def read_starts(workdir: Location) -> list[dict[str, Any]]:
    """Returns the starts of a run, the last one last; none if there is no readable run.json."""
    # A damaged record must not stop a run, whose checkpoints hold all that it needs.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return list(json.loads((workdir / RUN_FILE).read_text(encoding="utf-8"))["starts"])
    return []


def seconds_since_first(workdir: Location) -> float:
    """Returns the seconds since a run began, by its record; 0 if there is none."""
    starts = read_starts(workdir)
    began = datetime.datetime.fromisoformat(starts[0]["time"]) if starts else None
    return 0.0 if began is None else (datetime.datetime.now(datetime.UTC) - began).total_seconds()


def copy_starts(source: Location, target: Location) -> None:
    """Copies run.json to another workdir."""
    if starts := read_starts(source):
        write_json(target / RUN_FILE, {"starts": starts})


def command() -> str:
    """Returns the command line of this process, as one types it."""
    program, *arguments = sys.argv or [""]
    name = PROGRAMS.get(Path(program).name, shlex.quote(program))
    return " ".join([name, *map(shlex.quote, arguments)])


def commit() -> str:
    """Returns the commit of the checkout that holds bert_jax, with "+changes" if its files differ; "" outside one."""
    folder = Path(bert_jax.__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # fails for a package installed inside another project
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _values(config: TrainConfig) -> dict[str, Any]:
    """Returns the values of a configuration by key, as JSON has them."""
    values: dict[str, Any] = json.loads(json.dumps({key.name: key.default for key in keys(config)}))
    return values
