"""Every path and every command that the README and the docs name exists as written."""

import importlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULE = re.compile(r"python -m ((?:bert_jax|data_prep|benchmarks)\.\w+)")
PATH = re.compile(r"(?<![\w/.-])((?:configs|data_prep|bert_jax|benchmarks|docs|tests)/[\w./-]*\w)")
FLAG = re.compile(r"(?<!\S)--([a-z_]+)(?=[=\s\]]|$)")


def commands(text: str) -> list[str]:
    """Lines of code blocks that run one of our modules, continuations joined, comments dropped."""
    text = text.replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if re.match(r"\s*(\$ )?(\.venv/bin/)?python -m ", line)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_named_exists(document):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {str(parent) for path in tracked for parent in Path(path).parents}
    for path in PATH.findall(document.read_text(encoding="utf-8")):
        assert path in tracked or path.rstrip("/") in folders, f"{document.name} names {path}, which is not there"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_module_named_is_there(document):
    for module in MODULE.findall(document.read_text(encoding="utf-8")):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), f"{document.name} runs {module}"


def test_every_flag_of_a_command_named_is_known(capsys):
    flags: dict[str, set[str]] = {}
    for document in DOCUMENTS:
        for line in commands(document.read_text(encoding="utf-8")):
            module = MODULE.search(line)
            if module:
                flags.setdefault(module[1], set()).update(FLAG.findall(line))
    assert flags
    for module, used in flags.items():
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(module).main(["--help"])
        assert ended.value.code == 0
        known = set(FLAG.findall(capsys.readouterr().out.replace(",", " ").replace("[", " ")))
        assert used <= known | {"config"}, f"{module} does not know {used - known}"
