"""Vocabularies that grow or shrink: added words are whole tokens, and the text keeps its tokens, as in the library."""

import itertools
import json
import random

import numpy as np
import pytest
import tokenizers
from tokenizer_kinds import ROBERTA_TOKENS, byte_pairs, make, random_texts

from bert_jax.commands.resize_vocabulary import document_texts
from bert_jax.errors import UserError
from bert_jax.interop.resizing import Usage, grow
from bert_jax.tokenization import tokenizer
from bert_jax.tokenization.tokenizer import Tokenizer
from data_prep.units import Unit
from data_prep.worker import encode

TRIMMED = ("wordpiece_uncased", "bpe", "bpe_nfc", "unigram_bytes", "unigram_albert", "sentencepiece_bpe")
GROWN = ("wordpiece_uncased", "bpe", "bpe_prefix_space", "unigram", "unigram_albert")
WORDS = ["hepatocyte", "troponin", "ÿþ"]
PLAIN = ["the cat sat on the mat.", "hello, (world)", "Isn't it?  1000 000", "[MASK] <mask>", "x" * 120]


def words_of(kind: str) -> list[str]:
    """Words as the tokenizer looks them up."""
    return WORDS if kind in ("wordpiece_cased", "bpe", "bpe_prefix_space", "unigram") else WORDS[:2]


@pytest.fixture(scope="module")
def trained(sample_text, tmp_path_factory):
    """Returns the tokenizer of a kind, trained on a part of the sample."""
    found = {}

    def load(kind):
        if kind not in found:
            folder = tmp_path_factory.mktemp(kind)
            make(kind, sample_text.read_text(encoding="utf-8").split("\n")[:400], folder)
            found[kind] = tokenizer.load(folder)
        return found[kind]

    return load


@pytest.fixture(scope="module", params=GROWN)
def pair(request, trained, tmp_path_factory):
    """The kind, its tokenizer, the change that adds the words, and the folder of the grown tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    old = trained(request.param)
    change = grow(old, words_of(request.param))
    Tokenizer(change.spec).save(folder)
    return request.param, old, change, folder


def token_of(kind: str, word: str, first: bool = False) -> str:
    """A word's token, at the beginning of a text or later in it, as the library's documents describe the kinds."""
    if kind.startswith("bpe"):
        spelled = "".join({"ÿ": "Ã¿", "þ": "Ã¾"}.get(one, one) for one in word)
        return spelled if first and kind == "bpe" else f"Ġ{spelled}"
    return f"▁{word}" if kind.startswith("unigram") else word


def test_each_word_is_one_token_at_the_beginning_and_later_for_us_and_for_the_library(pair):
    kind, _, _, folder = pair
    grown = tokenizer.load(folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for word in words_of(kind):
        text = f"{word} the {word}"
        tokens = grown.tokens(grown.encode(text))
        assert (tokens[0], tokens[-1]) == (token_of(kind, word, first=True), token_of(kind, word))
        assert library.encode(text, add_special_tokens=False).ids == grown.encode(text).tolist()
    if not kind.startswith("unigram"):
        tokens = grown.tokens(grown.encode("a (troponin),"))
        assert "troponin" in tokens


def test_other_texts_keep_their_tokens_and_saved_files_give_the_same_tokenizer(pair):
    kind, old, change, folder = pair
    grown = tokenizer.load(folder)
    assert grown.content_hash == Tokenizer(change.spec).content_hash
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True
    for text in PLAIN + [text for text in random_texts(3, 80) if not any(word in text for word in WORDS)]:
        assert grown.tokens(grown.encode(text)) == old.tokens(old.encode(text)), text
        if not kind.startswith("unigram"):  # whose library sums scores in another precision
            assert library.encode(text, add_special_tokens=False).ids == grown.encode(text).tolist()
    added = 2 if kind.startswith("bpe") else 1
    assert grown.vocab_size == old.vocab_size + added * len(words_of(kind))


def test_new_ids_follow_the_old_ones_which_stay_except_for_a_mask_that_is_last(pair):
    kind, old, change, _ = pair
    grown = Tokenizer(change.spec)
    stay = old.vocab_size - (kind == "unigram")
    assert grown.tokens(range(stay)) == old.tokens(range(stay))
    new = [grown.token_id(token_of(kind, word)) for word in words_of(kind)]
    assert new == sorted(new) and new[0] == stay
    if kind == "unigram":
        assert grown.mask_id == grown.vocab_size - 1


def test_rows_come_from_the_pieces_that_the_word_had_and_old_tokens_from_themselves(pair):
    kind, old, change, _ = pair
    sources = dict(zip(change.spec.all_tokens(), change.sources, strict=True))
    assert all(sources[token] == (index,) for index, token in enumerate(old.spec.all_tokens()))
    for word in words_of(kind):
        middle = old.encode(f"a {word}")[len(old.encode("a")) :]
        assert sources[token_of(kind, word)] == tuple(middle.tolist())


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("wordpiece_uncased", [], "has no words"),
        ("wordpiece_uncased", ["new", "words", "new"], "has 'new' 2 times"),
        ("wordpiece_uncased", ["two words"], "'two words' contains white space"),
        ("wordpiece_uncased", ["Berlin"], "changes 'Berlin' to 'berlin' before"),
        ("wordpiece_uncased", ["café"], "changes 'café' to 'cafe' before"),
        ("wordpiece_uncased", ["covid-19"], "splits 'covid-19' into covid - 19 before"),
        ("wordpiece_uncased", ["the"], r"has a token for 'the' \(id \d+\)"),
        ("wordpiece_uncased", ["##ing"], "splits '##ing' into # # ing"),
        ("wordpiece_uncased", ["x" * 101], r"would still be \[UNK\], since it is too long"),
        ("bpe", ["isn't"], 'splits "isn\'t" into'),
        ("bpe", ["a"], "has a token for 'a'"),
        ("unigram", ["ﬁbre"], "changes 'ﬁbre' to 'fibre'"),
        ("unigram", ["a\u2581b"], "contains white space"),
        ("unigram_albert", ["Berlin"], "changes 'Berlin' to 'berlin'"),
        ("sentencepiece_bpe", ["hepatocyte"], "SentencePiece BPE, which makes words by merges"),
    ],
)
def test_words_that_cannot_be_tokens_are_refused_in_one_line(kind, words, message, trained):
    with pytest.raises(UserError, match=message) as refused:
        grow(trained(kind), words)
    assert "\n" not in str(refused.value)


def test_unknown_text_keeps_its_score_when_an_unknown_word_is_added(trained):
    old = trained("unigram")
    change = grow(old, ["漢字", "hepatocyte"])
    grown = Tokenizer(change.spec)
    scores = [[piece.score for piece in spec.parsed.pieces if piece.type == 1] for spec in (old.spec, change.spec)]
    assert min(scores[0]) == min(scores[1]) and max(scores[0]) == max(scores[1])
    for text in ("字漢", "a漢", "the 字 and 漢", "hello漢字there"):
        assert grown.tokens(grown.encode(text)) == old.tokens(old.encode(text)), text
    assert grown.tokens(grown.encode("漢字 漢字")) == ["▁漢字", "▁漢字"]


def test_bytes_whose_merges_do_not_build_a_token_cannot_grow(tmp_path):
    merges = ["h e", "l l", "he ll"]
    folder = byte_pairs(tmp_path / "whole", merges)
    assert grow(tokenizer.load(folder), ["hello"]).spec.ignore_merges
    tokens = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(tokens | {"bad": len(tokens)}))
    with pytest.raises(UserError, match="do not build all of its tokens"):
        grow(tokenizer.load(folder), ["hello"])


def test_added_and_special_tokens_outside_of_the_model_keep_their_ids(tmp_path):
    folder = byte_pairs(tmp_path / "plain", ["h e", "l l"])
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens([*ROBERTA_TOKENS, "<mask>", "<extra>"])
    library.add_tokens([tokenizers.AddedToken("www", normalized=False)])
    (tmp_path / "added").mkdir()
    library.save(str(tmp_path / "added" / "tokenizer.json"))
    old = tokenizer.load(tmp_path / "added")
    assert {"<extra>", "www"}.isdisjoint(old.spec.tokens)
    change = grow(old, ["hello"])
    Tokenizer(change.spec).save(tmp_path / "grown")
    grown = tokenizer.load(tmp_path / "grown")
    assert grown.content_hash == Tokenizer(change.spec).content_hash
    assert list(itertools.islice(change.spec.all_tokens(), old.vocab_size)) == list(old.spec.all_tokens())
    assert grown.tokens(grown.encode("wwwhe hello <extra>"))[:3] == ["www", "he", "Ġhello"]
    np.testing.assert_array_equal(old.encode("wwwhe <extra>"), grown.encode("wwwhe <extra>"))


def trimmed(old: Tokenizer, texts: list[str]) -> Tokenizer:
    usage = Usage(old)
    usage.add(texts)
    return Tokenizer(usage.trim().spec)


@pytest.mark.parametrize("kind", TRIMMED)
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
    new = trimmed(old, list(document_texts("\n".join(document))))
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
    assert new.token_id("abx") is not None and new.token_id("other") is None
    assert trimmed(old, ["ab"]).token_id("abx") is None


def test_a_text_without_tokens_is_refused(tmp_path):
    make("wordpiece_uncased", ["a few words", "and more words"], tmp_path)
    with pytest.raises(UserError, match="it has no text"):
        trimmed(tokenizer.load(tmp_path), ["", "  "])
