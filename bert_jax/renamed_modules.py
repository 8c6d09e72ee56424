"""Refuses to import a module by a name that it no longer has, and says where its contents are now."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

# Lines of an old and a new name. CHANGELOG.md also lists renamed functions and classes.
RENAMED = Path(__file__).with_name("renamed_modules.txt")


class RefuseRenamed(importlib.abc.MetaPathFinder):
    """The last finder that Python asks, so it sees only modules that no other finder knows."""

    def find_spec(
        self, fullname: str, path: Iterable[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Raises ModuleNotFoundError for a renamed module of bert_jax or data_prep; knows no other module."""
        if fullname.startswith(("bert_jax.", "data_prep.")):
            renamed = dict(line.split() for line in RENAMED.read_text(encoding="utf-8").splitlines())
            if fullname in renamed:
                message = f"{fullname} has been renamed: import {renamed[fullname]} (CHANGELOG.md lists all new names)"
                raise ModuleNotFoundError(message, name=fullname)
        return None


def refuse_renamed_modules() -> None:
    """Adds the finder to Python's, once."""
    if not any(isinstance(finder, RefuseRenamed) for finder in sys.meta_path):
        sys.meta_path.append(RefuseRenamed())
