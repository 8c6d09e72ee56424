"""Runs the commands of a checkout in a folder of its own and reads what they write, for freeze.py."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Fields that may differ between two runs of the same code: times, speed, memory, versions, the machine.
VOLATILE = {
    *("time", "seconds", "created", "versions", "tokens_per_second", "mfu", "data_wait_share", "peak_memory_gb"),
    *("step_seconds", "checkpoint_seconds", "goodput"),
    *("seconds_per_step", "commit", "sha256_of_meta"),
}


class CommandFailed(Exception):
    """A command ended with another exit code than 0."""


@dataclass(frozen=True)
class Sandbox:
    """A checkout, and the folder in which its commands run: relative paths in its outputs are the same everywhere."""

    checkout: Path
    work: Path
    libtpu: str = ""

    def check(self) -> None:
        """Exits unless commands import the checkout itself, rather than an installed version."""
        self.work.mkdir(parents=True, exist_ok=True)
        code = "import bert_jax; print(bert_jax.__file__)"
        found = subprocess.run([sys.executable, "-c", code], env=self.environment(), cwd=self.work, text=True,
                               stdout=subprocess.PIPE, check=True).stdout.strip()  # fmt: skip
        if not Path(found).is_relative_to(self.checkout):
            sys.exit(f"commands import {found}, not {self.checkout}/bert_jax; check --checkout")

    def clear(self, group: str) -> None:
        """Makes the work folder of a group, empty."""
        shutil.rmtree(self.work / group, ignore_errors=True)
        (self.work / group).mkdir()

    def environment(self, **changes: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "BERT_JAX_DATA")}
        path = os.pathsep.join(filter(None, (str(self.checkout), changes.pop("path", ""))))
        return inherited | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "COLUMNS": "200"} | changes

    def recipe(self, name: str) -> str:
        return f"--config={self.checkout}/configs/{name}"

    def attempt(self, name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs `python -m bert_jax NAME ARGUMENTS` in the work folder, with any exit code."""
        command = [sys.executable, "-m", "bert_jax", name, *arguments]
        return subprocess.run(command, cwd=self.work, env=self.environment(**environment), text=True,
                              capture_output=True, check=False)  # fmt: skip

    def run(self, name: str, *arguments: str, **environment: str) -> str:
        """As attempt, and returns the standard output. Raises CommandFailed for another exit code than 0."""
        done = self.attempt(name, *arguments, **environment)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or [""]
            raise CommandFailed(f"{name} {' '.join(arguments)}: exit code {done.returncode}: {last[0]}")
        return done.stdout

    def without_paths(self, text: str) -> str:
        return text.replace(str(self.work), "WORK").replace(str(self.checkout), "CHECKOUT")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def without_volatile(value: Any) -> Any:
    """A JSON value in which volatile fields keep their names and lose their values."""
    if isinstance(value, dict):
        return {key: "-" if key in VOLATILE else without_volatile(one) for key, one in value.items()}
    return [without_volatile(one) for one in value] if isinstance(value, list) else value


def read_json(file: Path) -> Any:
    return without_volatile(json.loads(file.read_text(encoding="utf-8")))


def read_lines(file: Path) -> list[Any]:
    return [without_volatile(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def hashes(folder: Path) -> dict[str, Any]:
    """The hash of every file of a folder; JSON files field by field where they hold volatile fields."""
    found: dict[str, Any] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(file.relative_to(folder))
        if file.name == "manifest.json":
            found[name] = read_json(file)
        elif file.name == "SHA256SUMS":  # names the hash of tokenizer files and shards, but the manifest is volatile
            lines = file.read_text(encoding="utf-8").splitlines()
            found[name] = [line for line in lines if "manifest.json" not in line]
        else:
            found[name] = sha256(file.read_bytes())
    return found


def array(value: Any) -> str:
    """The dtype, shape and bytes of an array as one text."""
    plain = np.ascontiguousarray(value)
    return f"{plain.dtype}{list(plain.shape)} {sha256(plain.tobytes())}"


def arrays(file: Path) -> dict[str, str]:
    """Every array of an .npz or .safetensors file."""
    if file.suffix == ".npz":
        with np.load(file) as stored:
            return {name: array(stored[name]) for name in sorted(stored.files)}
    from safetensors.numpy import load_file

    return {name: array(value) for name, value in sorted(load_file(file).items())}


def checkpoint(step: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, and its metadata."""
    import jax
    import orbax.checkpoint as ocp

    found: dict[str, Any] = {}
    for part in sorted(path for path in step.iterdir() if (path / "_METADATA").exists()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of shardings: the arrays are wanted as a whole
            handler = ocp.PyTreeCheckpointHandler()
            kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(part).tree)
            tree = ocp.Checkpointer(handler).restore(part, restore_args=kinds)
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        found[part.name] = {jax.tree_util.keystr(path): array(value) for path, value in leaves}
    found["meta"] = read_json(step / "meta" / "metadata")
    found["meta"].pop("sha256", None)  # of the metadata itself, times included
    return found


def workdir(folder: Path) -> dict[str, Any]:
    """All that a run leaves: tensors, logged numbers, configuration, result, and the names of its files."""
    found: dict[str, Any] = {"files": _layout(folder)}
    for file in ("config.json", "result.json"):
        if (folder / file).exists():
            found[file] = read_json(folder / file)
    if (folder / "metrics.jsonl").exists():
        found["metrics"] = read_lines(folder / "metrics.jsonl")
    for step in sorted(folder.glob("checkpoints/*")):
        found[f"checkpoints/{step.name}"] = checkpoint(step) if step.is_dir() else read_json(step)
    for inner in sorted(path for path in folder.glob("seed-*") if path.is_dir()):
        found[inner.name] = workdir(inner)
    return found


def _layout(folder: Path) -> list[str]:
    """The files of a workdir, without the names that contain a time or a hash."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    plain = (re.sub(r"tfevents\..*", "tfevents", re.sub(r"/d/[0-9a-f]{32}$", "/d/*", name)) for name in names)
    return sorted(set(plain))


def options(flags: Mapping[str, Any], prefix: str = "--config.") -> list[str]:
    """Command line overrides of configuration keys."""
    return [f"{prefix}{name}={value}" for name, value in flags.items()]
