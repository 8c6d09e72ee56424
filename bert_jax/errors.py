"""The errors that users see. bert_jax/command_line.py turns each of them into an exit code."""

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

_FLAG = re.compile(r"(?<![\w-])--([a-z]\w*)(?![\w.])")
# Stands before the names of options in messages.
_PREFIX = ContextVar("prefix", default="--")


class UserError(Exception):
    """A mistake of the user. The message is one line: what is wrong, where, and what to change."""


def flag(name: str) -> str:
    """Returns an option's name as its user writes it: --NAME for a command, NAME in a call from Python."""
    return f"{_PREFIX.get()}{name}"


@contextlib.contextmanager
def naming_arguments() -> Iterator[None]:
    """Decorates a function that Python code calls: while it runs, `flag` returns names without dashes."""
    token = _PREFIX.set("")
    try:
        yield
    except UserError as error:
        # Of messages that do not use `flag` yet. Flags of a command that the message advises stay.
        before, command, after = str(error).partition("bert-jax ")
        error.args = (_FLAG.sub(r"\1", before) + command + after,)
        raise
    finally:
        _PREFIX.reset(token)


class Stopped(BaseException):
    """SIGTERM or Ctrl-C arrived, and the work was saved. The message says where, and how to resume.

    Like KeyboardInterrupt it is not an Exception: a signal can arrive anywhere, and error handlers must not catch it.
    """

    def __init__(self, message: str, cause: str = "SIGTERM") -> None:
        super().__init__(f"{cause}: {message}")
        self.cause = cause


class RunAgain(Exception):
    """This process cannot continue, but the same command, run again, can. The message says why."""


def install_hint(extra: str, package: Path = Path(__file__).parent) -> str:
    """Returns the command that adds an extra to this installation of bert_jax: a clone, or an installed package."""
    # No package index has bert_jax, so its name alone would find nothing, or somebody else's project.
    if (package.parent / "setup.cfg").is_file():
        return f"pip install --editable '{package.parent}[{extra}]'"
    wheel = f"pip install --no-index --find-links WHEELS 'bert_jax[{extra}]'"
    return f"pip install '.[{extra}]' in the clone of bert_jax, or {wheel} with its wheels (docs/install.md)"


def one_line(message: str) -> str:
    """Replaces each run of white space in a message by one space."""
    return " ".join(message.split())
