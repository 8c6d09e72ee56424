"""Finds the recipes that come with bert_jax by name, e.g. `bert_base` or `glue`."""

import difflib
import importlib.util
from pathlib import Path
from types import ModuleType

from bert_jax.errors import UserError

_PACKAGE = Path(__file__).parent.parent
FOLDER = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"


def shipped_recipes() -> dict[str, Path]:
    """Returns the file of each recipe by its name, sorted."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.py")) if path.stem != "__init__"}


def recipe_file(name: str) -> Path:
    """Returns the file of a recipe: the one of that name that comes with bert_jax, or else a file of the user.

    So a file of the user that is called `own` does not replace a recipe; ./own names it. Raises UserError for a name
    that is neither.
    """
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    if Path(name).is_file():
        return Path(name)
    stem = Path(name).stem
    if stem in shipped:
        raise UserError(f"no such recipe: {name}. bert_jax has one of that name: write {stem}")
    near = difflib.get_close_matches(stem, list(shipped), n=1, cutoff=0.5)
    advice = f"Did you mean {near[0]}?" if near else "Give a file or the name of a recipe:"
    raise UserError(f"no such recipe: {name}. {advice} `bert-jax recipes` lists those of bert_jax")


def recipe_module(name: str) -> ModuleType:
    """Runs a recipe's file and returns its module, so that one recipe can build on another.

    Raises UserError for a recipe that does not exist.
    """
    file = recipe_file(name)
    specification = importlib.util.spec_from_file_location("recipe", file)
    if specification is None or specification.loader is None:
        raise UserError(f"{file} is not a recipe. Give a Python file that defines get_config()")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
