"""Every path and every command that the README and the docs name exists as written."""

import argparse
import importlib
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bert_jax import config
from bert_jax.command import UserError
from data_prep import build_examples
from data_prep.build_options import BuildOptions

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULE = re.compile(r"python -m ((?:bert_jax|data_prep|benchmarks)\.\w+)")
PATH = re.compile(r"(?<![\w/.-])((?:configs|data_prep|bert_jax|benchmarks|docs|tests)/[\w./-]*\w)")


def commands(text: str) -> list[str]:
    """Command lines in code blocks, continuations joined, and those within a sentence that have flags."""
    text = text.replace("\\\n", " ")
    blocks = [line.strip() for line in text.splitlines() if re.match(r"\s*(\$ )?(\.venv/bin/)?python -m ", line)]
    return blocks + [line for line in re.findall(r"`(python -m [^`]+)`", text) if " --" in line]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_named_exists(document):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {str(parent) for path in tracked for parent in Path(path).parents}
    for path in PATH.findall(document.read_text(encoding="utf-8")):
        assert path in tracked or path.rstrip("/") in folders, f"{document.name} names {path}, which is not there"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_named_module_exists(document):
    for module in MODULE.findall(document.read_text(encoding="utf-8")):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), f"{document.name} runs {module}"


class Parsed(Exception):
    """What a command's own parser made of a line, before anything is done."""

    def __init__(self, namespace: argparse.Namespace, rest: list[str]) -> None:
        self.namespace, self.rest = namespace, rest


def parsed(line: str, monkeypatch: pytest.MonkeyPatch) -> Parsed:
    """Runs the main of a line's module up to the end of parsing. Raises UserError for what it does not take."""
    whole = argparse.ArgumentParser.parse_known_args

    def stop(self: argparse.ArgumentParser, arguments: list[str] | None = None, namespace: object = None) -> None:
        raise Parsed(*whole(self, arguments, namespace))

    words = shlex.split(line, comments=True)
    start = words.index("-m") + 1
    module = importlib.import_module(words[start])
    with monkeypatch.context() as patched, pytest.raises(Parsed) as found:
        patched.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        patched.setattr(sys, "argv", words[start:])
        takes_arguments = inspect.signature(module.main).parameters
        module.main(words[start + 1 :]) if takes_arguments else module.main()
    return found.value


LINES = [
    pytest.param(line, id=f"{document.name}-{line[:60]}")
    for document in [*DOCUMENTS, *sorted((ROOT / "benchmarks" / "results").glob("*.md"))]
    for line in commands(document.read_text(encoding="utf-8"))
    if MODULE.search(line)
]


@pytest.mark.parametrize("line", LINES)
def test_every_command_line_is_taken_by_its_own_parser(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Flags, values and configuration keys; the files that it names need not be there."""
    found = parsed(line, monkeypatch)
    if "config" in vars(found.namespace):
        config.read_flags(found.namespace.config, found.rest)
    else:
        assert not found.rest, f"{line} gives {found.rest}, which its parser does not know"
    if "data_prep.build_examples" in line:
        # Its choices are checked by the function; then comes the input, which is not there.
        given = vars(found.namespace) | {"output": str(tmp_path / "out"), "input": str(tmp_path / "none")}
        given["weights"] = ()
        with pytest.raises(UserError, match="matches no file"):
            build_examples.build(BuildOptions(**given))


def test_lines_are_found() -> None:
    modules = {MODULE.search(line.values[0])[1] for line in LINES}  # type: ignore[index]
    assert {"data_prep.train_tokenizer", "data_prep.build_examples", "data_prep.inspect_shards"} <= modules
    assert len(LINES) > 15
