"""From a machine with only Python and pip to the first results: what a new user waits for.

    python -m benchmarks.first_use --output runs/first_use
    python -m benchmarks.first_use --output runs/first_use --encoder FOLDER     (without the quickstart, a short trial)

It clones this repository at its commit, builds the wheel, and installs it with pip into a new environment. Everything
after that runs in an empty folder with an empty home directory, so nothing is cached, and with the commands and lines
that README.md and, for the CSV, docs/own_csv.md teach: the quickstart, whose export is the encoder of the rest, a
classifier of texts in a CSV, the first embedding and the first masked token. The last line of the output is JSON: the
seconds of each step and their sum, what the wheel holds, and the size of the environment. Times of building and
installing include downloads, and so depend on the network. Times of a process include its start.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from bert_jax import command
from bert_jax.command import UserError
from website.code_blocks import code_blocks

IMPORT = "import bert_jax"
EXPORTED = "runs/quickstart/exported"
LOAD = f'{IMPORT}\n\nmodel = bert_jax.load("{EXPORTED}")\n'  # the lines of README.md, without their comments
EMBED = LOAD + 'vectors = model.encode(["A good book.", "A bad one."])\n'
FILL_MASK = LOAD + 'guesses = model.fill_mask("She opened the [MASK] and went out.")\n'
QUICKSTART = "bert-jax quickstart --output runs/quickstart"  # of README.md
CSV, FINETUNE = 0, 1  # the blocks of docs/own_csv.md that make the files and fine-tune
RESULT = "runs/authors/result.json"  # of the second one
# Of the environment of this process; others (caches, paths of modules) would make the machine less new.
KEPT = ("LANG", "LC_ALL", "TMPDIR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
INSTALLED = """\
import json, platform
from importlib.metadata import distributions
print(json.dumps({"python": platform.python_version()} | {each.name: each.version for each in distributions()}))
"""


def environment(folder: Path, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of all steps: those of a new user, whose home directory is empty, and pip's settings."""
    kept = {name: value for name, value in given.items() if name in KEPT or name.startswith("PIP_")}
    path = os.pathsep.join([str(folder / "venv" / "bin"), "/usr/local/bin", "/usr/bin", "/bin"])
    return kept | {"PATH": path, "HOME": str(folder / "home"), "PIP_NO_CACHE_DIR": "1"}


def wheel_contents(wheel: Path) -> dict[str, Any]:
    """The top-level names of a wheel, the number of its files, and its bytes as stored and unpacked."""
    with zipfile.ZipFile(wheel) as archive:
        files = [entry for entry in archive.infolist() if not entry.is_dir()]
    return {
        "top_level": sorted({entry.filename.partition("/")[0] for entry in files}),
        "files": len(files),
        "bytes": wheel.stat().st_size,
        "unpacked_bytes": sum(entry.file_size for entry in files),
    }


def taught_blocks(document: Path) -> list[str]:
    """The code of the blocks of a document that its tests run, in order."""
    return [block.code for block in code_blocks(document.read_text(encoding="utf-8")) if block.mark == "run"]


class Steps:
    """Runs commands in the folder of the new user, and measures each."""

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.seconds: dict[str, float] = {}
        self._environment = environment(folder)

    def run(self, name: str, *line: str | Path) -> str:
        """Runs a command, keeps its wall-clock time under `name`, and returns what it prints on stdout."""
        print(f"{name}: {' '.join(str(word).partition(chr(10))[0] for word in line)}", file=sys.stderr)
        begun = time.perf_counter()
        ended = subprocess.run(
            [str(word) for word in line], cwd=self.work, env=self._environment, stdout=subprocess.PIPE, text=True
        )
        self.seconds[name] = round(time.perf_counter() - begun, 2)
        if ended.returncode:
            raise UserError(f"{name} ended with code {ended.returncode}; its own message is above")
        return ended.stdout


def measure(output: Path, python: str, encoder: Path | None) -> dict[str, Any]:
    """Runs all steps in a new folder, prints the result, and returns it.

    Raises UserError for an output that exists, for uncommitted changes, and for a step that fails.
    """
    if output.exists():
        raise UserError(f"{output} exists. The steps need an empty folder: name another --output, or remove it")
    if (common.commit() or "+changes").endswith("+changes"):
        raise UserError("the wheel is built from a clone of the commit: commit or stash your changes first")
    for name in ("home", "work"):
        (output / name).mkdir(parents=True)
    steps = Steps(output)
    steps.run("clone", "git", "clone", "--quiet", common.REPOSITORY, output / "source")
    steps.run("environment", python, "-m", "venv", output / "venv")
    steps.run("wheel", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", output / "wheels", output / "source")
    [wheel] = (output / "wheels").glob("*.whl")
    steps.run("install", "pip", "install", "--quiet", wheel)
    installed = json.loads(steps.run("versions", "python", "-c", INSTALLED))
    for name in ("version_first", "version"):
        shown = steps.run(name, "bert-jax", "--version").strip()
    for name in ("import_first", "import"):
        steps.run(name, "python", "-c", IMPORT)
    steps.run("import_load", "python", "-c", f"{IMPORT}\n\nbert_jax.load")  # which imports jax
    if encoder is None:
        steps.run("quickstart", *QUICKSTART.split())
    else:
        shutil.copytree(encoder, steps.work / EXPORTED)
    shutil.copytree(steps.work / EXPORTED, steps.work / "encoder")  # as docs/own_csv.md says
    steps.run("embedding", "python", "-c", EMBED)
    steps.run("masked_token", "python", "-c", FILL_MASK)
    blocks = taught_blocks(common.REPOSITORY / "docs" / "own_csv.md")
    steps.run("csv", "python", "-c", blocks[CSV])
    steps.run("finetune", "bash", "-euo", "pipefail", "-c", blocks[FINETUNE])
    result = json.loads((steps.work / RESULT).read_text(encoding="utf-8"))
    del steps.seconds["versions"]
    files = [path for path in (output / "venv").rglob("*") if path.is_file() and not path.is_symlink()]
    used = sum(path.stat().st_size for path in files)
    return common.emit(
        "first_use",
        round(sum(steps.seconds.values()), 1),
        "s",
        peer=None,
        peer_value=None,
        settings={
            "seconds": steps.seconds,
            "version": shown,
            "wheel": wheel_contents(wheel),
            "environment": {"distributions": len(installed) - 1, "bytes": used},
            "finetune_metrics": {name: value["mean"] for name, value in result["metrics"].items()},
        },
        peer_versions={name: version for name, version in installed.items() if name in ("python", *common.PACKAGES)},
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path, help="a new folder, a few gigabytes")
    parser.add_argument("--python", default=sys.executable, help="of the new environment (default: this one)")
    parser.add_argument("--encoder", type=Path, help="an export to use instead of running the quickstart")
    options = parser.parse_args(arguments)
    encoder = options.encoder.absolute() if options.encoder else None
    measure(options.output.absolute(), options.python, encoder)


if __name__ == "__main__":
    command.run(main)
