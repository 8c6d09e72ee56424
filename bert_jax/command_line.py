"""The border between the command line and the library: argument parsing and exit codes. It does not import jax.

Exit codes are a contract: 0 success; 2 a mistake of the user, reported in one line that says what is wrong, where, and
what to change; 75 the same command, run again, resumes (another process of the run died, its newest checkpoint was
damaged and has been moved away, or an object store did not answer); 130 interrupted from the keyboard; 141 the program
that reads the output, such as head, ended first; 143 saved and stopped by SIGTERM.
"""

import argparse
import atexit
import errno
import functools
import gc
import os
import re
import select
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from bert_jax.errors import RunAgain, Stopped, UserError, one_line

EXIT_USER_ERROR = 2
EXIT_STOPPED = 128 + 15  # what a shell reports for a process that SIGTERM ended
EXIT_LOST = 75  # EX_TEMPFAIL of BSD's sysexits.h: running the command again may succeed
EXIT_INTERRUPTED = 128 + 2  # what a shell reports for a process that SIGINT ended
EXIT_UNREAD = 128 + 13  # what a shell reports for a process that SIGPIPE ended


class Parser(argparse.ArgumentParser):
    """The parser of a command, such as `bert-jax embed`: errors are one line, and the help text keeps its layout.

    config/options.py makes one from the dataclass of a command's options.
    """

    def __init__(self, program: str, description: str, **keywords: Any) -> None:
        layout = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=28)
        super().__init__(program, description=description, formatter_class=layout, allow_abbrev=False, **keywords)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See: {self.prog} --help")

    def add_switch(self, name: str, group: argparse._ArgumentGroup | None = None, **keywords: Any) -> None:
        """Adds --name and --noname, also --no-name, to a group; the value is None if none of them is given.

        With a metavar, --name may have a value, which replaces True.
        """
        switch = (group or self).add_mutually_exclusive_group()
        kind: dict[str, Any] = {"nargs": "?"} if "metavar" in keywords else {"action": "store_const"}
        switch.add_argument(f"--{name}", dest=name, const=True, default=None, **kind, **keywords)
        negations = f"--no{name}", f"--no-{name}"
        switch.add_argument(*negations, dest=name, action="store_const", const=False, help=argparse.SUPPRESS)


def run(main: Callable[[Sequence[str]], None]) -> NoReturn:
    """Runs a command's main with the command-line arguments and converts what it raises to an exit code."""
    # Skipping the final garbage collection ends the process about 50 ms sooner.
    atexit.register(gc.freeze)
    if sys.stderr is None:  # closed by the caller
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)
    try:
        main([expand_home(argument) for argument in sys.argv[1:]])
        print(end="", flush=True)  # also if it is None, closed by the caller
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and is_unread():
            sys.exit(EXIT_UNREAD)
        if (ended := outcome(error)) is None:
            raise
        code, message = ended
        print(one_line(message), file=sys.stderr, flush=True)
        sys.exit(code)
    sys.exit(0)


def is_unread() -> bool:
    """Whether the program that read the standard output has ended; the rest of the output is then dropped."""
    # Errors are reported even if no event is asked for.
    pipe = select.poll()
    pipe.register(sys.stdout, 0)
    if not pipe.poll(0):
        return False
    # Python flushes again when it ends, and would print an error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def expand_home(argument: str) -> str:
    """Replaces ~/ by the home folder, as shells do only at the start of a word (--config.data.train=~/shards)."""
    return re.sub(r"(?:(?<=[=,:])|^)~(?=/)", lambda _: os.path.expanduser("~"), argument)


def outcome(error: BaseException) -> tuple[int, str] | None:
    """Returns the exit code and message for an exception; None for a bug, whose traceback is shown."""
    match error:
        case UserError():
            return EXIT_USER_ERROR, f"error: {error}"
        case Stopped(cause=cause):
            program = "bert-jax" if Path(sys.argv[0]).name == "bert-jax" else "python -m bert_jax"
            code = EXIT_STOPPED if cause == "SIGTERM" else EXIT_INTERRUPTED
            return code, f"{error}: {program} {shlex.join(sys.argv[1:])}"
        case RunAgain():
            return EXIT_LOST, f"error: {error}"
        case KeyboardInterrupt():
            return EXIT_INTERRUPTED, "interrupted"
        case OSError() if explained := explain_os_error(error):
            return EXIT_USER_ERROR, f"error: {explained}"
        case RuntimeError() if explained := explain_device_memory(error):
            return EXIT_USER_ERROR, f"error: {explained}"
    return None


def explain_device_memory(error: RuntimeError) -> str | None:
    """Explains jax's error for a device with too little memory in one line; returns None for any other error."""
    _, _, message = str(error).partition("RESOURCE_EXHAUSTED: ")
    if type(error).__name__ != "JaxRuntimeError" or "out of memory" not in message.lower():
        return None
    return (
        f"the device has too little memory: {message.splitlines()[0].strip(' :.')}. Use smaller batches; in training "
        "also more --config.microbatches or --config.model.remat=layer. If another program uses the device, end that "
        "one"
    )


def explain_os_error(error: OSError) -> str | None:
    """Explains an operating-system error that the user can fix in one line; returns None for any other."""
    path = error.filename or "the output folder"
    advice = {
        errno.ENOENT: f"no such file or folder: {path}. Check the path",
        errno.EACCES: f"no permission for {path}. Check its owner and mode",
        errno.EROFS: f"{path} is on a read-only file system. Choose another output folder",
        errno.ENOSPC: f"no space left for {path}. Free some space and run the same command again",
        errno.EDQUOT: f"no quota left for {path}. Free some space and run the same command again",
        errno.EFBIG: f"{path} exceeds the file-size limit. Raise it (ulimit -f) and run the same command again",
        errno.ENOTDIR: f"{path} is not a folder. Choose another path",
        errno.EISDIR: f"{path} is a folder, not a file. Give a file",
        errno.ENAMETOOLONG: f"the name {path} is too long. Choose a shorter one",
        errno.ELOOP: f"{path} is a symbolic link that points to itself. Correct the link, or choose another path",
        errno.EIO: f"the disk failed to read or write {path}. Check the disk, or choose another one",
        errno.EMFILE: f"cannot open {path}: too many open files. Raise the limit (ulimit -n) and run it again",
    }
    return advice.get(error.errno or 0)
