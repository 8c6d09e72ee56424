"""A job of data preparation starts with what it needs alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SMALL_JOB = """
import sys
from data_prep.build import build
from data_prep.build_options import BuildOptions
text, vocabulary, output = sys.argv[1:]
build(BuildOptions(text, vocabulary, output, 64, workers=1))
rare = {
    "bert_jax.tokenization.byte_bpe", "array_record", "psutil",
    "pyarrow.compute", "pyarrow.parquet", "rich", "sentencepiece", "tensorflow_datasets",
}
assert not rare & set(sys.modules), rare & set(sys.modules)
"""
TELLS_THREADS = """
import atexit, os
atexit.register(lambda: print("threads", os.environ.get("OPENBLAS_NUM_THREADS")))
"""


def test_one_module_draws_progress() -> None:
    """Every long job tells of itself through bert_jax.progress."""
    for path in (ROOT / "data_prep").rglob("*.py"):
        assert "rich.progress" not in path.read_text(encoding="utf-8"), path


def test_a_small_job_imports_nothing_that_only_others_need(sample_text: Path, vocab_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SMALL_JOB, sample_text, vocab_dir, tmp_path / "out"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize(
    ("run", "set_before", "threads"),
    [
        (["-m", "bert_jax", "build-examples", "--help"], {}, "1"),
        (["-m", "bert_jax", "build-examples", "--help"], {"OPENBLAS_NUM_THREADS": "3"}, "3"),
        (["-c", "import data_prep.build"], {}, "None"),
    ],
    ids=["command", "as the user says", "import"],
)
def test_commands_start_no_threads_for_products(
    tmp_path: Path, run: list[str], set_before: dict[str, str], threads: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(TELLS_THREADS)
    before = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    environment = before | set_before | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    told = subprocess.run(
        [sys.executable, *run], cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=120
    )
    assert told.stdout.splitlines()[-1] == f"threads {threads}"
