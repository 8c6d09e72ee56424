"""Lists, shows and copies the recipes that come with bert_jax."""

import ast
import itertools
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

A recipe is a Python file that returns a configuration. --config takes its name or a file, and some recipes take an
argument after a colon (`--config modernbert:base`), which the list shows in brackets. --config.KEY=VALUE changes a key.
"""


def listing() -> str:
    """Lists the recipes, one on each line, by command."""
    lines: dict[str, list[str]] = {"pretrain": ["pretrain:"], "finetune": ["finetune:"]}
    for name, file in shipped_recipes().items():
        docstring, argument = _read(file)
        # A recipe does not say its kind, but its docstring has the command to run it.
        [command] = [command for command in lines if f"bert-jax {command}" in docstring]
        lines[command].append(f"  {name + argument:32} {docstring.partition(chr(10))[0]}")
    return "\n".join(itertools.chain(*lines.values()))


@dataclass(frozen=True)
class Options:
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
        raise UserError(f"{options.name} is your own file. Name a recipe of bert_jax: `bert-jax recipes` lists them")
    file = shipped_recipes()[options.name]
    if not options.copy:
        print(_read(file)[0])
        return
    refuse_existing(Path(options.copy))
    shutil.copyfile(file, options.copy)
    print(f"copied {options.name} to {options.copy}: use it as --config {options.copy}")


def _read(file: Path) -> tuple[str, str]:
    """Returns a recipe's docstring, and the default of get_config's argument as `[:base]`, empty without one.

    It parses the file, because importing it would import jax.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    defaults = functions["get_config"].args.defaults
    return ast.get_docstring(tree) or "", f"[:{ast.literal_eval(defaults[0])}]" if defaults else ""
