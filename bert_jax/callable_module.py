"""Makes a module callable: bert_jax.finetune is the module of a command, and a function of `import bert_jax`."""

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """A module of bert_jax that is called as the function of the same name in bert_jax.api, which documents it."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._function()(*arguments, **keywords)

    @property
    def __signature__(self) -> inspect.Signature:
        """The parameters of the function, which editors and notebooks show."""
        return inspect.signature(self._function())

    def _function(self) -> Callable[..., Any]:
        api = importlib.import_module("bert_jax.api")
        return getattr(api, self.__name__.rpartition(".")[2])


def make_callable(name: str) -> None:
    """Makes the module of this name callable; does nothing where it runs as a command."""
    if name != "__main__":
        sys.modules[name].__class__ = CallableModule
