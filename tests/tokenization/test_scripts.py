"""Scripts without spaces: their characters, tokens that begin with one, and whole-word masking of their texts."""

import dataclasses
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import tokenizer_kinds
from tokenizer_kinds import CHINESE, JAPANESE, THAI, unspaced_documents

from bert_jax.data.example import Rows
from bert_jax.data.loader import count_words
from bert_jax.data.masking.masker import Masker
from bert_jax.data.shards import open_dataset
from bert_jax.tokenization import tokenizer
from bert_jax.tokenization.specification import MARKS, UNSPACED, begins_unspaced, continues_character, is_unspaced
from bert_jax.tokenization.tokenizer import Tokenizer
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.readers import corpus as readers


def is_mark(character: str) -> bool:
    return any(first <= ord(character) <= last for first, last in MARKS)


def test_languages_without_spaces_are_told_from_others() -> None:
    assert all(is_unspaced(character) for character in "中国語ひらがなカタカナーｶﾅ，。「」、！ไทยລາວမြန်ខ្មែរབོད𠮷㐀")
    assert not any(is_unspaced(character) for character in " aé.,“”…—한국어ㅋㅠहिन्दी।عربيעβя0①")
    text = "".join((*CHINESE, *JAPANESE, *THAI))
    others = {character for character in text if not is_unspaced(character)}
    assert others <= {*"Python2020 “”"}


def test_marks_are_those_of_unicode() -> None:
    """In the blocks of Thai, Lao, Tibetan, Myanmar and Khmer, and of Kana."""
    for code in [*range(0x0E00, 0x10A0), *range(0x1780, 0x1800), *range(0x3040, 0x3100)]:
        category = unicodedata.category(chr(code))
        if category != "Cn":  # not assigned by this version of Unicode
            assert is_mark(chr(code)) == (category in ("Mn", "Mc")), hex(code)


def test_every_character_and_every_part_of_one_is_told_as_by_enumeration() -> None:
    """Each part at the beginning of a character may become any of the characters that begin so."""
    begun: dict[bytes, tuple[str, str]] = {}  # the lowest and the highest
    for code in range(0x80, sys.maxunicode + 1):
        outermost = code % 64 in (0, 63)  # the lowest or the highest with the same bytes but the last
        examined = code < 0x3200 or code % 101 == 0 or 0xFE00 < code < 0x10000
        if not (outermost or examined) or 0xD800 <= code < 0xE000:
            continue
        character = chr(code)
        whole = character.encode()
        if examined:
            mark = is_mark(character)
            assert begins_unspaced(whole + b"a") == (is_unspaced(character) and not mark), hex(code)
            assert continues_character(whole + b"a") == mark
            rests = [whole[at:] for at in range(1, len(whole))]
            assert all(continues_character(rest) and not begins_unspaced(rest) for rest in rests)
        for size in range(1, len(whole)):
            first, _ = begun.get(whole[:size], (character, character))
            begun[whole[:size]] = first, character
    for part, (first, last) in begun.items():
        assert begins_unspaced(part) == (is_unspaced(first) and is_unspaced(last)), part
        assert not continues_character(part)


@pytest.mark.parametrize("utf8", [b"", b"a", b" \xe4", b"<0xE4>"])
def test_ascii_is_neither(utf8: bytes) -> None:
    assert not begins_unspaced(utf8) and not continues_character(utf8)


def test_ranges_are_ascending_and_apart() -> None:
    for ranges in (UNSPACED, MARKS):
        borders = [border for one in ranges for border in (one[0], one[1] + 1)]
        assert borders == sorted(borders)


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
    documents = unspaced_documents(45)
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
    documents = unspaced_documents(12)
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
