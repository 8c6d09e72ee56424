"""What benchmarks.data_prep measures on, and that a run of it prints what it claims."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.corpus import write_mixture, write_sentences
from benchmarks.data_prep import exponent, order
from data_prep.cleaning import unit
from data_prep.readers import corpus as readers
from data_prep.sentences import document_sentences

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files of documents that tell where they are from, one three times as large as the other."""
    paths = []
    for name, documents in (("a", 30), ("b", 90)):
        path = tmp_path / f"{name}.txt"
        path.write_text("\n\n".join(f"{name}{name} {number:04d} {'x' * 89}" for number in range(documents)) + "\n")
        paths.append(path)
    return paths


@pytest.mark.parametrize("documents", [4, 40, 300])
def test_mixture_is_alike_at_any_size(files: list[Path], tmp_path: Path, documents: int) -> None:
    """Also beyond the end of the files, which are then read again."""
    size = write_mixture(files, documents * 99e-6, tmp_path / "mixed")
    found = list(readers.documents(tmp_path / "mixed"))
    assert size == (tmp_path / "mixed").stat().st_size and documents - 2 <= len(found) <= documents
    sources = Counter(document[0] for document in found)
    assert abs(sources["b"] - 3 * sources["a"]) <= 3
    assert len(set(found)) == len(found)


def test_text_that_is_read_again_has_new_words_and_no_near_duplicates(tmp_path: Path, sample_text: Path) -> None:
    once = list(readers.documents(sample_text))
    write_mixture([sample_text], 3 * sample_text.stat().st_size / 1e6, tmp_path / "mixed")
    found = list(readers.documents(tmp_path / "mixed"))
    assert found[: len(once)] == once
    texts = [" ".join(found[start : start + len(once)]) for start in (0, len(once))]
    assert len(texts[0].split()) == len(texts[1].split()) and texts[0].count("\n") == texts[1].count("\n")
    left, right = map(unit.shingles, texts)
    assert len(np.intersect1d(left, right)) < 0.4 * len(left)
    assert len({*texts[1].split()} - {*texts[0].split()}) > 0.05 * len(texts[1].split())


def test_sentences_are_those_of_the_splitter(tmp_path: Path, sample_text: Path) -> None:
    count = write_sentences(sample_text, tmp_path / "cut")
    documents = list(readers.documents(tmp_path / "cut"))
    assert [text.split("\n") for text in documents] == [
        document_sentences(document) for document in readers.documents(sample_text)
    ]
    assert count == sum(text.count("\n") + 1 for text in documents)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_exponent_of_a_power_law_is_found(power: float) -> None:
    sizes = [50, 200, 300]
    np.testing.assert_allclose(exponent(sizes, 3.0 * np.array(sizes) ** power), power)


def test_short_texts_run_more_often_and_all_over_a_turn() -> None:
    assert order([50, 200, 300]) == [0, 0, 1, 2, 0]
    assert order([10, 10]) == [0, 1]
    assert order([1, 8]) == [0, 0, 1, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--megabytes=0.2", "--repeats=1"], ["data_prep_nsp_encoder"]),
        (
            ["--scaling", "--sizes", "0.1", "0.3", "--repeats=1"],
            [f"data_prep_{claim}" for claim in ("memory", "disk", "exponent", "workers")],
        ),
    ],
    ids=["peers", "scaling"],
)
def test_command_prints_a_line_for_each_claim(
    sample_text: Path, vocab_dir: Path, flags: list[str], names: list[str]
) -> None:
    command = [sys.executable, "-m", "benchmarks.data_prep", f"--text={sample_text}"]
    command += [f"--vocabulary={vocab_dir / 'vocab.txt'}", "--workers=1", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    assert [line["name"] for line in lines] == names
    assert all(np.isfinite(line["value"]) and line["settings"]["machine"] for line in lines)
