"""The border between a person at a terminal and the library: flags in, exit codes out.

Exit codes are a contract: 0 success; 2 the user's mistake, told in one line that says what was wrong, where, and
what to change; 75 the same command, run again, goes on: another process of the run died, or its newest checkpoint was
damaged and is out of the way; 130 interrupted from the keyboard; 143 saved and stopped by SIGTERM.
Importing this module touches no device and imports no jax.
"""

import argparse
import atexit
import errno
import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

EXIT_USER_ERROR = 2
EXIT_STOPPED = 128 + 15  # what a shell reports for a process ended by SIGTERM
EXIT_LOST = 75  # EX_TEMPFAIL of BSD's sysexits.h: worth another try
EXIT_INTERRUPTED = 128 + 2  # what a shell reports for a process ended by SIGINT


class UserError(Exception):
    """A mistake of the user's. The message is one line: what was wrong, where, and what to change."""


class Stopped(BaseException):
    """SIGTERM arrived and the work was saved; the message says where and how to go on.

    No Exception, as KeyboardInterrupt is none: a signal may come anywhere, and what handles errors there is not to
    take it for one.
    """


class RunAgain(Exception):
    """This process cannot go on, but the same command, run again, can; the message says why."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are one line, and whose help keeps the layout of its text."""

    def __init__(self, module: str, description: str) -> None:
        super().__init__(
            prog=f"python -m {module}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See: {self.prog} --help")

    def add_switch(self, name: str, **keywords: object) -> None:
        """Adds --name and --noname, None when neither is given."""
        group = self.add_mutually_exclusive_group()
        group.add_argument(f"--{name}", dest=name, action="store_const", const=True, default=None, **keywords)  # type: ignore[arg-type]
        group.add_argument(f"--no{name}", dest=name, action="store_const", const=False, help=argparse.SUPPRESS)


def run(main: Callable[[Sequence[str]], None]) -> NoReturn:
    """Runs a command's main on the command line and turns what it raises into an exit code."""
    # Without a last search of all objects for cycles a process ends some 50 ms sooner.
    atexit.register(gc.freeze)
    if sys.stderr is None:  # closed by who called
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process is there)
    try:
        main(sys.argv[1:])
    except BaseException as error:
        if (ended := outcome(error)) is None:
            raise
        _stop(*ended)
    sys.exit(0)


def outcome(error: BaseException) -> tuple[int, str] | None:
    """The exit code and the line for what a command raises; None for what is no user's mistake but a bug."""
    match error:
        case UserError():
            return EXIT_USER_ERROR, f"error: {error}"
        case Stopped():
            return EXIT_STOPPED, str(error)
        case RunAgain():
            return EXIT_LOST, f"error: {error}"
        case KeyboardInterrupt():
            return EXIT_INTERRUPTED, "interrupted"
        case OSError() if explained := explain_os_error(error):
            return EXIT_USER_ERROR, f"error: {explained}"
    return None


def explain_os_error(error: OSError) -> str | None:
    """One line for an operating-system failure that the user can mend, or None for any other."""
    where = error.filename or "the output folder"
    advice = {
        errno.ENOENT: f"no such file or folder: {where}. Check the path",
        errno.EACCES: f"no permission for {where}. Check its owner and mode",
        errno.EROFS: f"{where} is on a read-only file system. Choose another output folder",
        errno.ENOSPC: f"no space left for {where}. Free some space and run the same command again",
        errno.EDQUOT: f"no quota left for {where}. Free some space and run the same command again",
        errno.EFBIG: f"{where} grew over the file-size limit. Raise it (ulimit -f) and run the same command again",
        errno.ENOTDIR: f"{where} is not a folder. Choose another path",
        errno.EISDIR: f"{where} is a folder where a file was wanted. Name a file",
        errno.ENAMETOOLONG: f"{where} is too long a name. Choose a shorter one",
        errno.ELOOP: f"{where} is a link that leads round in a circle. Mend the link, or choose another path",
        errno.EIO: f"the disk failed to read or write {where}. Check the disk, or choose another one",
        errno.EMFILE: f"too many files are open to open {where}. Raise the limit (ulimit -n) and run the command again",
    }
    return advice.get(error.errno or 0)


def one_line(message: str) -> str:
    """A message without its line breaks."""
    return " ".join(message.split())


def _stop(code: int, message: str) -> NoReturn:
    print(one_line(message), file=sys.stderr, flush=True)
    sys.exit(code)
