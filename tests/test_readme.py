"""Every path and every command that the README and the docs name exists as written, and marked blocks run.

`<!-- run -->` directly above a code block lets a slow test run it (website/code_blocks.py).
"""

import argparse
import importlib
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from random_checkpoints import odd_config, random_checkpoint

from bert_jax import config
from bert_jax.commands.main import MODULES
from bert_jax.config import FinetuneConfig, PretrainConfig
from bert_jax.errors import UserError
from bert_jax.interop.export import export_loaded
from data_prep import build
from data_prep.build_options import BuildOptions
from website.code_blocks import COMMAND, code_blocks
from website.run_blocks import run_blocks

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
PAGES = [*DOCUMENTS, *sorted((ROOT / "benchmarks" / "results").glob("*.md"))]
BENCHMARK = re.compile(r"python -m (benchmarks\.\w+)")
COMMAND_NAME = re.compile(r"\bbert-jax ([a-z][\w-]*)")
MODULE = re.compile(r"`((?:\w+/)+\w+\.py)`")
PATH = re.compile(r"(?<![\w/.-])((?:configs|data_prep|bert_jax|benchmarks|docs|tests)/[\w./-]*\w)")


def commands(text: str) -> list[str]:
    """Command lines in code blocks, continuations joined, and those within a sentence that have flags."""
    text = text.replace("\\\n", " ")
    found = [line.strip() for line in text.splitlines() if COMMAND.match(line)]
    found += [line for line in re.findall(r"`((?:python -m|bert-jax) [^`]+)`", text) if " --" in line]
    return [line for line in found if not re.search(r" --(help|version)\b| \.\.\.", line)]


@pytest.mark.parametrize("document", [*DOCUMENTS, *DECISIONS], ids=lambda path: path.name)
def test_every_path_named_exists(document):
    """Also a module by its place in its package, such as `train/loop.py`."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {str(parent) for path in tracked for parent in Path(path).parents}
    text = document.read_text(encoding="utf-8")
    for path in PATH.findall(text):
        assert path in tracked or path.rstrip("/") in folders, f"{document.name} names {path}, which is not there"
    for path in MODULE.findall(text):
        assert any(f"/{one}".endswith(f"/{path}") for one in tracked), (
            f"{document.name} names {path}, which is not there"
        )


@pytest.mark.parametrize("document", [*DOCUMENTS, *DECISIONS], ids=lambda path: path.name)
def test_every_named_benchmark_exists(document):
    for module in BENCHMARK.findall(document.read_text(encoding="utf-8")):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), f"{document.name} runs {module}"


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


LINES = [
    pytest.param(line, id=f"{document.name}-{line[:60]}")
    for document in PAGES
    for line in commands(document.read_text(encoding="utf-8"))
    if BENCHMARK.search(line) or COMMAND_NAME.search(line)
]


@pytest.mark.parametrize("line", LINES)
def test_every_command_line_is_taken_by_its_own_parser(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Flags, values and configuration keys; the files that it names need not be there."""
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


def test_lines_are_found() -> None:
    names = {name for line in LINES for name in COMMAND_NAME.findall(line.values[0])}
    assert {"train-tokenizer", "build-examples", "inspect-shards", "pretrain"} <= names
    assert len(LINES) > 15


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_every_block_with_a_command_has_a_mark(document: Path) -> None:
    for block in code_blocks(document.read_text(encoding="utf-8")):
        place = f"{document.name}, line {block.start + 1}"
        marks = "<!-- run -->, <!-- checked --> or <!-- not run: REASON -->"
        assert block.mark or not block.has_command, f"{place}: write {marks} above the block, whichever is true"


def test_parts_that_a_scheduler_numbers_have_outputs_of_their_own() -> None:
    """The tasks of an array run at the same time, and only one job may write an output."""
    texts = [document.read_text(encoding="utf-8") for document in DOCUMENTS]
    numbered = [line for text in texts for line in commands(text) if re.search(r"--part \"?\$\w+", line)]
    assert numbered
    for line in numbered:
        [variable] = re.findall(r"--part \"?(\$\w+)", line)
        assert re.search(rf"--output \"?[^ ]*{re.escape(variable)}\b", line), line


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_srun_gives_each_task_the_cpus_of_its_batch_script(document: Path) -> None:
    """Since Slurm 22.05, srun does not take --cpus-per-task from sbatch."""
    for block in code_blocks(document.read_text(encoding="utf-8")):
        if "#SBATCH --cpus-per-task" in block.code and (step := re.search(r"^ *srun ", block.code, re.MULTILINE)):
            before = block.code[: step.start()]
            assert "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK" in before, f"{document.name}, {block.start + 1}"


MARKED = [
    pytest.param(document, id=document.name)
    for document in DOCUMENTS
    if any(block.mark == "run" for block in code_blocks(document.read_text(encoding="utf-8")))
]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device_processes")
@pytest.mark.parametrize("document", MARKED)
def test_the_marked_blocks_of_a_document_run_one_after_the_other(document: Path, tmp_path: Path) -> None:
    """In one folder, which has the `encoder` that documents begin with, and the quickstart's export; here both are one
    that is tiny and random."""
    loaded = random_checkpoint(tmp_path / "words", odd_config(layers=2, max_positions=128))
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("encoder", "runs/quickstart/exported"):
        export_loaded(loaded, folder / name)
    run_blocks(document, folder)
