"""Lists, shows and copies the recipes that come with bert_jax."""

import ast
import inspect
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_jax.config.loading import recipe_file, shipped_recipes
from bert_jax.config.options import option, parse
from bert_jax.errors import UserError
from bert_jax.storage.files import refuse_existing

DESCRIPTION = """Lists the recipes that come with bert_jax, shows one, or copies one so that you can change it.

  bert-jax recipes                                 the list
  bert-jax recipes modernbert                      its command, hardware, expected result and source
  bert-jax recipes modernbert --copy mine.py       a file of your own, for --config mine.py

A recipe is a Python file that returns a configuration. --config takes its name or a file, with an argument after a
colon where the recipe has one (`--config modernbert:base`), and --config.KEY=VALUE changes a key. The argument and its
default are in brackets.
"""


def describe(name: str) -> str:
    """The line of a recipe in the list: its name, its argument, and the first line of its docstring."""
    summary = _docstring(shipped_recipes()[name]).partition("\n")[0]
    return f"{name + _argument(name):32} {summary}"


def listing() -> str:
    """The recipes by the command that they are for, one a line."""
    lines = []
    for command_name in ("pretrain", "finetune"):
        names = [name for name, file in shipped_recipes().items() if f"bert-jax {command_name}" in _docstring(file)]
        lines += [f"{command_name}:", *(f"  {describe(name)}" for name in names)]
    return "\n".join(lines)


@dataclass(frozen=True)
class Options:
    """The flags of the command."""

    name: str = option("", "the recipe to show or copy; without it, the list", metavar="NAME", positional="?")
    copy: str = option("", "copy the recipe to a new file instead of showing it", metavar="FILE")


def main(arguments: Sequence[str]) -> None:
    options = parse("bert-jax recipes", DESCRIPTION, Options, arguments)
    if not options.name:
        if options.copy:
            raise UserError("--copy needs the recipe to copy: bert-jax recipes NAME --copy FILE")
        print(listing())
        return
    if options.name not in shipped_recipes():
        recipe_file(options.name)  # raises UserError for a name that is no file either
        raise UserError(f"{options.name} is a file of yours. Name a recipe of bert_jax: `bert-jax recipes` lists them")
    file = shipped_recipes()[options.name]
    if not options.copy:
        print(_docstring(file))
        return
    refuse_existing(Path(options.copy))
    shutil.copyfile(file, options.copy)
    print(f"copied {options.name} to {options.copy}: use it as --config {options.copy}")


def _docstring(file: Path) -> str:
    return inspect.cleandoc(ast.get_docstring(_parsed(file)) or "")


def _argument(name: str) -> str:
    """The default of get_config's argument as `[:base]`; nothing for a recipe without an argument."""
    for node in _parsed(shipped_recipes()[name]).body:
        if isinstance(node, ast.FunctionDef) and node.name == "get_config" and node.args.defaults:
            return f"[:{ast.literal_eval(node.args.defaults[0])}]"
    return ""


def _parsed(file: Path) -> ast.Module:
    """The syntax tree of a recipe, which says what it is without importing jax."""
    return ast.parse(file.read_text(encoding="utf-8"))
