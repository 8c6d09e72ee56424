"""The summary of build_examples: the share of [UNK] is that of the shards, and a large share gives a warning."""

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizer_kinds import byte_pairs

from bert_jax.commands import build_examples
from bert_jax.data.manifest import PAIRS, Part, read_manifest
from bert_jax.data.shards import Dataset, open_dataset
from bert_jax.tokenization import tokenizer
from data_prep import build, summary
from data_prep.build_options import BuildOptions
from data_prep.inspection import measure
from data_prep.sentences import document_sentences

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def vocabulary(path: Path, words: str) -> Path:
    path.write_text("\n".join([*SPECIAL, *words.split()]) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("objective", ["nsp", "sop", "full_sentences", "doc_sentences", "single"])
def test_share_of_unknown_tokens_is_that_of_the_rows(sample_text: Path, tmp_path: Path, objective: str) -> None:
    """A vocabulary of a few words; two pairings."""
    words = vocabulary(tmp_path / "vocab.txt", "the of and to a in . ,")
    output = tmp_path / "out"
    manifest = build.build(
        BuildOptions(
            str(sample_text), words, output, 64, objective=objective, dupe_factor=2, eval_fraction=0.25, workers=1
        )
    )
    loaded = tokenizer.load(output / "tokenizer")
    found = measure(output, "train", manifest, loaded, lambda rows: None)
    share = summary.unknown_share(output, manifest, loaded)
    assert 0.5 < share < 1
    assert share == pytest.approx(found.unknown_share, abs=0.001 if objective == "full_sentences" else 0)


def test_text_of_another_vocabulary_gives_a_warning(
    sample_text: Path, vocab_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(name: str, words: Path) -> str:
        flags = {"input": sample_text, "tokenizer": words, "output": tmp_path / name, "seq_len": 64, "workers": 1}
        build_examples.main([f"--{flag}={value}" for flag, value in flags.items()])
        return capsys.readouterr().err

    assert "[UNK]" not in told("fits", vocab_dir)
    warned = told("none", vocabulary(tmp_path / "vocab.txt", ""))
    assert "warning: 100% of the text is [UNK]: does --tokenizer fit the language and the case of this text?" in warned


def test_pairs_of_a_vocabulary_with_two_separators_give_a_warning(vocab_dir: Path, tmp_path: Path) -> None:
    two = tokenizer.load(byte_pairs(tmp_path / "words", []))
    for objective in ("nsp", "sop"):
        warned = summary.pair_line(objective, two)
        assert warned.startswith(
            "warning: rows are <s> A </s> B </s>, but models of this vocabulary read pairs of texts "
        )
        assert summary.pair_line(objective, tokenizer.load(vocab_dir)) == ""
    assert summary.pair_line("single", two) == ""


@pytest.mark.parametrize(
    ("path", "chosen", "advice"),
    [
        ("a.txt", {}, "use --document file, or remove blank lines within documents"),
        ("a.jsonl.gz", {}, "join those of a document into one record"),
        ("tfds:name", {}, "join those of a document into one record"),
        ("a.txt", {"input_format": "csv"}, "join those of a document into one record"),
    ],
)
def test_advice_about_short_documents_fits_the_format(path: str, chosen: dict[str, str], advice: str) -> None:
    counts = {"used": 10, "one_sentence": 9, "sequences": 10}
    manifest = {"counts": counts, "reading": chosen, "sources": [{"path": path}]}
    warned = summary.document_line(manifest)
    assert warned.startswith("warning: 90% of the documents have one sentence. If ") and warned.endswith(advice)


@pytest.mark.parametrize("objective", ["sop", "full_sentences", "doc_sentences", "single"])
@pytest.mark.parametrize("options", [{}, {"masking": "static"}, {"delete_rate": 0.1}], ids=str)
def test_rows_that_are_written_twice_give_a_warning(
    sample_text: Path, vocab_dir: Path, tmp_path: Path, objective: str, options: dict
) -> None:
    arguments = {"objective": objective, "dupe_factor": 2, "workers": 1} | options
    manifest = build.build(BuildOptions(str(sample_text), vocab_dir, tmp_path / "out", 64, **arguments))
    dataset = open_dataset(tmp_path / "out", "train")
    distinct = {row.tobytes() for row in dataset.gather(np.arange(dataset.rows)).input_ids}
    assert bool(summary.copy_line(manifest)) == (2 * len(distinct) <= dataset.rows)


def test_tokens_left_out_and_random_pairs_give_a_warning() -> None:
    def told(left_out: int, random: int) -> tuple[str, str]:
        counts = {"source_tokens": 1000, "left_out": left_out, "used": 9, "one_sentence": 0, "sequences": 100}
        manifest = {"counts": counts | {"random_pairs": random}, "dupe_factor": 2}
        return summary.token_line(manifest), summary.document_line(manifest)

    few, half = told(100, 60)
    assert few == "2,000 tokens read, 1,900 kept, 100 left out (5.0%)"
    assert half.endswith("60% of the pairs have a random segment (50% are intended)")
    many, most = told(101, 61)
    assert many.startswith(
        "warning: 2,000 tokens read, 1,899 kept, 101 left out (5.1%): pairs are cut to --seq_len. Use"
    )
    assert most.startswith("warning: 0% of the documents have one sentence; 61% of the pairs have a random segment")


@pytest.mark.parametrize("objective", ["nsp", "sop", "full_sentences", "doc_sentences", "single"])
@pytest.mark.parametrize("pack", [1, 3])
def test_tokens_left_out_are_those_of_no_row(sample_text: Path, tmp_path: Path, objective: str, pack: int) -> None:
    """Every word of the text occurs once, so the rows themselves tell which are missing."""
    words = [f"w{number}" for number in range(1500)]
    ends = np.cumsum([1 + 7 * number % 41 for number in range(60)]).tolist()
    lines = [" ".join(words[begin:end]) for begin, end in pairwise([0, *ends])]
    text = "\n\n".join("\n".join(lines[first : first + 5]) for first in range(0, len(lines), 5))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    tokenizer_file = vocabulary(tmp_path / "vocab.txt", " ".join(words))
    options = BuildOptions(tmp_path / "text.txt", tokenizer_file, tmp_path / "out", 32, objective=objective, workers=1)
    manifest = build.build(dataclasses.replace(options, pack=pack, eval_fraction=0.0))
    dataset = open_dataset(tmp_path / "out", "train")
    present = set(dataset.gather(np.arange(dataset.rows)).input_ids.reshape(-1).tolist()) - {0, 1, 2, 3, 4}
    assert manifest["counts"]["source_tokens"] == len(text.split())
    left_out = len(text.split()) - len(present)
    assert manifest["counts"]["left_out"] == left_out
    assert bool(left_out) == (objective in PAIRS)


def test_words_longer_than_the_mask_budget_give_a_warning() -> None:
    assert summary.word_line({"documents": 3}) == ""  # single tokens are masked
    few, many = (summary.word_line({"words": 1000, "long_words": long}) for long in (10, 11))
    assert few == "1.00% of the words are longer than the mask budget of their sequence"
    assert many.startswith("warning: 1.10% of the words are longer than the mask budget of their sequence, so their")


def all_labels(output: Path, part: Part) -> list[int]:
    dataset = Dataset(output, part, read_manifest(output))
    return [int(label) for shard in range(len(dataset.shards)) for label in dataset.shard_rows(shard)[3].reshape(-1)]


@pytest.mark.parametrize("objective", ["nsp", "doc_sentences"])
def test_blank_lines_after_every_paragraph_give_a_warning(
    sample_text: Path, vocab_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], objective: str
) -> None:
    """The shares are those of the rows, and of the sentences that `document_sentences` finds."""
    lines = [line for line in sample_text.read_text(encoding="utf-8").split("\n") if line.strip()]
    groups = [lines[start : start + 20] for start in range(0, len(lines), 20)]
    texts = {"documents": "\n\n".join("\n".join(group) for group in groups), "paragraphs": "\n\n".join(lines)}
    for name, text in texts.items():
        path = tmp_path / f"{name}.txt"
        path.write_text(text, encoding="utf-8")
        options = BuildOptions(path, vocab_dir, tmp_path / name, 128, objective=objective, workers=1)
        manifest = build.build(options, quiet=False)
        counts = manifest["counts"]
        documents = text.split("\n\n")
        assert counts["one_sentence"] == sum(len(document_sentences(document)) == 1 for document in documents)
        told = capsys.readouterr().err
        shares = f"{counts['one_sentence'] / len(documents):.0%} of the documents have one sentence"
        if objective == "nsp":
            rows = [row for part in ("train", "eval") for row in all_labels(tmp_path / name, part)]
            assert counts["random_pairs"] == rows.count(1)
            random = counts["random_pairs"] / counts["sequences"]
            shares += f"; {random:.0%} of the pairs have a random segment (50% are intended)"
        assert (f"warning: {shares}. If blank lines separate the paragraphs" in told) == (name == "paragraphs")
        assert (shares in told) == (not shares.startswith("0%") or objective == "nsp")
