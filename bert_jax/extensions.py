"""Runs Python files of the user that extend bert_jax: `--import FILE` in every command (docs/extending.md)."""

import importlib.util
import sys
import traceback
from pathlib import Path

from bert_jax.errors import UserError


def import_file(file: str | Path) -> None:
    """Imports a Python file as the module of its name, once.

    As for a script, files in its folder can be imported by it.

    Raises:
        UserError: There is no such file, its name is that of another module, or it raises an error.
    """
    path = Path(file).absolute()
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"--import {file}: no such Python file. Give one that registers an extension")
    name = path.stem
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) == str(path):
            return
        raise UserError(f"--import {file}: a module {name} is imported already. Rename the file")
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None  # of a .py file
    module = importlib.util.module_from_spec(specification)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # Registered first, because dataclasses look up their module.
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else 1)
        raise UserError(f"{file} line {line}: {type(error).__name__}: {error}") from error
