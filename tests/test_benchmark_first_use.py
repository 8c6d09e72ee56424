"""The parts of benchmarks/first_use.py that need no new environment: what it runs is what the documents teach."""

import shlex
import zipfile
from pathlib import Path

from benchmarks import first_use
from website.code_blocks import code_blocks

ROOT = Path(__file__).parent.parent


def test_every_line_that_it_runs_is_taught_by_a_document():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [taught] = [block.code for block in code_blocks(readme) if block.language == "python"]
    lines = {line.partition("  #")[0] for line in taught.splitlines()}
    assert {*first_use.EMBED.splitlines(), *first_use.FILL_MASK.splitlines()} <= lines
    assert "pip install .\n" + first_use.QUICKSTART in readme
    blocks = first_use.taught_blocks(ROOT / "docs" / "own_csv.md")
    assert "train.csv" in blocks[first_use.CSV] and "import csv" in blocks[first_use.CSV]
    words = shlex.split(blocks[first_use.FINETUNE])
    assert words[:2] == ["bert-jax", "finetune"] and "--config.init_from=encoder" in words
    assert words[words.index("--workdir") + 1] + "/result.json" == first_use.RESULT


def test_a_new_user_has_an_empty_home_and_no_paths_or_caches_of_this_one(tmp_path):
    given = {"PYTHONPATH": "x", "JAX_COMPILATION_CACHE_DIR": "y", "LANG": "C.UTF-8", "PIP_INDEX_URL": "z"}
    found = first_use.environment(tmp_path, given)
    assert found["PATH"].split(":")[0] == str(tmp_path / "venv" / "bin") and found["HOME"] == str(tmp_path / "home")
    assert {name: value for name, value in found.items() if name not in ("PATH", "HOME")} == {
        "LANG": "C.UTF-8",
        "PIP_INDEX_URL": "z",
        "PIP_NO_CACHE_DIR": "1",
    }


def test_the_contents_of_a_wheel_are_counted(tmp_path):
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/__init__.py", "1234")
        archive.writestr("a/b.py", "")
        archive.writestr("a-1.dist-info/METADATA", "12")
    assert first_use.wheel_contents(wheel) == {
        "top_level": ["a", "a-1.dist-info"],
        "files": 3,
        "bytes": wheel.stat().st_size,
        "unpacked_bytes": 6,
    }
