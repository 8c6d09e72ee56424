"""A trimmed vocabulary gives the text that it was trimmed for the same tokens, and any other text some tokens."""

import random

import pytest
import tokenizers
from tokenizer_kinds import make, random_texts

from bert_jax.commands.resize_vocabulary import texts_of
from bert_jax.errors import UserError
from bert_jax.interop.resizing import Usage
from bert_jax.tokenization import tokenizer
from bert_jax.tokenization.tokenizer import Tokenizer
from data_prep.units import Unit
from data_prep.worker import encode

KINDS = ("wordpiece_uncased", "bpe", "bpe_nfc", "unigram_bytes", "unigram_albert", "sentencepiece_bpe")


def trimmed(old: Tokenizer, texts: list[str]) -> Tokenizer:
    usage = Usage(old)
    usage.add(texts)
    return Tokenizer(usage.trim().spec)


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_has_the_same_tokens_as_before(kind, sample_text, tmp_path):
    lines = sample_text.read_text(encoding="utf-8").split("\n")[:400]
    library = make(kind, lines, tmp_path / "old")
    old = tokenizer.load(tmp_path / "old")
    texts = lines[:40] + random_texts(5, 60)
    usage = Usage(old)
    usage.add(texts[:30])
    usage.add(texts[30:])
    change = usage.trim()
    Tokenizer(change.spec).save(tmp_path / "new")
    new = tokenizer.load(tmp_path / "new")
    assert new.content_hash == Tokenizer(change.spec).content_hash
    assert new.vocab_size < 0.8 * old.vocab_size
    for text, ids in zip(texts, library(texts), strict=True):
        assert new.tokens(new.encode(text)) == old.tokens(ids), text
    assert [old.tokens(source) for source in change.sources] == [[token] for token in change.spec.all_tokens()]
    assert new.roles == old.roles and new.pair_separators == old.pair_separators
    if not kind.startswith("unigram"):  # whose library sums scores in another precision
        theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "new" / "tokenizer.json"))
        theirs.encode_special_tokens = True
        for text in lines[:40]:
            assert theirs.encode(text, add_special_tokens=False).ids == new.encode(text).tolist()
    for text in lines[200:260]:
        assert new.unk_id not in new.encode(text) or old.unk_id in old.encode(text)


@pytest.mark.parametrize("kind", ["bpe", "bpe_prefix_space", "unigram", "sentencepiece_bpe"])
def test_the_lines_of_a_document_have_the_same_tokens_in_shards(kind, sample_text, tmp_path):
    """There a line follows another after a space or, in scripts without spaces, directly."""
    draw = random.Random(0)
    words = ["".join(draw.choices("bdgklmnprstvz", k=4)) for _ in range(20)]
    unspaced = [form for word in words for form in (f"{word} {word}今天。", f"今天{word}。")]
    lines = sample_text.read_text(encoding="utf-8").split("\n")[:400]
    make(kind, lines + 10 * unspaced, tmp_path)
    old = tokenizer.load(tmp_path)
    document = lines[40:80] + unspaced[::2]
    unit = Unit("train", 0, ("\n".join(document).encode(),), "")
    new = trimmed(old, document)
    assert new.tokens(encode(new, unit).ids) == old.tokens(encode(old, unit).ids)


@pytest.mark.parametrize("kind", ["bpe", "bpe_nfc", "unigram", "sentencepiece_bpe"])
def test_the_sentences_of_a_line_have_the_same_tokens_in_shards(kind, sample_text, tmp_path):
    """Shards encode them one by one: a line has the token 」「, and its first sentence the token 。」."""
    pairs = ["今天」「明天", "今天”“明天", "」「”“"]
    ends = ["今天。」", "今天。”"]
    lines = sample_text.read_text(encoding="utf-8").split("\n")[:300]
    make(kind, lines + 90 * pairs + 40 * ends, tmp_path)
    old = tokenizer.load(tmp_path)
    document = [
        "「今天。」「明天",
        "“今天。”“明天。”“今天",
        "「今天。」「明天。」「今天。」「明天",
        "He left. “It rained.” It did.",
    ]
    unit = Unit("train", 0, ("\n".join(document).encode(),), "")
    new = trimmed(old, list(texts_of("\n".join(document))))
    assert new.tokens(encode(new, unit).ids) == old.tokens(encode(old, unit).ids)


def test_texts_of_tasks_with_markers_have_the_same_tokens(tmp_path):
    text = ["The old man and the sea.", "He was an old man who fished alone.", "seaward"]
    make("wordpiece_uncased", text * 9, tmp_path / "plain")
    tokenizer.load(tmp_path / "plain").save(tmp_path / "marked")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "marked" / "tokenizer.json"))
    library.add_special_tokens(["ENT", "[E2]"])
    library.save(str(tmp_path / "marked" / "tokenizer.json"))
    old = tokenizer.load(tmp_path / "marked")
    marked = ["theENTold man", "[E2]fished[E2] alone", "qqENTseaENT😀"]
    new = trimmed(old, marked)
    assert new.vocab_size < old.vocab_size
    for text in marked:
        for one, other in ((old, new), (old.of_tasks, new.of_tasks)):
            assert other.tokens(other.encode(text)) == one.tokens(one.encode(text)), text


def test_an_unknown_word_does_not_become_known_by_a_shorter_match(tmp_path):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "ab", "abx", "##xc", "##b", "other", "##unused"]
    (tmp_path / "vocab.txt").write_text("".join(token + "\n" for token in tokens))
    old = tokenizer.load(tmp_path)
    assert old.tokens(old.encode("abxc ab")) == ["[UNK]", "ab"]
    new = trimmed(old, ["abxc ab"])
    assert new.tokens(new.encode("abxc ab")) == ["[UNK]", "ab"]
    assert new.id_of("abx") is not None and new.id_of("other") is None
    assert trimmed(old, ["ab"]).id_of("abx") is None


def test_a_text_without_tokens_is_refused(tmp_path):
    make("wordpiece_uncased", ["a few words", "and more words"], tmp_path)
    with pytest.raises(UserError, match="it has no text"):
        trimmed(tokenizer.load(tmp_path), ["", "  "])
