"""Every path and every command that the README and the docs name exists as written, and marked blocks run.

`<!-- run -->` directly above a code block lets a slow test run it (website/code_blocks.py).
"""

import re
import subprocess
from pathlib import Path

import pytest
from command_lines import check, commands
from random_checkpoints import odd_config, random_checkpoint

from bert_jax.interop.export import export_loaded
from website.code_blocks import code_blocks
from website.run_blocks import run_blocks

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
PAGES = [*DOCUMENTS, *sorted((ROOT / "benchmarks" / "results").glob("*.md"))]
BENCHMARK = re.compile(r"python -m (benchmarks\.\w+)")
COMMAND_NAME = re.compile(r"\bbert-jax ([a-z][\w-]*)")
MODULE = re.compile(r"`((?:\w+/)+\w+\.py)`")
PATH = re.compile(r"(?<![\w/.-])((?:configs|data_prep|bert_jax|benchmarks|deploy|docs|tests)/[\w./-]*\w)")


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
    check(line, monkeypatch, tmp_path)


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
