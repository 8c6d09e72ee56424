"""Tables of plans in a document: each row is a plan, made by its command if it is missing and kept as a JSON file."""

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from bert_jax import command
from bert_jax.command import UserError
from bert_jax.storage.local import read_json, write_json

END = "<!-- end of plans -->\n"
SHARDS = "SHARDS"  # stands for a folder of shards in the arguments of a plan
COMPILERS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
Found = dict[str, Any]  # the content of a plan's JSON file


@dataclass(frozen=True)
class PagePlan:
    """One plan of a page: the name of its file, its title, and its arguments."""

    name: str
    title: str
    arguments: tuple[str, ...]

    @property
    def line(self) -> str:
        return "bert-jax plan " + " ".join(self.arguments)

    def file(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"


@dataclass(frozen=True)
class PlanTable:
    """A table of a page.

    begin   the line of the page after which the table stands; the line END follows the table
    cells   gives the cells of a plan's row from the content of its JSON file, one for each column
    """

    begin: str
    columns: tuple[str, ...]
    cells: Callable[[PagePlan, Found], list[str]]
    plans: tuple[PagePlan, ...]

    def markdown(self, folder: Path) -> str:
        """The table, with a row for each plan that has a file in the folder."""
        files = [(plan, plan.file(folder)) for plan in self.plans]
        rows = [self.cells(plan, read_json(file)) for plan, file in files if file.exists()]
        lines = [f"| {' | '.join(self.columns)} |", "|---" * len(self.columns) + "|"]
        return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def parser(program: str, description: str) -> command.Parser:
    """The flags that `update` reads."""
    made = command.Parser(program, description)
    made.add_argument("--plans", type=Path, required=True, help="the folder of the plans' JSON files")
    made.add_argument("--only", default="", help="make only plans whose name begins with this")
    made.add_argument("--page", type=Path, help="write the tables into this page, between their markers")
    return made


def update(tables: Sequence[PlanTable], flags: argparse.Namespace, shards: Path | None = None) -> None:
    """Makes the plans that the folder lacks, and writes the tables into the page, or prints them with all commands.

    Raises UserError where no plan has a name as --only says.
    """
    plans = [plan for table in tables for plan in table.plans]
    chosen = [plan for plan in plans if plan.name.startswith(flags.only)]
    if not chosen:
        raise UserError(
            f"--only is {flags.only}, with which no plan begins; choose from {', '.join(one.name for one in plans)}"
        )
    flags.plans.mkdir(parents=True, exist_ok=True)
    for plan in chosen:
        if not plan.file(flags.plans).exists():
            make(plan, flags.plans, shards)
    if flags.page:
        write(tables, flags.plans, flags.page)
    else:
        print("\n".join([*(table.markdown(flags.plans) for table in tables), *(plan.line for plan in plans)]))


def write(tables: Sequence[PlanTable], folder: Path, page: Path) -> None:
    """Writes the tables into the page. Raises UserError for a page without their markers."""
    for table in tables:
        common.replace_block(page, table.begin, table.markdown(folder), END)


def make(plan: PagePlan, folder: Path, shards: Path | None) -> None:
    """Runs the command of a plan, and writes its JSON file with the versions and the commit that it was made with.

    Raises UserError if the plan reads shards and none are given.
    """
    if SHARDS in plan.line and shards is None:
        raise UserError(f"the plan {plan.name} reads shards; name their folder with --shards")
    arguments = [argument.replace(SHARDS, str(shards and shards.absolute())) for argument in plan.arguments]
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "plan.json"
        line = [sys.executable, "-m", "bert_jax", "plan", *arguments, "--json", str(file)]
        subprocess.run(line, cwd=common.REPOSITORY, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
        found = read_json(file)
    compilers = {one.name: one.version for one in importlib.metadata.distributions() if one.name in COMPILERS}
    made_with = {"versions": common.versions() | compilers, "commit": common.commit()}
    write_json(plan.file(folder), found | made_with)
