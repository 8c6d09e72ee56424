"""Shared by all benchmarks: the JSON line of a result, versions, commit, and the peak memory of a job."""

import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from bert_jax.command_line import EXIT_STOPPED
from bert_jax.errors import Stopped, UserError
from bert_jax.storage.files import read_json, write_json

REPOSITORY = Path(__file__).resolve().parent.parent
SETTINGS_FILE = "settings.json"  # in a folder of results
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy", "pyarrow", "tokenizers")


def emit(
    name: str,
    value: float,
    unit: str,
    peer: str | None,
    peer_value: float | None,
    settings: Mapping[str, Any],
    peer_versions: Mapping[str, str] | None = None,
    lower_is_better: bool = False,
) -> dict[str, Any]:
    """Prints a result as one JSON line on stdout, and returns it.

    ratio says how many times better bert_jax is than the peer (above 1: better); null without a peer.
    """
    ratio = None
    if peer_value and value:
        ratio = peer_value / value if lower_is_better else value / peer_value
    result = {
        "name": name,
        "value": _rounded(value),
        "unit": unit,
        "peer": peer,
        "peer_value": _rounded(peer_value),
        "ratio": _rounded(ratio),
    }
    return _print_line(result, settings, peer_versions)


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the checkout, with "+changes" if files differ from it; None outside a checkout."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def short_commit(commit: str | None) -> str:
    """The first 12 digits of what `commit` returns, still with "+changes" if files differed; "unknown" for None."""
    digits, changes, _ = (commit or "unknown").partition("+changes")
    return digits[:12] + changes


def machine() -> dict[str, Any]:
    """The machine: processor, cores that this process may use, memory in GB, and its NVIDIA GPUs if it has any."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": cores,
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }
    return found | ({"gpus": gpus} if (gpus := _gpus()) else {})


def shared_data() -> Path | None:
    """The folder of larger real data that BERT_JAX_DATA names, or None if it is unset; the caller then skips."""
    folder = os.environ.get("BERT_JAX_DATA")
    return Path(folder).absolute() if folder else None


def run_command(line: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """Runs a command in this checkout, passes SIGTERM on to it, and returns what it prints.

    variables are added to its environment. Raises Stopped if a signal stopped it, and UserError if it failed.
    """
    environment = os.environ | dict(variables or {})
    with subprocess.Popen(line, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, env=environment) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            printed, _ = process.communicate()
        finally:
            signal.signal(signal.SIGTERM, before)
    if process.returncode in (EXIT_STOPPED, -signal.SIGTERM):
        raise Stopped(f"{' '.join(line[1:4])} was stopped; the same command resumes it")
    if process.returncode:
        raise UserError(f"{' '.join(line[1:4])} ended with code {process.returncode}; its own message is above")
    return printed


def keep_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes the settings to a new folder of results, by the names of their flags.

    Raises:
        UserError: The folder has other settings. Results must not be mixed.
    """
    file = folder / SETTINGS_FILE
    if not file.exists():
        write_json(file, dict(settings))
        return
    before = read_json(file)
    changed = [f"--{name} {before.get(name)} (now {now})" for name, now in settings.items() if before.get(name) != now]
    if changed:
        raise UserError(f"{folder} holds results of {', '.join(changed)}; use the same, or another --output")


def replace_block(page: Path, begin: str, content: str, end: str) -> None:
    """Replaces the text between two marker lines of a page. Raises UserError if a marker is missing."""
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise UserError(f"{page} lacks the lines {begin.strip()} and {end.strip()}. Add them where the table belongs")
    page.write_text(before + begin + content + end + after, encoding="utf-8")


class ProcessTree:
    """Samples a process and all its descendants while the `with` block runs.

    peak_bytes       the maximum of the summed resident memory: an upper bound, because pages that processes
                     share (libraries) count several times
    peak_processes   the number of processes at that time
    cpu_seconds      the CPU time of all processes, up to their last samples
    """

    def __init__(self, pid: int | None = None, every_seconds: float = 0.05) -> None:
        self.peak_bytes = 0
        self.peak_processes = 0
        self._cpu_seconds: dict[int, float] = {}
        self._root = psutil.Process(pid)
        self._every_seconds = every_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "ProcessTree":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def cpu_seconds(self) -> float:
        return sum(self._cpu_seconds.values())

    def _watch(self) -> None:
        while not self._ended.wait(self._every_seconds):
            total, processes = 0, 0
            for process in self._tree():
                with contextlib.suppress(psutil.Error), process.oneshot():
                    used = process.cpu_times()
                    self._cpu_seconds[process.pid] = used.user + used.system
                    total += process.memory_info().rss
                    processes += 1
            if total > self.peak_bytes:
                self.peak_bytes, self.peak_processes = total, processes

    def _tree(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return []


def _print_line(
    result: dict[str, Any], settings: Mapping[str, Any], peer_versions: Mapping[str, str] | None
) -> dict[str, Any]:
    """Prints a result as JSON with its settings, machine, versions and commit, and returns all of it."""
    whole = result | {
        "settings": dict(settings) | {"machine": machine()},
        "versions": versions() | dict(peer_versions or {}),
        "commit": commit(),
    }
    print(json.dumps(whole), flush=True)
    return whole


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """The names of the NVIDIA GPUs, without opening them as jax would."""
    try:
        line = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(line, check=True, capture_output=True, text=True, timeout=30).stdout.split("\n")[:-1]
    except (OSError, subprocess.SubprocessError):
        return []


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout.strip()


def finetune_command(recipe: str, workdir: Path, options: Sequence[str]) -> list[str]:
    """The arguments of Python that fine-tune by a recipe of configs/; options are configuration keys with values."""
    given = (f"--config.{option}" for option in options)
    config, folder = f"--config={REPOSITORY / 'configs' / recipe}", f"--workdir={workdir.absolute()}"
    return ["-m", "bert_jax", "finetune", config, folder, *given]  # run in the repository
