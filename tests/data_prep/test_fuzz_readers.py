"""Mutated input gives neither a stack trace nor a silent loss; tests/tools/fuzz_readers.py lists the checks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FUZZER = Path(__file__).parent.parent / "tools" / "fuzz_readers.py"


@pytest.mark.parametrize("inputs, builds", [(480, 4), pytest.param(3000, 20, marks=pytest.mark.slow)])
def test_mutated_input_is_used_or_refused_in_one_line(vocab_dir: Path, inputs: int, builds: int) -> None:
    """In a process of its own, so that a crash of a library is seen too."""
    arguments = [f"--inputs={inputs}", f"--builds={builds}", f"--tokenizer={vocab_dir}"]
    run = subprocess.run(
        [sys.executable, "-W", "error", FUZZER, *arguments], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    counts = json.loads(run.stdout)
    assert {"damaged_file", "invalid_utf8", "not_json", "no_text_field", "duplicate"} < set(counts)
    assert counts["used"] > inputs / 2, "too little is left to be used for this to mean much"
