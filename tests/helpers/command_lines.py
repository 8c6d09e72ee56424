"""Command lines of bert_jax in documents and in deploy/, and their check by the parsers of the commands themselves."""

import argparse
import importlib
import inspect
import re
import shlex
import sys
from pathlib import Path

import pytest

from bert_jax import config
from bert_jax.commands.main import MODULES
from bert_jax.config import FinetuneConfig, PretrainConfig
from bert_jax.errors import UserError
from data_prep import build
from data_prep.build_options import BuildOptions
from website.code_blocks import COMMAND


def commands(text: str) -> list[str]:
    """Command lines in code blocks, continuations joined, and those within a sentence that have flags."""
    text = text.replace("\\\n", " ")
    found = [line.strip() for line in text.splitlines() if COMMAND.match(line)]
    found += [line for line in re.findall(r"`((?:python -m|bert-jax) [^`]+)`", text) if " --" in line]
    return [line for line in found if not re.search(r" --(help|version)\b| \.\.\.", line)]


class Parsed(Exception):
    """What a command's own parser made of a line, before anything is done."""

    def __init__(self, namespace: argparse.Namespace, rest: list[str]) -> None:
        self.namespace, self.rest = namespace, rest


def parsed(line: str, monkeypatch: pytest.MonkeyPatch) -> Parsed:
    """Runs a command line up to the end of parsing. Raises UserError for an unknown command, flag or value."""
    whole = argparse.ArgumentParser.parse_known_args

    def stop(self: argparse.ArgumentParser, arguments: list[str] | None = None, namespace: object = None) -> None:
        raise Parsed(*whole(self, arguments, namespace))

    line = re.sub(r"\$SLURM_\w+", "0", line).replace("$task", "rte")  # what the scheduler and the script set
    words = shlex.split(re.split(r" [>|&]", line)[0], comments=True)
    with monkeypatch.context() as patched, pytest.raises(Parsed) as found:
        patched.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        if "bert-jax" in words:
            _, name, *flags = words[words.index("bert-jax") :]
            if name not in MODULES:
                raise UserError(f"bert-jax has no command {name}")
            importlib.import_module(MODULES[name]).main(flags)
        else:
            _, module, *flags = words[words.index("-m") :]
            patched.setattr(sys, "argv", [module, *flags])
            main = importlib.import_module(module).main
            main(flags) if inspect.signature(main).parameters else main()
    return found.value


def check(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Checks the flags, values and configuration keys of a command line; the files that it names need not be there."""
    found = parsed(line, monkeypatch)
    if "config" in vars(found.namespace):
        kind = PretrainConfig if "pretrain" in line or "plan" in line else FinetuneConfig
        config.from_flags(kind, found.namespace.config, found.rest)
    else:
        assert not found.rest, f"{line} gives {found.rest}, which its parser does not know"
    if "bert-jax build-examples" in line:
        # Its choices are checked by the function; then comes the input, which is not there.
        given = vars(found.namespace) | {"output": str(tmp_path / "out"), "input": str(tmp_path / "none")}
        given["weights"] = ()
        with pytest.raises(UserError, match="matches no file"):
            build.build(BuildOptions(**given))
