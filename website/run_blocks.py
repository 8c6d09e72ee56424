"""Runs code blocks of a document, by default those marked `<!-- run -->`, in order and in one folder."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bert_jax.errors import UserError
from website.code_blocks import CodeBlock, code_blocks

ROOT = Path(__file__).parent.parent
_PROGRAMS = {"bash": ("bash", "-euo", "pipefail", "-c"), "python": (sys.executable, "-c")}
_COMMANDS = {"bert-jax": "-m bert_jax", "python": ""}  # what the programs that blocks call give to this Python


@dataclass(frozen=True)
class Ran:
    """A block that ran: its first line in the document, from 1, what it printed on stdout, and its CPU seconds."""

    line: int
    printed: str
    cpu_seconds: float


def is_marked(block: CodeBlock) -> bool:
    """Whether tests run a block, too."""
    return block.mark == "run"


def run_blocks(document: Path, folder: Path, chosen: Callable[[CodeBlock], bool] = is_marked) -> list[Ran]:
    """Runs the chosen blocks in this folder, with the checkout's packages and this Python.

    Raises UserError for a block whose language is neither bash nor python, and for one that fails.
    """
    programs = folder / ".programs"
    programs.mkdir(parents=True)
    for name, arguments in _COMMANDS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    found = []
    for block in code_blocks(document.read_text(encoding="utf-8")):
        if not chosen(block):
            continue
        place = f"{document.name}, line {block.start + 1}"
        if block.language not in _PROGRAMS:
            raise UserError(f"{place}: a block that runs begins with ```bash or ```python")
        before = _children_seconds()
        line = [*_PROGRAMS[block.language], block.code]
        ended = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise UserError(f"{place} ended with code {ended.returncode}: {ended.stderr[-2000:]}")
        found.append(Ran(block.start + 1, ended.stdout, _children_seconds() - before))
    return found


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
