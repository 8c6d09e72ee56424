"""The summary of build_examples: the share of [UNK] is that of the shards, and a large share gives a warning."""

from pathlib import Path

import pytest

from bert_jax import tokenizer
from data_prep import build_examples, summary
from data_prep.build_options import BuildOptions
from data_prep.inspection.statistics import measure

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def vocabulary(path: Path, words: str) -> Path:
    path.write_text("\n".join([*SPECIAL, *words.split()]) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("objective", ["nsp", "sop", "full_sentences", "doc_sentences", "single"])
def test_share_of_unknown_tokens_is_that_of_the_rows(sample_text: Path, tmp_path: Path, objective: str) -> None:
    """A vocabulary of a few words; two pairings."""
    words = vocabulary(tmp_path / "vocab.txt", "the of and to a in . ,")
    output = tmp_path / "out"
    manifest = build_examples.build(
        BuildOptions(
            str(sample_text), words, output, 64, objective=objective, dupe_factor=2, eval_fraction=0.25, workers=1
        )
    )
    loaded = tokenizer.load(output / "tokenizer")
    found = measure(output, "train", manifest, loaded, lambda rows: None)
    share = summary.unknown_share(output, manifest, loaded)
    assert 0.5 < share < 1
    assert share == pytest.approx(found.unknown / found.text_tokens, abs=0.001 if objective == "full_sentences" else 0)


def test_text_of_another_vocabulary_gives_a_warning(
    sample_text: Path, vocab_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(name: str, words: Path) -> str:
        flags = {"input": sample_text, "tokenizer": words, "output": tmp_path / name, "seq_len": 64, "workers": 1}
        build_examples.main([f"--{flag}={value}" for flag, value in flags.items()])
        return capsys.readouterr().err

    assert "warning" not in told("fits", vocab_dir)
    warned = told("none", vocabulary(tmp_path / "vocab.txt", ""))
    assert "warning: 100% of the text is [UNK]: does --tokenizer fit the language and the case of this text?" in warned
