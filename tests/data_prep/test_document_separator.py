"""--document_separator: a line separates the documents of text, in every command that reads text."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.commands import clean, inspect_shards, train_tokenizer
from bert_jax.commands.clean import CleanOptions
from bert_jax.errors import UserError
from bert_jax.tokenization import tokenizer
from data_prep import build_options
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.readers import corpus as readers
from data_prep.readers.corpus import Corpus, Reading, find_sources, read


def by_line(content: str, separator: str) -> list[str]:
    """The documents of a text as defined, computed line by line."""
    found: list[list[str]] = [[]]
    for line in content.removeprefix("\ufeff").split("\n"):
        line = line.removesuffix("\r")
        if line.strip(" \t\r") == separator:
            found.append([])
        else:
            found[-1].append(line)
    texts = ("\n".join(lines).strip("\n") for lines in found)
    return [text for text in texts if text and not text.isspace()]


@given(st.lists(st.sampled_from(["--", " --\t", "---", "-- a", "", " ", "one", "zwei \u3000", "x--"]), max_size=12))
def test_documents_end_where_a_line_is_the_separator(tmp_path_factory, lines):
    path = tmp_path_factory.getbasetemp() / "separated.txt"
    for line_end in ("\n", "\r\n"):
        content = line_end.join(lines)
        path.write_bytes(content.encode())
        found = list(read(str(path), Reading(document_separator="--")))
        assert found == [text.encode() for text in by_line(content, "--")]


@pytest.fixture
def texts(sample_text: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The same documents as JSON lines and as text, with a blank line after each of their paragraphs."""
    lines = [line for document in readers.documents(sample_text) for line in document.splitlines()]
    documents = ["\n\n".join(lines[start : start + 20]) for start in range(0, len(lines), 20)]
    records, separated = tmp_path / "records.jsonl", tmp_path / "separated.txt"
    records.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    separated.write_text("<|endoftext|>\n" + "\n<|endoftext|>\n".join(documents) + "\n", encoding="utf-8")
    return records, separated


def test_every_command_reads_the_documents_of_the_records(texts, vocab_dir, tmp_path):
    """The words, the rows and the cleaned documents are those of JSON lines with the same documents."""
    for path, separator in zip(texts, ("", "<|endoftext|>"), strict=True):
        flags = [f"--input={path}", *(["--document_separator", separator] if separator else [])]
        train_tokenizer.main([*flags, f"--output={tmp_path / path.stem / 'vocab'}", "--vocab_size=600"])
        clean.clean(
            CleanOptions(path, tmp_path / path.stem / "clean", rules="gopher", workers=1, document_separator=separator)
        )
        options = BuildOptions(
            path, vocab_dir, tmp_path / path.stem / "rows", 64, workers=1, document_separator=separator
        )
        build(options)
    records, separated = (tmp_path / path.stem for path in texts)
    assert tokenizer.load(records / "vocab").content_hash == tokenizer.load(separated / "vocab").content_hash
    assert "<|endoftext|>" not in (separated / "vocab" / "vocab.txt").read_text()
    cleaned = [
        [list(readers.documents(part)) for part in folder.glob("clean/part-*")] for folder in (records, separated)
    ]
    assert cleaned[0] == cleaned[1] != []
    manifests = [json.loads((folder / "rows" / "manifest.json").read_text()) for folder in (records, separated)]
    assert manifests[0]["shards"] == manifests[1]["shards"] and manifests[0]["counts"] == manifests[1]["counts"]
    assert manifests[1]["reading"] == manifests[0]["reading"] | {"document_separator": "<|endoftext|>"}
    inspect_shards.main([str(separated / "rows"), "--verify"])


def test_a_value_may_begin_with_dashes():
    required = ["--input=a", "--tokenizer=b", "--output=c", "--seq_len=64"]
    for flags in (["--document_separator", "---"], ["--document_separator=---"]):
        assert build_options.parse([*flags, *required]).document_separator == "---"
    run = subprocess.run(
        [sys.executable, "-m", "bert_jax", "clean", "--input=a", "--output=b", "--document_separator"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2 and "--document_separator: expected one argument" in run.stderr


FILE = {"document": "file", "document_separator": ""}


@pytest.mark.parametrize(
    ("name", "reading", "message"),
    [
        ("a.jsonl", {}, r"a\.jsonl: the records of jsonl are the documents, and --document_separator is for text"),
        ("a.jsonl", FILE, r"a\.jsonl: the records of jsonl are the documents, and --document file is for text. Leave"),
        ("a.tsv", FILE, "the records of tsv are the documents"),
        ("a.txt", FILE | {"input_format": "csv"}, "csv: its records are the documents, and --document file is for"),
        ("a.parquet", {"on_error": "skip"}, "the records of parquet are the documents"),
        ("a.xml-p1p2.bz2", {}, "the records of mediawiki are the documents"),
        ("a.txt", {"input_format": "warc"}, "--input_format warc: its records are the documents"),
        ("a.txt", {"document": "file"}, "--document file makes each file one document; give it or"),
        ("a.txt", {"document_separator": "  "}, "'  ': give one line that holds more than white space"),
        ("a.txt", {"document_separator": "a\nb"}, r"'a\\nb': give one line"),
    ],
)
def test_flags_that_separate_nothing_are_refused(tmp_path, name, reading, message):
    (tmp_path / name).write_text("text\n")
    with pytest.raises(UserError, match=message) as caught:
        Corpus(find_sources(str(tmp_path / name)), Reading(**{"document_separator": "---"} | reading))
    assert "\n" not in str(caught.value)


def test_a_separator_that_no_file_holds_gives_a_warning(sample_text, vocab_dir, tmp_path, capsys):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(sample_text.read_text())
    options = BuildOptions(
        f"{tmp_path}/*.txt", vocab_dir, tmp_path / "out", 64, objective="single", document_separator="--", workers=1
    )
    assert build(options, quiet=False)["counts"]["documents"] == 3
    assert "warning: --document_separator '--' separates nothing" in capsys.readouterr().err
