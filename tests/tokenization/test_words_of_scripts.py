"""Whole-word masking of Chinese, Japanese and Thai: every token can be predicted, at the rate of the rule."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import tokenizer_kinds
import unspaced_text

from bert_jax.data.example import Rows
from bert_jax.data.loader import count_words
from bert_jax.data.masking.masker import Masker
from bert_jax.data.shards import open_dataset
from bert_jax.tokenization import tokenizer
from bert_jax.tokenization.tokenizer import Tokenizer
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.readers import corpus as readers

EPOCHS = 100
KINDS = ("wordpiece_cased", "bpe", "unigram", "unigram_bytes", "sentencepiece_bpe")


def built(folder: Path, documents: list[str], words: Path, **options) -> Path:
    (folder / "text.txt").write_text("\n\n".join(documents), encoding="utf-8")
    flags = {"objective": "single", "mask_unit": "word", "eval_fraction": 0.0, "workers": 1} | options
    build(BuildOptions(folder / "text.txt", words, folder / "out", 64, **flags))
    return folder / "out"


def predicted(rows: Rows, masker: Masker) -> tuple[float, float]:
    """The share of ordinary tokens that some epoch predicts, and the share of positions predicted in an epoch."""
    ever = np.zeros(rows.input_ids.shape, bool)
    count = 0
    for epoch in range(EPOCHS):
        masked = masker.apply(rows, np.full(len(ever), epoch), 64)
        for row, positions, number in zip(ever, masked.positions, masked.counts, strict=True):
            row[positions[:number]] = True
        count += int(masked.counts.sum())
    lengths = rows.sequence_lengths.sum()
    return ever.sum() / (lengths - 2 * len(ever)), count / EPOCHS / lengths


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_of_unspaced_text_can_be_predicted(kind: str, tmp_path: Path) -> None:
    """In one of 100 epochs; the last tokens of a budget leave out the longest words.

    If spaces separate words, a large part of the text has only words that never fit.
    """
    documents = unspaced_text.documents(45)
    tokenizer_kinds.make(kind, documents, tmp_path / "words")
    output = built(tmp_path, documents, tmp_path / "words")
    dataset = open_dataset(output, "train")
    rows, vocabulary = dataset.gather(np.arange(dataset.rows)), dataset.vocabulary()
    share, rate = predicted(rows, Masker(vocabulary, dataset.masking, 1))
    assert dataset.masking.words == "scripts"
    assert share > 0.99 and 0.14 < rate < 0.16
    counts = dataset.manifest["counts"]
    assert counts["long_words"] < 0.01 * counts["words"]
    assert counts["words"] == count_words(dataset, vocabulary).words
    if kind != "wordpiece_cased":  # which splits ideographs itself
        spaces = dataclasses.replace(dataset.masking, words="spaces")
        assert predicted(rows, Masker(vocabulary, spaces, 1))[0] < 0.75


@pytest.mark.parametrize("kind", ["bpe", "unigram_bytes", "sentencepiece_bpe"])
def test_words_of_unspaced_text_are_whole_characters(kind: str, tmp_path: Path) -> None:
    """Each word that the rule finds decodes to whole characters."""
    documents = unspaced_text.documents(12)
    tokenizer_kinds.make(kind, documents[:6], tmp_path)
    ours = tokenizer.load(tmp_path)
    text = documents[6].replace("\n", "") + "䷀𠮷ไทย่่Pythonです"
    words = decoded_words(ours, text)
    assert not any("\ufffd" in word for word in words)
    assert "".join("".join(words).split()) == "".join(ours.decode(ours.encode(text)).split())


def decoded_words(ours: Tokenizer, text: str) -> list[str]:
    """The words of a text by unspaced, attached and continuation, in plain Python."""
    words: list[list[int]] = []
    alone = False
    for token in ours.encode(text).tolist():
        if words and ours.attached[token]:
            words[-1].append(token)
            continue
        inside = ours.continuation[token] and not ours.unspaced[token] and not alone
        alone = bool(ours.unspaced[token])
        if words and inside:
            words[-1].append(token)
        else:
            words.append([token])
    return [ours.decode(word) for word in words]


def test_text_with_spaces_keeps_the_manifest_of_before(sample_text: Path, vocab_dir: Path, tmp_path: Path) -> None:
    documents = sample_text.read_text(encoding="utf-8").split("\n\n")
    dataset = open_dataset(built(tmp_path, documents, vocab_dir), "train")
    assert "words" not in dataset.manifest["masking"] and dataset.masking.words == "spaces"
    assert 0 < dataset.manifest["counts"]["long_words"] < 0.01 * dataset.manifest["counts"]["words"]


@pytest.mark.slow
@pytest.mark.parametrize("language", ["zh", "ja", "th"])
def test_real_text_of_unspaced_scripts_is_masked_at_the_rate(
    bert_jax_data: Path, tmp_path: Path, language: str
) -> None:
    """With a Unigram vocabulary of the same text, rows of 64 tokens."""
    found = readers.documents(bert_jax_data / "multilingual" / f"{language}.txt.xz")
    documents = [document[:4000] for _, document in zip(range(100), found, strict=False)]
    tokenizer_kinds.make("unigram", [line for text in documents for line in text.split("\n")], tmp_path / "words")
    dataset = open_dataset(built(tmp_path, documents, tmp_path / "words"), "train")
    rows, vocabulary = dataset.gather(np.arange(min(dataset.rows, 500))), dataset.vocabulary()
    share, rate = predicted(rows, Masker(vocabulary, dataset.masking, 1))
    assert share > 0.98 and rate > 0.145
    assert dataset.manifest["counts"]["long_words"] < 0.01 * dataset.manifest["counts"]["words"]
